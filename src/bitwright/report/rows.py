"""From what `deploy` measured to rows of a record."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Literal

from bitwright.deploy import Check, Distance, Latency
from bitwright.errors import Problem
from bitwright.report.parts import FloatDistance, Parity, Timing, Warned


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
