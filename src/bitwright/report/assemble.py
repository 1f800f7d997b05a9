"""`make_record`: a quantized model and what was measured of it, put together."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from bitwright.arguments import strict
from bitwright.deploy import Distance
from bitwright.errors import Problem
from bitwright.recipe import Quantized
from bitwright.report.environment import environment
from bitwright.report.network import network
from bitwright.report.record import Accuracy, FloatOperator, Parity, Record, Size, StepRow, Timing
from bitwright.report.rows import float_distance, warned
from bitwright.report.sites import site_rows


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
