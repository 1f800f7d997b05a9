"""From a quantized model and what was measured of it to a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from math import inf, isfinite, log10
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.errors import Problem
from bitwright.core.modes import eval_mode
from bitwright.deploy import Check, Distance, Latency
from bitwright.plan import SiteSpec
from bitwright.ptq.quantize import Quantized
from bitwright.quantizers import Attachment, Quantizer, attachment_of, in_mode, tapped
from bitwright.report.environment import environment
from bitwright.report.network import network
from bitwright.report.record import Record
from bitwright.report.record_parts import (
    Accuracy,
    FloatDistance,
    FloatOperator,
    Histogram,
    Parity,
    SiteRow,
    Size,
    StepRow,
    Timing,
    Warned,
)
from bitwright.workload import call


def parity(check: Check) -> Parity:
    """One row for all outputs: the worst of them."""
    sqnr = min((output.sqnr_db for output in check.outputs), default=float("inf"))
    agreements = [output.top1_agreement for output in check.outputs if output.top1_agreement is not None]
    return Parity(
        runtime=check.runtime,
        passed=check.passed,
        samples=check.samples,
        sqnr_db=sqnr if isfinite(sqnr) else None,
        max_error=max((output.max_error for output in check.outputs), default=0.0),
        top1_agreement=min(agreements, default=None),
        first_divergence=check.first_divergence,
    )


def float_distance(distance: Distance) -> FloatDistance:
    """The row of what was measured."""
    return FloatDistance(
        samples=distance.samples,
        sqnr_db=_finite(distance.sqnr_db),
        top1_agreement=distance.top1_agreement,
        far=distance.far,
        worst={site.site: _finite(site.sqnr_db) for site in distance.worst},
    )


def _finite(sqnr: float) -> float | None:
    """JSON has no infinities: no deviation is None, and one without limit the lowest number of decibels."""
    return sqnr if isfinite(sqnr) else None if sqnr > 0 else -999.0


def warned(problems: Iterable[Problem]) -> tuple[Warned, ...]:
    """Warnings as rows."""
    return tuple(Warned(code=one.code, what=one.what, where=one.where, fix=one.fix) for one in problems)


def timing(
    runtime: str,
    variant: Literal["float", "quantized"],
    batch: int,
    threads: int,
    latency: Latency,
    *,
    yardstick: Latency,
) -> Timing:
    """One row of a run in which the float artefact was the yardstick."""
    return Timing(
        runtime=runtime,
        variant=variant,
        batch=batch,
        threads=threads,
        median_ms=latency.median_ms,
        p10_ms=latency.p10_ms,
        p90_ms=latency.p90_ms,
        p99_ms=latency.p99_ms,
        runs=latency.runs,
        ratio=latency.median_ms / yardstick.median_ms,
    )


def timings(runtime: str, batch: int, threads: int, *, float: Latency, quantized: Latency) -> list[Timing]:
    """Both rows of one run."""
    return [
        timing(runtime, "float", batch, threads, float, yardstick=float),
        timing(runtime, "quantized", batch, threads, quantized, yardstick=float),
    ]


_BINS = 64
_LOOKED_AT = 1 << 18  # numbers of one site that its histogram counts at most; more would only smooth it


@dataclass
class _Sums:
    signal: float = 0.0
    error: float = 0.0
    clipped: int = 0
    count: int = 0
    low: float = inf
    high: float = -inf
    binned: int = 0
    drawn: tuple[float, float] | None = None
    counts: Tensor | None = None

    @torch.no_grad()
    def add(self, quantizer: Quantizer, x: Tensor) -> None:
        grid = quantizer.grid()
        x = x.detach().to(torch.float32)
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
        """Count the numbers of the first batches; a large one is looked at here and there."""
        x = x.detach().to(torch.float32)
        least, most = torch.aminmax(x)
        self.low, self.high = min(self.low, float(least)), max(self.high, float(most))
        room = _LOOKED_AT - self.binned
        if room <= 0:
            return
        flat = x.flatten()
        # An odd step visits all channels, whose number is nearly always even.
        flat = flat[:: -(-flat.numel() // room) | 1] if flat.numel() > room else flat
        self.binned += flat.numel()
        if self.drawn is None:
            self.drawn = _binned(*_ends(quantizer), self.low, self.high)
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


def _ends(quantizer: Quantizer) -> tuple[float, float]:
    """The least and the greatest number that any of its grids has."""
    grid = quantizer.grid()
    scale, zero_point = grid.scale.double(), grid.zero_point.double()
    return float(((grid.qmin - zero_point) * scale).min()), float(((grid.qmax - zero_point) * scale).max())


def _binned(low: float, high: float, least: float, most: float) -> tuple[float, float]:
    """What a histogram shows: the grid, and as far beyond as the first batch reaches, an eighth to all of its span.

    An accumulator's grid is a million times as wide as its numbers: it shows just these.
    """
    span = (high - low) or 1.0
    if most - least < span / 64 and low <= least <= most <= high:
        margin = (most - least) / 8 or abs(most) / 8 or 1.0
        return least - margin, most + margin
    before, beyond = (min(max(distance, span / 8), span) for distance in (low - least, most - high))
    return low - before, high + beyond


def site_rows(model: nn.Module, batches: Iterable[Any], *, histograms: bool = False) -> tuple[SiteRow, ...]:
    """One row per site of a calibrated model, in the plan's order, measured on `batches`.

    The error of a site is its own: the signal is what reaches it, with the errors of earlier sites. Histograms are of
    the numbers before they are quantized.
    """
    attachment = attachment_of(model)
    sums: dict[str, _Sums] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if quantizer.weight and site in sums:
            return  # a weight is the same in each batch
        found = sums.setdefault(site, _Sums())
        found.add(quantizer, x)
        if histograms and x.numel():
            found.bin(quantizer, x)

    with eval_mode(model), torch.no_grad(), in_mode(model, "quantize"), tapped(model, look):
        for batch in batches:
            call(model, batch)
    return tuple(_row(site, spec, attachment, sums.get(site, _Sums())) for site, spec in attachment.plan.quantized)


def _row(site: str, spec: SiteSpec, attachment: Attachment, sums: _Sums) -> SiteRow:
    quantizer = attachment.quantizers[attachment.shared.get(site, site)]
    grid = quantizer.grid()
    scale, zero_point = grid.scale.double(), grid.zero_point.double()
    low, high = _ends(quantizer)
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


@strict
def make_record(
    quantized: Quantized,
    batches: Iterable[Any],
    *,
    workload: str,
    title: str | None = None,
    seed: int | None = None,
    accuracies: Iterable[Accuracy] = (),
    sizes: Iterable[Size] = (),
    timings: Iterable[Timing] = (),
    parities: Iterable[Parity] = (),
    histograms: bool = True,
    distance: Distance | None = None,
    warnings: Iterable[Problem] | None = None,
) -> Record:
    """The record of one run; the sites are looked at with `batches` of inputs, which `histograms` are of, too.

    `distance` from the float model and `warnings` are by default those of `quantize`.
    """
    plan, graph = quantized.plan, quantized.graph
    distance = distance or quantized.distance
    return Record(
        title=title or f"{workload} for {quantized.backend}",
        workload=workload,
        backend=quantized.backend,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=seed,
        plan_sha256=sha256(plan.to_yaml().encode()).hexdigest(),
        environment=environment(),
        accuracies=tuple(accuracies),
        sizes=tuple(sizes),
        timings=tuple(timings),
        parities=tuple(parities),
        sites=site_rows(quantized.model, batches, histograms=histograms),
        graph=network(graph),
        float_operators=tuple(
            FloatOperator(
                operator=name, kind=graph.by_name[name].kind if name in graph.by_name else "parameter", why=why
            )
            for name, why in plan.float.items()
        ),
        folds={norm: str(fold) for norm, fold in plan.fold.items()},
        distance=None if distance is None else float_distance(distance),
        warnings=warned(quantized.warnings if warnings is None else warnings),
        steps=tuple(
            StepRow(step=ran.step, units=ran.units, seconds=ran.seconds, skipped=ran.skipped) for ran in quantized.steps
        ),
    )
