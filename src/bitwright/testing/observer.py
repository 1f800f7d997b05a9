"""`check_observer`: everything that the rest of Bitwright takes for granted about an observer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor

from bitwright.attach import Observer, grid_from_range
from bitwright.errors import BitwrightError
from bitwright.formats import Format
from bitwright.testing.data import demand, numbers

_FORMATS = ("int8/channel/sym", "int4/channel/sym/adasign", "uint8/channel/asym", "int4/channel/sym/pot")


def check_observer(cls: type[Observer], **options: Any) -> None:
    """Raise AssertionError, with what is wrong, unless `cls(format=…, **options)` behaves as an observer must."""
    demand(cls.merge in ("extremes", "mean"), cls.__name__, "doesn't say how ranges of processes are merged")
    for format in map(Format.parse, _FORMATS):
        who = f"{cls.__name__} at {format}"
        batches = [numbers(3, length, seed=length) for length in (400, 64, 1)]
        low, high = _seen(cls, format, options, batches)
        _check_range(who, low, high, rows=3)
        again = _seen(cls, format, options, batches)
        demand(torch.equal(low, again[0]) and torch.equal(high, again[1]), who, "the same data gives another range")
        for row in range(3):
            alone = _seen(cls, format, options, [batch[row : row + 1] for batch in batches])
            same = torch.allclose(torch.stack(alone)[:, 0], torch.stack([low, high])[:, row], rtol=1e-5, atol=1e-6)
            demand(same, who, "a row's range depends on other rows")
        if not cls.by_batch:
            pieces = _seen(cls, format, options, [piece for batch in batches for piece in batch.split(7, dim=1)])
            same = torch.allclose(torch.stack(pieces), torch.stack([low, high]), rtol=1e-5, atol=1e-6)
            demand(same, who, "the same data in other batches gives another range; say `by_batch`")
        wide = _seen(cls, format, options, [batch * 64 for batch in batches])
        demand(bool((wide[1] - wide[0] > 8 * (high - low)).all()), who, "the range doesn't follow the data")
        _check_copies(who, cls, format, options, batches)
        for name, batch in (("zeros", torch.zeros(2, 9)), ("one number", torch.full((1, 1), 0.5))):
            ends = _seen(cls, format, options, [batch])
            _check_range(f"{who}, {name}", *ends, rows=batch.shape[0])
            try:
                grid = grid_from_range(*ends, format, site=who)
            except BitwrightError as error:
                raise AssertionError(f"{who}: no grid can be made from {name}: {error}") from error
            demand(bool((grid.scale > 0).all()), who, f"{name} give no positive scale")
    for value in (float("nan"), float("inf"), -float("inf")) if cls.shows_infinities else ():
        odd = numbers(2, 200)
        odd[0, 5] = value
        ends = _seen(cls, Format.parse("int8/channel/sym"), options, [odd, numbers(2, 64)])
        demand(not bool(torch.stack(ends).isfinite().all()), cls.__name__, f"{value} doesn't show in the range")
    ends = _seen(cls, Format.parse("int4/channel/sym/adasign"), options, [numbers(2, 200, positive=True)])
    demand(bool((ends[0] >= 0).all()), cls.__name__, "numbers that are never negative get a negative lower end")


def _seen(cls: type[Observer], format: Format, options: dict[str, Any], batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    observer = cls(format=format, **options)
    for batch in batches:
        shown = batch.clone()
        observer.observe(shown)
        same = torch.allclose(shown, batch, rtol=0.0, atol=0.0, equal_nan=True)
        demand(same, cls.__name__, "observe changes the data")
    first = observer.range()
    second = observer.range()
    same = torch.allclose(torch.stack(first), torch.stack(second), rtol=0.0, atol=0.0, equal_nan=True)
    demand(same, cls.__name__, "asking for the range changes it")
    return first


def _check_range(who: str, low: Tensor, high: Tensor, *, rows: int) -> None:
    for end in (low, high):
        demand(end.shape == (rows,), who, f"an end has the shape {tuple(end.shape)}, not one number per row")
        demand(end.dtype == torch.float32, who, f"an end is {end.dtype}, not float32")
        demand(bool(torch.isfinite(end).all()), who, "an end isn't finite")
        demand(not end.requires_grad, who, "an end carries a gradient")
    demand(bool((low <= high).all()), who, "the lower end lies above the higher one")


def _check_copies(
    who: str, cls: type[Observer], format: Format, options: dict[str, Any], batches: list[Tensor]
) -> None:
    observer = cls(format=format, **options)
    observer.observe(batches[0])
    copies = [copy.deepcopy(observer), pickle.loads(pickle.dumps(observer))]
    observer.observe(batches[1])
    for other in copies:
        other.observe(batches[1])
        same = all(torch.equal(a, b) for a, b in zip(observer.range(), other.range(), strict=True))
        demand(same, who, "a copy (deepcopy, pickle) goes on to another range")
