"""The simulation with the rounding of LiteRT's reference kernels: sums as integers, and their fixed-point rescaling.

The simulation computes sums in float32, so a sum next to a tie may get another code than on LiteRT. Such differences
grow from layer to layer. Here each quantizer recovers the integer sum from the operator's float32 result, and rescales
it as LiteRT's kernel does. Operators without a rule in this module keep the simulation's rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.quantizers import Quantizer, quantizers_of, tapped

_PRODUCTS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
Codes64 = NDArray[np.int64]


def _fixed_point(ratio: NDArray[np.float64]) -> tuple[Codes64, Codes64]:
    """A ratio as a multiplier of 31 bits and a power of two."""
    mantissa, exponent = np.frexp(ratio)
    multiplier = np.floor(np.ldexp(mantissa, 31) + 0.5).astype(np.int64)
    whole = multiplier == 1 << 31
    return np.where(whole, multiplier >> 1, multiplier), exponent.astype(np.int64) + whole


def _rescaled(x: Codes64, multiplier: Codes64, exponent: Codes64) -> Codes64:
    """x·multiplier·2^(exponent−31), rounded to the multiplier's 31 bits first and to the remaining shift after that."""
    left, right = np.maximum(exponent, 0), np.maximum(-exponent, 0)
    product = (x << left) * multiplier
    nudge = np.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = product + nudge
    high = np.where(high >= 0, high >> 31, -((-high) >> 31))  # towards zero
    mask = (np.int64(1) << right) - 1
    result: Codes64 = (high >> right) + ((high & mask) > (mask >> 1) + (high < 0))
    return result


def _rescaled_once(x: Codes64, multiplier: Codes64, exponent: Codes64) -> Codes64:
    """The same with one rounding, ties upwards."""
    right = 31 - exponent
    result: Codes64 = (x * multiplier + (np.int64(1) << (right - 1))) >> right
    return result


class LiteRtRounding:
    """Replaces the quantizers' rounding in one run of the simulation."""

    def __init__(self, model: Any, sites: dict[str, tuple[int, bool]]) -> None:
        from ai_edge_litert import schema_py_generated

        kinds = {number: name for name, number in vars(schema_py_generated.BuiltinOperator).items() if name[0] != "_"}
        self.tensors = model.subgraphs[0].tensors
        self.sites = sites
        self.producers: dict[int, tuple[str, Any]] = {}
        for operator in model.subgraphs[0].operators:
            kind = kinds[model.operatorCodes[operator.opcodeIndex].builtinCode]
            self.producers.update({int(index): (kind, operator) for index in operator.outputs})
        self.codes: dict[int, Codes64] = {}
        self._site: str | None = None

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Install it in all quantizers of activations."""
        quantizers = [quantizer for quantizer in quantizers_of(model).values() if not quantizer.weight]
        for quantizer in quantizers:
            quantizer.stand_in = self._substitute(quantizer)
        self.codes = {}
        try:
            with tapped(model, self._look):
                yield
        finally:
            for quantizer in quantizers:
                quantizer.stand_in = None

    def _look(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        self._site = site

    def _substitute(self, quantizer: Quantizer) -> Callable[[Tensor], Tensor]:
        def substitute(x: Tensor) -> Tensor:
            found = self.sites.get(self._site or "")
            if found is None or found[0] in self.codes:
                return quantizer.quantize(x)
            exact = self._rounded(found[0], x.detach().double().cpu().numpy())
            if exact is None:
                self.codes[found[0]] = quantizer.integers(x).cpu().numpy().astype(np.int64)
                return quantizer.quantize(x)
            self.codes[found[0]] = exact
            scale, zero = self._grid(found[0])
            return torch.from_numpy((exact - zero).astype(np.float32) * np.float32(scale)).to(x.device)

        return substitute

    def _grid(self, index: int) -> tuple[float, int]:
        grid = self.tensors[index].quantization
        return float(grid.scale[0]), int(grid.zeroPoint[0])

    def _rounded(self, index: int, x: NDArray[np.float64]) -> Codes64 | None:
        """The codes that LiteRT computes for the values `x`, or None without a rule."""
        kind, operator = self.producers.get(index, ("", None))
        scale, zero = self._grid(index)
        found: Codes64 | None = None
        if kind in _PRODUCTS:
            rescale = _rescaled_once if kind == "FULLY_CONNECTED" else _rescaled
            found = self._product(operator, x, scale, zero, rescale)
        elif kind == "AVERAGE_POOL_2D" and operator.builtinOptions.padding == 1:
            found = self._average(operator, x, scale, zero)
        elif kind == "MEAN":
            found = self._mean(operator, x, scale, zero)
        elif kind == "ADD":
            found = self._sum(operator, scale, zero)
            low = np.floor(x.min() / scale + zero) if operator.builtinOptions.fusedActivationFunction else -128
            found = None if found is None else np.maximum(found, np.int64(zero) if low >= zero else -128)
        return None if found is None else np.clip(found, -128, 127)

    def _product(
        self,
        operator: Any,
        x: NDArray[np.float64],
        scale: float,
        zero: int,
        rescale: Callable[[Codes64, Codes64, Codes64], Codes64],
    ) -> Codes64 | None:
        source, weight = (self.tensors[int(index)].quantization for index in operator.inputs[:2])
        factors = np.asarray(weight.scale, np.float32).astype(np.float64) * float(source.scale[0])
        axis = 1 if x.ndim == 4 else x.ndim - 1
        if factors.size > 1:
            if x.shape[axis] != factors.size:
                return None  # a later operator moved the channels
            factors = factors.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        multiplier, exponent = _fixed_point(factors / scale)
        numbers = x / scale
        codes = np.rint(numbers)
        # Only next to ties do the kernels round differently; the float32 sums are exact to less than 0.01 code.
        margin = 0.01 + 2.0 ** (min(int(exponent.max()), 0) - 1)
        ties = np.nonzero(np.abs(numbers - codes) > 0.5 - margin)
        found: Codes64 = codes.astype(np.int64)
        if ties[0].size:
            sums = np.rint(x[ties] / np.broadcast_to(factors, x.shape)[ties]).astype(np.int64)
            own = (np.broadcast_to(one, x.shape)[ties] for one in (multiplier, exponent))
            found[ties] = rescale(sums, *own)
        return found + zero

    def _average(self, operator: Any, x: NDArray[np.float64], scale: float, zero: int) -> Codes64:
        options = operator.builtinOptions
        count = options.filterHeight * options.filterWidth
        sums = np.rint((x / scale + zero) * count).astype(np.int64)
        found: Codes64 = np.where(sums > 0, (sums + count // 2) // count, -((count // 2 - sums) // count))
        return found

    def _mean(self, operator: Any, x: NDArray[np.float64], scale: float, zero: int) -> Codes64:
        source, result = self.tensors[int(operator.inputs[0])], self.tensors[int(operator.outputs[0])]
        count = int(np.prod(source.shape)) // int(np.prod(result.shape))
        own = float(source.quantization.scale[0])
        multiplier, exponent = _fixed_point(np.array(own / scale))
        shift = min(count.bit_length() - 1, 32, 31 + int(exponent))
        sums = np.rint(x / own * count).astype(np.int64)
        return _rescaled(sums, (multiplier << shift) // count, exponent - shift) + zero

    def _sum(self, operator: Any, scale: float, zero: int) -> Codes64 | None:
        codes = [self.codes.get(int(index)) for index in operator.inputs]
        if codes[0] is None or codes[1] is None:
            return None
        grids = [self._grid(int(index)) for index in operator.inputs]
        twice = 2 * max(one for one, _ in grids)
        parts = [
            _rescaled((code - own) << 20, *_fixed_point(np.array(one / twice)))
            for code, (one, own) in zip(codes, grids, strict=True)
            if code is not None
        ]
        return _rescaled(parts[0] + parts[1], *_fixed_point(np.array(twice / ((1 << 20) * scale)))) + zero
