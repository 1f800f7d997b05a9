"""The conformance kit detects faulty plugins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bitwright.core.errors import FormatError
from bitwright.quantizers import Observer, Quantizer
from bitwright.quantizers.lsq import Lsq
from bitwright.quantizers.observers.minmax import MinMax
from bitwright.quantizers.plain import Plain
from bitwright.testing import check_observer, check_quantizer


class NotQuantized(Plain):
    def quantize(self, x: Tensor) -> Tensor:
        return x * 1.0


class Half(Plain):
    def forward(self, x: Tensor, site: str | None = None) -> Tensor:
        if not self.ready:
            return super().forward(x)
        return self.quantize(x)


class Eager(Plain):
    @property
    def ready(self) -> bool:
        return True


class NoGradient(Plain):
    def quantize(self, x: Tensor) -> Tensor:
        return super().quantize(x.detach()) + x * 0


class OtherGrid(Plain):
    def quantize(self, x: Tensor) -> Tensor:
        return super().quantize(x) * 1.01


class Forgets(Plain):
    exportable = False
    factor = 1.0

    def update_grid(self) -> None:
        super().update_grid()
        self.factor = 2.0

    def quantize(self, x: Tensor) -> Tensor:
        return super().quantize(x) * self.factor


class LosesPot(Lsq):
    def grid(self) -> Any:
        grid = super().grid()
        return type(grid)(self.scale.detach().abs(), grid.zero_point, grid.qmin, grid.qmax)


class Noisy(Plain):
    def quantize(self, x: Tensor) -> Tensor:
        return super().quantize(x + torch.rand_like(x))


class Breaks(Plain):
    def quantize(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:  # what a compiler can't follow
            return x
        return super().quantize(x)


class Picky(Plain):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise FormatError("never")


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (NotQuantized, "levels"),
        (Half, "float32|returns"),
        (Eager, "UncalibratedError"),
        (NoGradient, "no gradient"),
        (OtherGrid, "artefact would differ"),
        (Forgets, "saving and loading"),
        (LosesPot, "power of two"),
        (Noisy, "second call"),
        (Breaks, "can't be compiled"),
        (Picky, "accepts none"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_faulty_quantizer_is_found(cls: type[Quantizer], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_quantizer(cls)


class Counted(MinMax):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        self.high = high * 2
        return low, high


class Constant(MinMax):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return -torch.ones_like(low), torch.ones_like(high)


class Mixed(MinMax):
    def observe(self, rows: Tensor) -> None:
        super().observe(rows.expand(rows.shape) * 0 + rows.abs().max())


class Doubles(MinMax):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low.double(), high.double()


class Writes(MinMax):
    def observe(self, rows: Tensor) -> None:
        super().observe(rows.mul_(2))


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Counted, "calling range"),
        (Constant, "follow"),
        (Mixed, "other rows"),
        (Doubles, "float32"),
        (Writes, "changes the data"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_faulty_observer_is_found(cls: type[Observer], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_observer(cls)
