"""Make the record of a quantized model."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from math import isfinite
from typing import Any

from bitwright.bench.comparison import Accuracy, LatencyRow, Parity, Size
from bitwright.core.arguments import strict
from bitwright.core.environment import environment
from bitwright.core.errors import Problem
from bitwright.deployment import Distance
from bitwright.ptq.quantize import Quantized
from bitwright.quantizers.site_statistics import SiteRow, site_rows
from bitwright.reports.network import network
from bitwright.reports.record import FloatDistance, FloatOperator, Record, StepRow, WarningRow


def float_distance(distance: Distance) -> FloatDistance:
    """The row of a distance from the float model."""
    return FloatDistance(
        samples=distance.samples,
        sqnr_db=_finite(distance.sqnr_db),
        top1_agreement=distance.top1_agreement,
        far=distance.far,
        worst={site.site: _finite(site.sqnr_db) for site in distance.worst},
    )


def _finite(sqnr: float) -> float | None:
    """JSON has no infinities: +inf dB (no deviation) becomes None, and -inf dB becomes -999."""
    return sqnr if isfinite(sqnr) else None if sqnr > 0 else -999.0


def warning_rows(problems: Iterable[Problem]) -> tuple[WarningRow, ...]:
    """Warnings as rows."""
    return tuple(WarningRow(code=one.code, what=one.what, where=one.where, fix=one.fix) for one in problems)


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
    timings: Iterable[LatencyRow] = (),
    parities: Iterable[Parity] = (),
    histograms: bool = True,
    sites: tuple[SiteRow, ...] | None = None,
    distance: Distance | None = None,
    warnings: Iterable[Problem] | None = None,
) -> Record:
    """Make the record of one run.

    The statistics and `histograms` of the sites are measured on `batches`, unless `sites` has them already. `distance`
    from the float model and `warnings` are by default those of `quantize`.
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
        sites=site_rows(quantized.model, batches, histograms=histograms) if sites is None else sites,
        graph=network(graph),
        float_operators=tuple(
            FloatOperator(
                operator=name, kind=graph.by_name[name].kind if name in graph.by_name else "parameter", why=why
            )
            for name, why in plan.float.items()
        ),
        folds={norm: str(fold) for norm, fold in plan.fold.items()},
        distance=None if distance is None else float_distance(distance),
        warnings=warning_rows(quantized.warnings if warnings is None else warnings),
        steps=tuple(
            StepRow(step=ran.step, units=ran.units, seconds=ran.seconds, skipped=ran.skipped) for ran in quantized.steps
        ),
    )
