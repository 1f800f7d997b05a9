"""The blocks on which targets differ: residual, concatenation, depthwise, deconvolution, transformer."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.graph import Graph, capture


class Residual(nn.Module):
    """A stem, then a block whose shortcut is the stem's output, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.head(F.adaptive_avg_pool2d(F.relu(y + x), 1).flatten(1))


class Concat(nn.Module):
    """Two branches and a pooled one, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.end = nn.MaxPool2d(3, 1, 1), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.end(torch.cat([self.a(x).relu(), self.b(x).relu(), self.pool(x)], 1))


class Depthwise(nn.Module):
    """An inverted residual: point, depth, point, add."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bn1, self.act1 = nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6()
        self.depth = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(6), nn.ReLU6()
        self.down, self.pool = nn.Conv2d(6, 3, 1), nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act2(self.bn2(self.depth(self.act1(self.bn1(self.up(x))))))
        return self.pool(x + self.down(y))


class Deconv(nn.Module):
    """Down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2, bias=False)
        self.bn, self.end = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(F.relu(self.bn(self.up(F.relu(self.down(x))))))


class Transformer(nn.Module):
    """Embeddings, masked attention of two heads, and a feed-forward part, each with a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) + mask[:, None, None, :]).softmax(-1)
        x = self.norm2(x + self.o((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(x)))


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
BLOCKS: dict[str, tuple[type[nn.Module], tuple[Tensor, ...]]] = {
    "residual": (Residual, (IMAGE,)),
    "concat": (Concat, (IMAGE,)),
    "depthwise": (Depthwise, (IMAGE,)),
    "deconv": (Deconv, (IMAGE,)),
    "transformer": (Transformer, (torch.tensor([[1, 2, 3, 4, 5]]), torch.zeros(1, 5))),
}


def block(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A block with known weights, in evaluation mode, and a call of it."""
    torch.manual_seed(0)
    kind, inputs = BLOCKS[name]
    return kind().eval(), inputs


@cache
def graph_of(name: str) -> Graph:
    model, inputs = block(name)
    return capture(model, inputs)
