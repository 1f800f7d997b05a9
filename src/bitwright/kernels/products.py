"""Encode float32 tensors as 8-bit codes, and multiply codes.

A code has a scale per row or per tensor, and is rounded to nearest or stochastically. A row is a sample or a token. The
gradients of samples differ by orders of magnitude. With one scale for all of them, small gradients would be rounded to
zero. Products run with integer instructions, or are simulated in float with the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.quantizers.compiled import CompiledKernel as Compiled
from bitwright.quantizers.compiled import dense, is_worthwhile
from bitwright.quantizers.grid import SMALLEST

FULL = 127
TINY = SMALLEST
"""The smallest scale, also used for zeros: the inverses of smaller scales exceed float32."""
EXACT = 63
"""The largest code of one operand if 8-bit products are summed in saturating pairs: 2·255·63 fits into int16."""


@dataclass(frozen=True)
class Codes:
    """Unsigned codes. A value is (code − zero)·scale, with a scale for each row (the first axis) or one for all."""

    values: Tensor
    scales: Tensor
    zero: int

    @property
    def steps(self) -> Tensor:
        """The scales in a shape that broadcasts against the values."""
        return self.scales.view(-1, *(1,) * (self.values.dim() - 1))

    def float(self) -> Tensor:
        """The decoded values."""
        # torch vectorizes these passes; one compiled pass from bytes is slower
        plain = self.values.to(torch.float32)
        return (plain.sub_(self.zero) if self.zero else plain).mul_(self.steps)


@dataclass(frozen=True)
class Signed:
    """Signed codes with a scale for each row (the first axis)."""

    values: Tensor
    scales: Tensor

    def float(self) -> Tensor:
        """The decoded values."""
        return self.values.to(torch.float32) * self.scales.view(-1, *(1,) * (self.values.dim() - 1))


def encode(
    x: Tensor, seed: int | None = None, *, signed: bool = False, limit: int = FULL, whole: bool = False
) -> Codes:
    """Encode a tensor by the largest value of each row. Without negative values, all 255 levels are positive.

    With a `seed`, rounding is stochastic and unbiased. `signed`: codes are centered at 128, within ±`limit`. `whole`:
    one scale for all rows. Rows with NaN or infinity have the scale NaN.
    """
    x = x.detach().to(torch.float32)
    if not x.numel():
        return Codes(x.to(torch.uint8), x.new_ones(1), 128)
    x = x if dense(x) else x.contiguous()
    count = 1 if whole else x.shape[0]
    rows = x.as_strided((count, x.numel() // count), (x.numel() // count, 1))  # in memory order
    around = torch.tensor(float(limit) if signed else 0.0, device=x.device)
    more = [] if seed is None else [torch.tensor(seed & 0x7FFFFFFF, device=x.device)]
    values, scales, zero = _run(_NEAREST if seed is None else _STOCHASTIC, rows, around, *more)
    return Codes(values.as_strided(x.shape, x.stride()), scales, int(zero))


def encode_rows(x: Tensor, limit: int, *, whole: bool = False) -> Signed:
    """Signed codes within ±`limit`, with a scale for each row of the first axis, or one for all (`whole`)."""
    x = x.detach().to(torch.float32)
    x = x if dense(x) else x.contiguous()
    rows = x.as_strided((x.shape[0], x.numel() // x.shape[0]), (x.numel() // x.shape[0], 1))  # in memory order
    values, scales = _run(_ROWS, rows, float(limit), whole)
    return Signed(values.as_strided(x.shape, x.stride()), scales)


def encode_columns(x: Tensor, limit: int, *, whole: bool = False) -> Signed:
    """The codes of a matrix's columns, as rows of the transpose, without copying."""
    x = x.detach().to(torch.float32).contiguous()
    values, scales = _run(_COLUMNS, x, float(limit), whole)
    return Signed(values.t(), scales)


def signed_bytes(values: Tensor) -> Tensor:
    """Unsigned codes minus 128."""
    return values.bitwise_xor(128).view(torch.int8)


def _usable(scale: Tensor) -> Tensor:
    """Replace tiny scales. Non-finite ones are kept, so that loss checks and loss scaling detect them."""
    return torch.where(scale < float("inf"), scale.clamp(min=TINY), float("nan"))


def _grid(x: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of the rows, and the common zero. `signed` is the largest code, or 0 if the values decide."""
    low, high = x.amin(1), x.amax(1)
    both = (signed > 0) | (low < 0).any()  # NaN compares false and doesn't affect other rows
    most = torch.where(signed > 0, signed, float(FULL))
    scale = torch.where(both, torch.maximum(high, -low) / most, high / 255)
    return _usable(scale), torch.where(both, 128.0, 0.0)


def _nearest(x: Tensor, signed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, zero = _grid(x, signed)
    return (x * (1.0 / scale)[:, None] + zero).round().clamp(0, 255).to(torch.uint8), scale, zero


def _stochastic(x: Tensor, signed: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Use noise from a hash of position and seed: no generator state and no second pass over memory."""
    scale, zero = _grid(x, signed)
    place = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
    bits = place + seed.to(torch.int32) * 0x61C88647
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x45D9F3B
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * 0x2C1B3C6D
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    noise = (bits & 0xFFFFFF).to(torch.float32) * (1.0 / (1 << 24))
    return torch.floor(x * (1.0 / scale)[:, None] + zero + noise).clamp(0, 255).to(torch.uint8), scale, zero


def _rows(x: Tensor, limit: float, whole: bool) -> tuple[Tensor, Tensor]:
    return _along(x, limit, whole, 1)


def _columns(x: Tensor, limit: float, whole: bool) -> tuple[Tensor, Tensor]:
    return _along(x, limit, whole, 0)


def _along(x: Tensor, limit: float, whole: bool, axis: int) -> tuple[Tensor, Tensor]:
    """Encode by the largest value along an axis."""
    largest = x.abs().amax(axis)
    scales = _usable((largest.amax().expand_as(largest).contiguous() if whole else largest) / limit)
    return (x / scales.unsqueeze(axis)).round().clamp(-limit, limit).to(torch.int8), scales


def _run(kernel: Compiled, x: Tensor, *more: Any) -> Any:
    return (kernel.compiled if is_worthwhile(x) else kernel.function)(x, *more)


_NEAREST, _STOCHASTIC = Compiled(_nearest), Compiled(_stochastic)
_ROWS, _COLUMNS = Compiled(_rows), Compiled(_columns)


Ints = Sequence[int]
DEEP = 1 << 16
"""Longer sums of products may exceed int32: 255·127·66,312 does."""


@cache
def missing() -> str | None:
    """Why this CPU can't run integer products; None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if not hasattr(torch.ops.onednn, "qconv2d_pointwise"):
        return "this torch has no onednn::qconv2d_pointwise"
    return None


@cache
def limit() -> int:
    """The largest code of the second operand for exact products on this CPU, found by a test product."""
    ones = torch.full((16, 64), FULL, dtype=torch.int8)
    return FULL if bool((torch._int_mm(ones, ones.t()) == FULL * FULL * 64).all()) else EXACT


def linear(x: Codes, weight: Signed, bias: Tensor | None, *, simulate: bool) -> Tensor:
    """x · weightᵀ + bias, with integers where supported, otherwise with floats of the same values."""
    depth = x.values.shape[-1]
    if simulate or not _runs(x.values.numel() // depth, depth, weight.values):
        return F.linear(x.float(), weight.float(), bias)
    if depth > DEEP:
        parts = zip(x.values.split(DEEP, -1), weight.values.split(DEEP, -1), strict=True)
        sums = [
            linear(Codes(one, x.scales, x.zero), Signed(other, weight.scales), None, simulate=False)
            for one, other in parts
        ]
        return _together(sums, bias)
    rows = x.values.reshape(-1, depth)
    offset = _shifted(weight.values.sum(1, dtype=torch.int32), x)[None]
    steps = x.scales.expand(len(rows)).contiguous()
    shift = torch.zeros_like(weight.scales) if bias is None else bias
    result = torch.empty(len(rows), len(weight.values), device=rows.device)
    for part in _parts(rows, result.shape[1]):  # limits the size of the integer buffer
        found = _multiplied(signed_bytes(rows[part]), weight.values, passing=True)
        _to_floats(result[part], found, offset, steps[part, None], weight.scales[None], shift[None])
    return result.view(*x.values.shape[:-1], len(weight.values))


def transposed(grad: Codes, x: Codes, *, simulate: bool) -> Tensor:
    """gradᵀ · x, summed over rows. `grad` is signed with one scale that includes the scales of `x`."""
    count, outputs = grad.values.shape
    if simulate or not _runs(outputs, count, x.values.t()):
        return grad.float().t() @ (x.values.to(torch.float32) - x.zero)
    if count > DEEP:
        parts = zip(grad.values.split(DEEP), x.values.split(DEEP), strict=True)
        sums = [transposed(Codes(g, grad.scales, 128), Codes(c, x.scales, x.zero), simulate=False) for g, c in parts]
        return _together(sums, None)
    # if products saturate, the codes of the second operand must be small: that is the gradient
    turned = grad.values.device.type == "cpu" and limit() < FULL
    found = None
    for part in _parts(grad.values, outputs + x.values.shape[1]):
        own, other = signed_bytes(grad.values[part]).t(), signed_bytes(x.values[part]).t()
        more = _multiplied(other, own).t() if turned else _multiplied(own, other)
        found = more if found is None else found.add_(more)
    assert found is not None  # there is at least one row
    offset = _shifted(grad.values.sum(0, dtype=torch.int32) - 128 * count, x)[:, None]
    result = torch.empty_like(found, dtype=torch.float32)
    one = grad.scales.new_ones(1, 1)
    _to_floats(result, found, offset, grad.scales.view(1, 1), one, torch.zeros_like(one))
    return result


def _runs(rows: int, depth: int, second: Tensor) -> bool:
    """Whether this device multiplies integers of these sizes. CUDA requires multiples of 8."""
    if second.device.type == "cpu":
        return missing() is None
    return second.device.type == "cuda" and not depth % 8 and not len(second) % 8 and rows > 16


def _shifted(sums: Tensor, x: Codes) -> Tensor:
    """The correction for `x`'s codes minus 128, from the sums of the other operand."""
    return sums * (128 - x.zero)


def _parts(rows: Tensor, width: int) -> list[slice]:
    """Split rows on a CPU. Very small parts are slower, because the other operand is packed for each."""
    if rows.device.type != "cpu":  # CUDA's size requirements would exclude the last part
        return [slice(None)]
    many = max(_AT_ONCE // width, _ROWS_AT_ONCE)
    return [slice(start, start + many) for start in range(0, len(rows), many)]


def _multiplied(first: Tensor, second: Tensor, *, passing: bool = False) -> Tensor:
    """first · secondᵀ in integers. `passing`: the result is overwritten by the next call."""
    if first.device.type == "cuda":  # requires both operands with a contiguous reduction axis
        first, second = first.contiguous(), second.contiguous()
    if not passing or first.device.type == "cuda":
        return torch._int_mm(first, second.t())
    return torch._int_mm(first, second.t(), out=_space(len(first), len(second)))


class _Own(threading.local):
    space: Tensor | None = None


_OWN = _Own()


def _space(rows: int, columns: int) -> Tensor:
    """A buffer per thread. New blocks of this size would fragment memory: about 5 % of a process."""
    count = rows * columns
    if count > _KEPT:
        return torch.empty(rows, columns, dtype=torch.int32)
    if _OWN.space is None or _OWN.space.numel() < count:
        with torch.inference_mode(False):  # an inference tensor couldn't be written to in training
            _OWN.space = torch.empty(count, dtype=torch.int32)
    return _OWN.space[:count].view(rows, columns)


def _to_floats(result: Tensor, *given: Tensor) -> None:
    (_FLOATS.compiled if is_worthwhile(result) else _FLOATS.function)(result, *given)


def _floats(result: Tensor, found: Tensor, offset: Tensor, steps: Tensor, scales: Tensor, bias: Tensor) -> None:
    result.copy_(found + offset).mul_(steps).mul_(scales).add_(bias)


_FLOATS = Compiled(_floats)
_AT_ONCE, _ROWS_AT_ONCE, _KEPT = 1 << 20, 1024, 1 << 22  # integers, rows, integers


def _together(sums: list[Tensor], bias: Tensor | None) -> Tensor:
    whole = torch.stack(sums).sum(0)
    return whole if bias is None else whole + bias


def onednn_conv2d(
    x: Codes, weight: Signed, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """The convolution, in channels-last memory format."""
    values, one = x.values.contiguous(memory_format=torch.channels_last), len(x.scales) == 1
    scale, rest = (float(x.scales), bias) if one else (1.0, None)  # scales per row are applied afterwards
    if x.zero:  # oneDNN packs weights several times slower for a nonzero zero point
        values = F.pad(values, (padding[1], padding[1], padding[0], padding[0]), value=x.zero)
        values, padding = values.contiguous(memory_format=torch.channels_last), (0, 0)
        less = weight.values.sum((1, 2, 3), dtype=torch.int32) * weight.scales * (-scale * x.zero)
        rest = less if rest is None else rest + less
    shape = (list(stride), list(padding), list(dilation), groups)
    codes, zeros = weight.values.contiguous(), torch.zeros(weight.values.shape[0], dtype=torch.int32)
    packed = torch.ops.onednn.qconv_prepack(codes, weight.scales, scale, 0, *shape, list(values.shape))
    result: Tensor = torch.ops.onednn.qconv2d_pointwise(
        values, scale, 0, packed, weight.scales, zeros, rest, *shape, 1.0, 0, torch.float32, "none", [], ""
    )
    if one:
        return result
    return result.mul_(x.steps) if bias is None else torch.addcmul(bias.view(-1, 1, 1), result, x.steps)


def conv2d(
    x: Codes,
    weight: Signed,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    *,
    simulate: bool,
) -> Tensor:
    """Convolve with integers where supported, otherwise with floats of the same values."""
    shape = (stride, padding, dilation, groups)
    channels, *kernel = weight.values.shape[1:]
    if simulate or x.values.device.type != "cpu" or missing() is not None or prod(kernel) > DEEP:
        return F.conv2d(x.float(), weight.float(), bias, list(stride), list(padding), list(dilation), groups)
    if channels * prod(kernel) <= DEEP:
        return onednn_conv2d(x, weight, bias, *shape)
    most = DEEP // prod(kernel)
    parts = zip(x.values.unflatten(1, (groups, channels)).split(most, 2), weight.values.split(most, 1), strict=True)
    sums = [
        onednn_conv2d(
            Codes(one.flatten(1, 2), x.scales, x.zero), Signed(other.contiguous(), weight.scales), None, *shape
        )
        for one, other in parts
    ]
    return _together(sums, None if bias is None else bias.view(-1, 1, 1))


def conv2d_weight(
    grad: Codes, x: Codes, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, *, simulate: bool
) -> Tensor:
    """The gradient of the weight: each shifted view of the input times the output's gradient, as one product.

    Samples are summed, so `grad` has one scale that includes the scales of `x`.
    """
    pixels = x.values.permute(0, 2, 3, 1)
    sides = (0, 0, padding[1], padding[1], padding[0], padding[0])
    padded = F.pad(pixels, sides, value=x.zero).contiguous()
    batch, row, column, _ = padded.stride()
    count, outputs, height, width = grad.values.shape
    windows = padded.as_strided(
        (count, height, width, *kernel, pixels.shape[3]),
        (batch, row * stride[0], column * stride[1], row * dilation[0], column * dilation[1], 1),
    )
    rows = Codes(grad.values.permute(0, 2, 3, 1).reshape(-1, outputs), grad.scales, grad.zero)
    # always copy: overlapping rows can be a view, which oneDNN reads incorrectly
    columns = Codes(windows.contiguous().view(count * height * width, -1), x.scales, x.zero)
    found = transposed(rows, columns, simulate=simulate)
    return found.reshape(outputs, *kernel, pixels.shape[3]).permute(0, 3, 1, 2)
