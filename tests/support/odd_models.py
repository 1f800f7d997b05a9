"""Models with unusual operators, inputs and outputs, each with example batches."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.build()

    def build(self) -> None:
        raise NotImplementedError


class TopK(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.a(x))
        i = y.topk(4, -1).indices
        return self.b(torch.zeros_like(y).scatter(-1, i, 1.0) * x)


class NestedDict(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        return {"logits": self.b(y), "aux": {"hidden": [y, (y * 2, {"deep": y.mean(-1)})], "n": None}}


class SharedModule(Base):
    def build(self) -> None:
        self.a = nn.Linear(8, 8)
        self.c = nn.ModuleList([self.a, nn.ReLU(), self.a])
        self.h = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        for m in self.c:
            x = m(x)
        return self.h(self.a(x))


class SharedWeight(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.conv = nn.Conv1d(8, 8, 1)

    def forward(self, x: Any) -> Any:
        return self.b(F.gelu(self.a(x))) + F.linear(x, self.conv.weight[:, :, 0])


class Tied(Base):
    def build(self) -> None:
        self.e = nn.Embedding(30, 8)
        self.l = nn.Linear(8, 8)
        self.h = nn.Linear(8, 30, bias=False)
        self.h.weight = self.e.weight

    def forward(self, ids: Any) -> Any:
        return self.h(torch.tanh(self.l(self.e(ids))))


class Sdpa(Base):
    def build(self) -> None:
        self.qkv = nn.Linear(8, 24)
        self.o = nn.Linear(8, 8)

    def forward(self, x: Any, mask: Any = None) -> Any:
        q, k, v = (t.view(x.shape[0], -1, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )
        return self.o(y.transpose(1, 2).reshape(x.shape))


class Gqa(Base):
    def build(self) -> None:
        self.q = nn.Linear(8, 16)
        self.kv = nn.Linear(8, 8)
        self.o = nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
        k, v = (z.view(b, t, 1, 4).transpose(1, 2) for z in self.kv(x).split(4, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3).transpose(1, 2).flatten(2))


class Fft(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.b(torch.fft.irfft(torch.fft.rfft(self.a(x), dim=-1) * 0.5, n=8, dim=-1))


class FftMix(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x) + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)


class Complex(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        z = torch.view_as_complex(self.a(x).view(*x.shape[:-1], 4, 2))
        return self.b((z * z).abs())


class BiLstm(Base):
    def build(self) -> None:
        self.r = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)
        self.h = nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        y, (h, _) = self.r(x)
        return self.h(y), h


class BiGru(Base):
    def build(self) -> None:
        self.r = nn.GRU(8, 6, bidirectional=True)
        self.h = nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        y, _ = self.r(x.transpose(0, 1))
        return self.h(y[-1])


class Cell(Base):
    def build(self) -> None:
        self.c = nn.LSTMCell(8, 6)
        self.g = nn.GRUCell(6, 6)
        self.h = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        h = c = g = x.new_zeros(x.shape[0], 6)
        for t in range(3):
            h, c = self.c(x[:, t], (h, c))
            g = self.g(h, g)
        return self.h(g)


class Mha(Base):
    def build(self) -> None:
        self.m = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=6)
        self.h = nn.Linear(8, 4)

    def forward(self, x: Any, kv: Any, pad: Any) -> Any:
        y, w = self.m(x, kv, kv, key_padding_mask=pad, need_weights=True, average_attn_weights=False)
        return self.h(y), w


class Trans(Base):
    def build(self) -> None:
        self.t = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, norm_first=True)
        self.h = nn.Linear(8, 4)

    def forward(self, src: Any, tgt: Any) -> Any:
        return self.h(self.t(src, tgt, tgt_mask=nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])))


class Enc(Base):
    def build(self) -> None:
        self.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu"), 2)
        self.h = nn.Linear(8, 4)

    def forward(self, x: Any, pad: Any) -> Any:
        return self.h(self.t(x, src_key_padding_mask=pad))


class SteRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class CustomFn(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.b(SteRound.apply(self.a(x) * 4) / 4)


class InPlace(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        y[:, ::2] += x[:, 1::2]
        v = y.view(-1, 2, 4)
        v[:, 0].mul_(2).clamp_(-3, 3)
        y.narrow(1, 0, 3).add_(1)
        y[y < 0] = 0.1
        return self.b(y)


class IndexPut(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        o = torch.zeros_like(y)
        o.index_add_(1, torch.tensor([1, 0, 3, 2, 5, 4, 7, 6]), y)
        o.masked_fill_(o > 1, 1.0)
        return self.b(o.index_select(1, torch.arange(7, -1, -1)))


class Deconv(Base):
    def build(self) -> None:
        self.a = nn.Conv2d(3, 8, 3, 2, 1)
        self.b = nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=2)
        self.c = nn.ConvTranspose2d(8, 3, 3, stride=2, output_padding=1, padding=1, dilation=1)

    def forward(self, x: Any) -> Any:
        return self.c(F.relu(self.b(F.leaky_relu(self.a(x)))))


class Grid(Base):
    def build(self) -> None:
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.loc = nn.Linear(3, 6)
        self.b = nn.Conv2d(8, 4, 1)

    def forward(self, x: Any) -> Any:
        th = self.loc(x.mean((2, 3))).view(-1, 2, 3)
        g = F.affine_grid(th, list(x.shape), align_corners=False)
        return self.b(F.grid_sample(self.a(x), g, align_corners=False, padding_mode="border"))


class Einsum(Base):
    def build(self) -> None:
        self.a = nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(2, 4, 5))
        self.k = nn.Parameter(torch.randn(5, 4, 3))

    def forward(self, x: Any) -> Any:
        y = self.a(x).view(-1, 2, 4)
        z = torch.einsum("bhd,hde->bhe", y, self.w)
        z2 = torch.einsum("bhe,bge->bhg", z, z)
        return torch.einsum("bhe,edk,bhd->bk", z, self.k, y) + z2.sum((1, 2))[:, None]


class Conv3(Base):
    def build(self) -> None:
        self.a = nn.Conv3d(2, 6, (1, 3, 3), padding=(0, 1, 1))
        self.n = nn.BatchNorm3d(6)
        self.b = nn.Conv3d(6, 6, (3, 1, 1), groups=3, padding=(1, 0, 0))
        self.p = nn.AvgPool3d(2)
        self.h = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.h(self.p(F.relu(self.b(F.relu(self.n(self.a(x)))))).mean((2, 3, 4)))


class ChLast(Base):
    def build(self) -> None:
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.h = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        y = F.hardswish(self.b(self.a(x.contiguous(memory_format=torch.channels_last))))
        return self.h(y.permute(0, 2, 3, 1).contiguous()).mean((1, 2))


class Rearr(Base):
    def build(self) -> None:
        self.a = nn.Linear(12, 16)
        self.b = nn.Linear(16, 16)
        self.h = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        b, c, H, W = x.shape
        p = x.reshape(b, c, H // 2, 2, W // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 12)
        y = self.b(F.silu(self.a(p)))
        y = y.unflatten(1, (H // 2, W // 2)).roll((1, 1), (1, 2)).movedim(-1, 1)
        return self.h(y.flatten(2).swapaxes(1, 2)).amax(1)


class BufUpd(Base):
    def build(self) -> None:
        self.a = nn.Linear(8, 4)
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ema", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        self.n.add_(1)
        if self.training:
            self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.a(x - self.ema)


class OptNone(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any, bias: Any = None, scale: Any = None, *, gate: Any = None) -> Any:
        y = self.a(x)
        if bias is not None:
            y = y + bias
        if scale is not None:
            y = y * scale
        if gate is not None:
            y = y * torch.sigmoid(gate)
        return self.b(y)


class KwOnly(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(6, 8)

    def forward(self, *, left: Any, right: Any, flag: Any = True) -> Any:
        return self.a(left) + self.b(right) if flag else self.a(left)


class Pixel(Base):
    def build(self) -> None:
        self.a = nn.Conv2d(3, 16, 3, padding="same", padding_mode="reflect")
        self.b = nn.Conv2d(4, 4, 5, padding="same", dilation=2)

    def forward(self, x: Any) -> Any:
        return F.interpolate(
            self.b(F.pixel_shuffle(self.a(x), 2)), scale_factor=0.5, mode="bilinear", align_corners=False
        ) + F.adaptive_avg_pool2d(self.a(x)[:, :4], 1)


class UnfoldFold(Base):
    def build(self) -> None:
        self.a = nn.Linear(12, 12)
        self.b = nn.Conv2d(3, 4, 1)

    def forward(self, x: Any) -> Any:
        return self.b(
            F.fold(self.a(F.unfold(x, 2, stride=2).transpose(1, 2)).transpose(1, 2), x.shape[-2:], 2, stride=2)
        )


class WNorm(Base):
    def build(self) -> None:
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))

    def forward(self, x: Any) -> Any:
        return self.b(F.elu(self.a(x)))


class BiLin(Base):
    def build(self) -> None:
        self.a = nn.Bilinear(8, 6, 5)
        self.e = nn.EmbeddingBag(20, 6, mode="mean")
        self.h = nn.Linear(5, 4)

    def forward(self, x: Any, ids: Any) -> Any:
        return self.h(self.a(x, self.e(ids)))


class Cum(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        y = (
            torch.cumsum(y, 1) / torch.arange(1, 9)
            + torch.logsumexp(y, 1, keepdim=True)
            + F.softplus(y).cumprod(1).log1p()
        )
        return self.b(torch.where(torch.isfinite(y), y, torch.zeros_like(y)).sort(-1).values), y.argmax(-1)


class Scan(Base):
    def build(self) -> None:
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.h = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        h = torch.zeros_like(x[:, 0])
        o = []
        for t in range(x.shape[1]):
            h = torch.sigmoid(self.a(x[:, t])) * h + torch.tanh(self.b(h))
            o.append(h)
        return self.h(torch.stack(o, 1))


Out = namedtuple("Out", ["y", "z"])


class NT(Base):
    def build(self) -> None:
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.a(x["in"]["left"]) + x["in"]["right"][0]
        return Out(y=self.b(y), z=OrderedDict(k=y))


class GLU(Base):
    def build(self) -> None:
        self.a = nn.Conv1d(4, 8, 3, padding=1)
        self.b = nn.Conv1d(4, 4, 3, padding=2, dilation=2)
        self.n = nn.GroupNorm(2, 4)
        self.i = nn.InstanceNorm1d(4, affine=True)
        self.p = nn.PReLU(4)

    def forward(self, x: Any) -> Any:
        return self.p(self.i(self.b(self.n(F.glu(self.a(x), 1))))) + F.max_pool1d(x, 3, 1, 1)


class Dist(Base):
    def build(self) -> None:
        self.a = nn.Linear(8, 8)
        self.c = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        return (
            -torch.cdist(y, self.c)
            + F.cosine_similarity(y[:, None], self.c[None], -1)
            + F.normalize(y) @ F.normalize(self.c).T
        )


class Lin0(Base):
    def build(self) -> None:
        self.a = nn.Linear(8, 8)
        self.t = nn.Parameter(torch.randn(8, 3, 3))
        self.h = nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return (
            self.h(torch.tensordot(self.a(x), self.t, 1).diagonal(dim1=1, dim2=2).contiguous())
            + torch.outer(x[:, 0], self.h.bias)
            + torch.kron(x[:, :1], torch.ones(1, 2))
        )


def _row() -> Any:
    return (torch.randn(4, 8),)


def _sequence() -> Any:
    return (torch.randn(3, 5, 8),)


def _image() -> Any:
    return (torch.randn(2, 3, 8, 8),)


ROWS = (TopK, NestedDict, SharedModule, SharedWeight, Fft, CustomFn, InPlace, IndexPut, Einsum, BufUpd, WNorm, Lin0)
SEQUENCES = (FftMix, BiLstm, BiGru, Gqa, Cell, Scan, Sdpa)
IMAGES = (Deconv, Grid, ChLast, Rearr, Pixel, UnfoldFold)
PADS = torch.tensor([[False] * 4, [False] * 3 + [True], [False, False, True, True]])

CASES: dict[str, tuple[type[Base], Callable[[], Any]]] = {
    **{model.__name__: (model, _row) for model in (*ROWS, OptNone, Complex, Cum, Dist)},
    **{model.__name__: (model, _sequence) for model in SEQUENCES},
    **{model.__name__: (model, _image) for model in IMAGES},
    "Tied": (Tied, lambda: (torch.randint(0, 30, (3, 5)),)),
    "SdpaBool": (Sdpa, lambda: (torch.randn(3, 5, 8), torch.rand(3, 1, 5, 5) > -1)),
    "SdpaFloat": (Sdpa, lambda: (torch.randn(3, 5, 8), torch.randn(5, 5))),
    "Mha": (Mha, lambda: (torch.randn(3, 5, 8), torch.randn(3, 4, 6), PADS)),
    "Trans": (Trans, lambda: (torch.randn(2, 5, 8), torch.randn(2, 4, 8))),
    "Enc": (Enc, lambda: (torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))),
    "Conv3": (Conv3, lambda: (torch.randn(2, 2, 4, 6, 6),)),
    "OptNoneKw": (
        OptNone,
        lambda: {"x": torch.randn(4, 8), "bias": None, "scale": torch.randn(4, 1), "gate": torch.randn(4, 8)},
    ),
    "KwOnly": (KwOnly, lambda: {"left": torch.randn(4, 8), "right": torch.randn(4, 6)}),
    "BiLin": (BiLin, lambda: (torch.randn(4, 8), torch.randint(0, 20, (4, 3)))),
    "NT": (NT, lambda: ({"in": {"left": torch.randn(4, 8), "right": [torch.randn(4, 8)]}},)),
    "GLU": (GLU, lambda: (torch.randn(3, 4, 10),)),
}
# torch.onnx can't export these float models either: the code of the error
REFUSED = {"Cum": "torch-onnx-failed", "Dist": "torch-onnx-failed", "Trans": "torch-export-failed"}
