"""Small models that have what PTQ steps must get right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mobile(nn.Module):
    """Uneven channels, ReLU6, a depthwise convolution behind a padding of its own, a shortcut, a head with a bias."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(8)
        self.expand = nn.Conv2d(8, 16, 1, bias=False)
        self.expand_bn = nn.BatchNorm2d(16)
        self.pad = nn.ZeroPad2d(1)
        self.depth = nn.Conv2d(16, 16, 3, groups=16, bias=False)
        self.depth_bn = nn.BatchNorm2d(16)
        self.project = nn.Conv2d(16, 8, 1, bias=False)
        self.project_bn = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 16, 3, groups=2)
        self.head = nn.Linear(16, 5)
        self.act = activation()
        for norm in (self.stem_bn, self.expand_bn, self.depth_bn, self.project_bn):
            nn.init.uniform_(norm.weight, 0.05, 3.0)
            nn.init.normal_(norm.bias, std=0.5)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.running_mean, std=0.3)
        with torch.no_grad():
            self.depth.weight.mul_(torch.logspace(-2, 0.5, 16).reshape(-1, 1, 1, 1))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem_bn(self.stem(x)))
        y = self.act(self.expand_bn(self.expand(x)))
        y = self.act(self.depth_bn(self.depth(self.pad(y))))
        x = x + self.project_bn(self.project(y))
        x = torch.relu(self.grouped(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Layer(nn.Module):
    """Attention and a feed-forward part, each with a norm before and a shortcut around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        scores = self.query(y) @ self.key(y).transpose(-1, -2) / 4 + mask
        x = x + self.out(F.softmax(scores, dim=-1) @ self.value(y))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Encoder(nn.Module):
    """Two layers with an outlier channel each; the mask is made from an input alone."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 3)
        with torch.no_grad():
            for layer in self.layers:
                layer.norm1.weight[3] = 25.0
                layer.norm2.weight[5] = 25.0
        self.eval()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, bias = self.embed(ids), (1 - mask.float())[:, None, :] * -1e4
        for layer in self.layers:
            x = layer(x, bias)
        logits: Tensor = self.head(x[:, 0])
        return logits


def images(count: int = 4, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 8, 8, generator=generator) for _ in range(count)]


def texts(count: int = 4, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ones = torch.ones(size, 6, dtype=torch.long)
    return [(torch.randint(0, 40, (size, 6), generator=generator), ones) for _ in range(count)]
