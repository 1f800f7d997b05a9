"""Encode floats as 8-bit codes.

A code has a scale per row or per tensor, and is rounded to nearest or stochastically. A row is a sample or a token. The
gradients of samples differ by orders of magnitude. With one scale for all of them, small gradients would be rounded to
zero. Triton kernels give the same codes on CUDA devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwright.kernels.triton import launch
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
    zero: int | Tensor
    """Of a CUDA device, a tensor: reading it would wait for the device."""

    @property
    def steps(self) -> Tensor:
        """The scales in a shape that broadcasts against the values."""
        return self.scales.view(-1, *(1,) * (self.values.dim() - 1))

    def float(self) -> Tensor:
        """The decoded values."""
        # torch vectorizes these passes; one compiled pass from bytes is slower
        plain = self.values.to(torch.float32)
        return (plain.sub_(self.zero) if isinstance(self.zero, Tensor) or self.zero else plain).mul_(self.steps)


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
    x = x.detach()
    if not x.numel():
        return Codes(x.to(torch.uint8), x.new_ones(1, dtype=torch.float32), 128)
    in_triton = launch.missing(x.device) is None
    x = x if in_triton else x.to(torch.float32)  # Triton kernels read 16-bit floats
    x = x if dense(x) else x.contiguous()
    count = 1 if whole else x.shape[0]
    rows = x.as_strided((count, x.numel() // count), (x.numel() // count, 1))  # in memory order
    around = torch.full((), float(limit) if signed else 0.0, device=x.device)
    if in_triton:
        from bitwright.kernels.triton import gemm

        scales, zero = _grid(*gemm.ranges(rows), around)
        values = gemm.codes(rows, scales, zero, seed)
        return Codes(values.as_strided(x.shape, x.stride()), scales, zero.to(torch.int32))
    more = [] if seed is None else [torch.tensor(seed & 0x7FFFFFFF, device=x.device)]
    values, scales, zero = _run(_NEAREST if seed is None else _STOCHASTIC, rows, around, *more)
    return Codes(values.as_strided(x.shape, x.stride()), scales, int(zero))


def encode_rows(x: Tensor, limit: int, *, whole: bool = False) -> Signed:
    """Signed codes within ±`limit`, with a scale for each row of the first axis, or one for all (`whole`)."""
    x = x.detach().to(torch.float32)
    x = x if dense(x) else x.contiguous()
    rows = x.as_strided((x.shape[0], x.numel() // x.shape[0]), (x.numel() // x.shape[0], 1))  # in memory order
    values, scales = _signed(rows, limit, whole) or _run(_ROWS, rows, float(limit), whole)
    return Signed(values.as_strided(x.shape, x.stride()), scales)


def encode_columns(x: Tensor, limit: int, *, whole: bool = False) -> Signed:
    """The codes of a matrix's columns, as rows of the transpose, without copying."""
    x = x.detach().to(torch.float32).contiguous()
    if (found := _signed(x.t(), limit, whole)) is not None:
        return Signed(*found)
    values, scales = _run(_COLUMNS, x, float(limit), whole)
    return Signed(values.t(), scales)


def _signed(rows: Tensor, limit: int, whole: bool) -> tuple[Tensor, Tensor] | None:
    """The signed codes and scales of rows by Triton; None if it doesn't run on this device."""
    if launch.missing(rows.device) is not None:
        return None
    from bitwright.kernels.triton import gemm

    low, high = gemm.ranges(rows)
    scales = _signed_scales(torch.maximum(high, -low), float(limit), whole)
    return gemm.signed_codes(rows, scales, limit), scales


def signed_bytes(values: Tensor) -> Tensor:
    """Unsigned codes minus 128."""
    return values.bitwise_xor(128).view(torch.int8)


def _usable(scale: Tensor) -> Tensor:
    """Replace tiny scales. Non-finite ones are kept, so that loss checks and loss scaling detect them."""
    return torch.where(scale < float("inf"), scale.clamp(min=TINY), float("nan"))


def _grid(low: Tensor, high: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of rows with these ranges, and the common zero. `signed` is the largest code; 0: the values decide."""
    both = (signed > 0) | (low < 0).any()  # NaN compares false and doesn't affect other rows
    most = torch.where(signed > 0, signed, float(FULL))
    scale = torch.where(both, torch.maximum(high, -low) / most, high / 255)
    return _usable(scale), torch.where(both, 128.0, 0.0)


def _nearest(x: Tensor, signed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, zero = _grid(x.amin(1), x.amax(1), signed)
    return (x * (1.0 / scale)[:, None] + zero).round().clamp(0, 255).to(torch.uint8), scale, zero


def _stochastic(x: Tensor, signed: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Use noise from a hash of position and seed: no generator state and no second pass over memory."""
    scale, zero = _grid(x.amin(1), x.amax(1), signed)
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
    scales = _signed_scales(x.abs().amax(axis), limit, whole)
    return (x / scales.unsqueeze(axis)).round().clamp(-limit, limit).to(torch.int8), scales


def _signed_scales(largest: Tensor, limit: float, whole: bool) -> Tensor:
    return _usable((largest.amax().expand_as(largest).contiguous() if whole else largest) / limit)


def _run(kernel: Compiled, x: Tensor, *more: Any) -> Any:
    return (kernel.compiled if is_worthwhile(x) else kernel.function)(x, *more)


_NEAREST, _STOCHASTIC = Compiled(_nearest), Compiled(_stochastic)
_ROWS, _COLUMNS = Compiled(_rows), Compiled(_columns)
