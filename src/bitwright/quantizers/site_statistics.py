"""`site_rows`: scale, range, clipped share and quantization noise of each site of a calibrated model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from bitwright.core.schemas import ResultModel
from bitwright.core.tensor_tree import eval_mode
from bitwright.plan import SiteSpec
from bitwright.quantizers.attachment import Attachment
from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.grid import Grid
from bitwright.quantizers.preparation import attachment_of, in_mode, tapped
from bitwright.workload import call


class Histogram(ResultModel):
    """Counts of values between `low` and `high`, in bins of equal width.

    The range is that of the grid, extended at both ends towards the extremes of the first batch: by at least one eighth
    and at most all of the grid's span. If the grid is much wider than the values, the range is that of the values. The
    outermost bins include values outside the range.
    """

    low: float
    high: float
    counts: tuple[int, ...]


class SiteRow(ResultModel):
    """One quantizer at one site."""

    site: str
    format: str
    observer: str
    quantizer: str
    guard: str | None
    share: str | None
    scales: int = Field(description="The number of scales: one, or one per channel or group.")
    scale_min: float
    scale_max: float
    zero_point_min: int
    zero_point_max: int
    low: float = Field(description="The lowest value of the grid.")
    high: float
    clipped: float | None = Field(description="Share of values outside the grid. None: not reached.")
    sqnr_db: float | None = Field(description="The noise of this quantizer alone. None: no error, or not reached.")
    why: str
    seen_low: float | None = Field(default=None, description="The lowest input value. None: not recorded.")
    seen_high: float | None = None
    histogram: Histogram | None = Field(default=None, description="None: not requested, or not reached.")


_BINS = 64
_NO_GRID = Grid(torch.zeros(()), torch.zeros(()), 0, 0)  # placeholder for a dynamic site that no batch reached
_MOST_NUMBERS = 1 << 18  # numbers per site in a histogram


@dataclass
class _SiteSums:
    signal: float = 0.0
    error: float = 0.0
    clipped: int = 0
    count: int = 0
    low: float = inf
    high: float = -inf
    binned: int = 0
    drawn: tuple[float, float] | None = None
    counts: Tensor | None = None
    grid: Grid | None = None
    """The grid of the first batch."""

    @torch.no_grad()
    def add(self, quantizer: Quantizer, x: Tensor) -> None:
        x = x.detach().to(torch.float32)
        grid = quantizer.deployed_grid(x)
        self.grid = self.grid or grid
        scale, zero_point = (
            quantizer.layout.spread(grid.scale, x),
            quantizer.layout.spread(grid.zero_point, x),
        )
        codes = torch.round(quantizer.transform(x) / scale) + zero_point
        self.clipped += int(((codes < grid.qmin) | (codes > grid.qmax)).sum())
        self.count += x.numel()
        self.signal += float(x.double().square().sum())
        self.error += float((quantizer.quantize(x) - x).double().square().sum())

    @torch.no_grad()
    def bin(self, quantizer: Quantizer, x: Tensor) -> None:
        """Add a batch to the histogram until it has enough numbers; large tensors are sampled."""
        x = x.detach().to(torch.float32)
        least, most = torch.aminmax(x)
        self.low, self.high = min(self.low, float(least)), max(self.high, float(most))
        room = _MOST_NUMBERS - self.binned
        if room <= 0:
            return
        flat = x.flatten()
        # An odd step visits all channels, because their number is nearly always even.
        flat = flat[:: -(-flat.numel() // room) | 1] if flat.numel() > room else flat
        self.binned += flat.numel()
        if self.drawn is None:
            assert self.grid is not None  # `add` comes first
            self.drawn = _binned(*_ends(self.grid), self.low, self.high)
        low, high = self.drawn
        found = torch.histc(flat.clamp(low, high), _BINS, low, high)
        self.counts = found if self.counts is None else self.counts + found

    def histogram(self) -> Histogram | None:
        if self.counts is None or self.drawn is None:
            return None
        low, high = self.drawn
        return Histogram(low=low, high=high, counts=tuple(int(count) for count in self.counts))

    @property
    def sqnr_db(self) -> float | None:
        if self.error == 0 or self.signal == 0:
            return None
        return 10 * log10(self.signal / self.error)


def _ends(grid: Grid) -> tuple[float, float]:
    """The smallest and the largest number of all scales."""
    scale, zero_point = grid.scale.double(), grid.zero_point.double()
    ends = torch.stack(((grid.qmin - zero_point) * scale, (grid.qmax - zero_point) * scale))  # a scale may be negative
    return float(ends.min()), float(ends.max())


def _binned(low: float, high: float, least: float, most: float) -> tuple[float, float]:
    """The range of a histogram: the grid, extended to the range of the first batch by 1/8 to 1 of the grid's span.

    If the grid is far wider than the values (as for accumulators), the range is that of the values.
    """
    span = (high - low) or 1.0
    if most - least < span / 64 and low <= least <= most <= high:
        margin = (most - least) / 8 or abs(most) / 8 or 1.0
        return least - margin, most + margin
    before, beyond = (min(max(distance, span / 8), span) for distance in (low - least, most - high))
    return low - before, high + beyond


def site_rows(model: nn.Module, batches: Iterable[Any], *, histograms: bool = False) -> tuple[SiteRow, ...]:
    """One row per site of a calibrated model, in the plan's order, measured on `batches`.

    The noise of a site excludes that of earlier sites: the reference signal is the site's input. Histograms show the
    values before quantization.
    """
    attachment = attachment_of(model)
    sums: dict[str, _SiteSums] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if quantizer.weight and site in sums:
            return  # a weight is the same in each batch
        found = sums.setdefault(site, _SiteSums())
        found.add(quantizer, x)
        if histograms and x.numel():
            found.bin(quantizer, x)

    with eval_mode(model), torch.no_grad(), in_mode(model, "quantize"), tapped(model, look):
        for batch in batches:
            call(model, batch)
    return tuple(_row(site, spec, attachment, sums.get(site, _SiteSums())) for site, spec in attachment.plan.quantized)


def _row(site: str, spec: SiteSpec, attachment: Attachment, sums: _SiteSums) -> SiteRow:
    quantizer = attachment.quantizers[attachment.shared.get(site, site)]
    grid = sums.grid or _NO_GRID if quantizer.spec.format.dynamic else quantizer.grid()
    scale, zero_point = grid.scale.double(), grid.zero_point.double()
    low, high = _ends(grid)
    return SiteRow(
        site=site,
        format=str(quantizer.format),
        observer=quantizer.spec.observer,
        quantizer=quantizer.spec.quantizer,
        guard=quantizer.spec.guard,
        share=spec.share,
        scales=scale.numel(),
        scale_min=float(scale.min()),
        scale_max=float(scale.max()),
        zero_point_min=int(zero_point.min()),
        zero_point_max=int(zero_point.max()),
        low=low,
        high=high,
        clipped=sums.clipped / sums.count if sums.count else None,
        sqnr_db=sums.sqnr_db,
        why=spec.why,
        seen_low=sums.low if isfinite(sums.low) else None,
        seen_high=sums.high if isfinite(sums.high) else None,
        histogram=sums.histogram(),
    )
