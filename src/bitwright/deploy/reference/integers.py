"""Integers with a scale, and fixed-point arithmetic between scales: an integer factor, a shift, ties to even."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]
_ROOM = 62  # bits of an int64 that a product may take
_FINE = 44  # bits that numbers on a common scale may take: leaves 18 for the next multiplier


@dataclass(frozen=True, eq=False, kw_only=True)
class Integers:
    """Real numbers (codes − zero_point)·scale; scale and zero point broadcast against the codes.

    Accumulators, which aren't rounded to a grid yet, are of the same kind, with zero point 0.
    """

    codes: Codes
    scale: NDArray[np.float64]
    zero_point: Codes
    bits: int = 32
    stored: Any = None
    """The type of the codes, where they themselves are what is asked for (the output of QuantizeLinear)."""

    @property
    def centred(self) -> Codes:
        """The codes around zero."""
        return self.codes - self.zero_point

    def real(self) -> NDArray[np.float32]:
        """What the codes stand for."""
        return (self.centred * self.scale).astype(np.float32)


def accumulator(codes: Codes, scale: Any) -> Integers:
    """Integers around zero."""
    return Integers(codes=codes, scale=np.asarray(scale, np.float64), zero_point=np.zeros((), np.int64))


def bit_length(codes: Codes) -> int:
    """The bits of the largest magnitude."""
    return int(np.abs(codes).max(initial=0)).bit_length()


def rescale(codes: Codes, ratio: NDArray[np.float64]) -> Codes:
    """round(codes·ratio), ties to even: the ratio as an integer multiplier and a shift."""
    mantissa, exponent = np.frexp(ratio)
    width = min(31, _ROOM - bit_length(codes))
    multiplier = np.rint(np.ldexp(mantissa, width)).astype(np.int64)
    shift = (width - exponent).astype(np.int64)
    product = codes * multiplier
    left, right = np.maximum(-shift, 0), np.clip(shift, 0, _ROOM)
    floor = product >> right
    rest, half = product - (floor << right), np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), 1)
    up = (rest > half) | ((rest == half) & (floor & 1 == 1) & (right > 0))
    result: Codes = (floor + up) << left
    return result


def requantize(x: Integers, scale: NDArray[np.float64], zero_point: Codes, low: int, high: int) -> Codes:
    """The codes of x on another grid."""
    codes: Codes = np.clip(rescale(x.centred, x.scale / scale) + zero_point, low, high)
    return codes


def common(values: list[Integers]) -> tuple[list[Codes], float]:
    """The values on one scale, finer than the coarsest of theirs, so that they can be added and compared."""
    coarsest = max(float(value.scale.max()) for value in values)
    centred = [value.centred for value in values]
    if all((value.scale == coarsest).all() for value in values):
        return centred, coarsest
    extra = max(0, min(24, _FINE - max(bit_length(codes) for codes in centred)))
    target = float(np.ldexp(coarsest, -extra))
    return [rescale(codes, value.scale / target) for codes, value in zip(centred, values, strict=True)], target


def uniform(x: Integers) -> Integers:
    """The same numbers with one scale for all: what moves numbers between channels needs that."""
    if x.scale.size == 1:
        return replace(x, scale=x.scale.reshape(()), zero_point=x.zero_point.reshape(()))
    (codes,), scale = common([x])
    return accumulator(codes, scale)


def finer(x: Integers) -> Integers:
    """The same numbers with room between their codes, for bounds that lie between them."""
    extra = max(0, min(24, _FINE - bit_length(x.centred)))
    return accumulator(x.centred << extra, np.ldexp(x.scale, -extra))


def fixed_point(constant: NDArray[Any]) -> Integers:
    """A float constant, to 24 bits."""
    largest = float(np.abs(constant).max(initial=0)) or 1.0
    scale = largest / 2**24
    return accumulator(np.rint(constant.astype(np.float64) / scale).astype(np.int64), scale)
