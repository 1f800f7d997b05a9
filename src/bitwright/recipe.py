"""`quantize(model, batches)`: the whole road in one call: capture, plan, prepare, calibrate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from bitwright.attach import find_attachment, prepare, strip
from bitwright.backends import Choices, check_plan
from bitwright.backends import backend as find_backend
from bitwright.deploy import Artefact, Check, check, export, unexportable
from bitwright.errors import BitwrightError, CalibrationError, PlanError
from bitwright.graph import Graph, capture
from bitwright.plan import Plan
from bitwright.planners import make_plan
from bitwright.ptq import calibrate

_RECORDED = 4  # batches that are recorded to find paths that only some inputs take


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A prepared and calibrated model with what was decided about it."""

    model: nn.Module
    plan: Plan
    graph: Graph
    example: Any
    backend: str

    def export(self, path: str | Path, *, dynamic_batch: bool = True, artefact: str | None = None) -> Artefact:
        """Write what the backend's tools read: the first artefact of its table, or the one that is named."""
        return export(self.model, path, self.example, dynamic_batch=dynamic_batch, artefact=artefact)

    def check(self, path: str | Path, batches: Iterable[Any] | None = None, **options: Any) -> Check:
        """Compare an artefact with this model on the real runtime."""
        return check(self.model, path, [self.example] if batches is None else batches, **options)


def quantize(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    backend: str = "onnxruntime",
    plan: Plan | None = None,
    example: Any = None,
    name: str | None = None,
    artefact: bool = False,
    progress: Callable[[int], None] | None = None,
    **choices: Unpack[Choices],
) -> Quantized:
    """Quantize `model` in place for `backend` with the ranges of `batches` (tensors, tuples or dicts of inputs).

    `example` (default: the first batch) is the call that is exported; it and the first batches are recorded, so that
    paths which only some inputs take are found. If anything fails, the model is float again. `choices` go to
    `make_plan` (weights="int4/group32/sym", keep_float=["head*"], observer="mse", …) unless there is a `plan`.
    With `artefact`, what could be simulated and trained but not exported is refused before calibration.
    """
    if find_attachment(model) is not None:
        raise BitwrightError("this model is quantized already", fix="strip(model) first")
    stream = iter(batches)
    first = list(islice(stream, _RECORDED))
    if not first:
        raise CalibrationError(
            "the calibration loader yielded no batch", fix="give a loader (or list) with at least one batch"
        )
    graph = capture(model, *(first if example is None else [example, *first]))
    example = first[0] if example is None else example
    if plan is None:
        plan = make_plan(graph, backend, model=name, **choices)
    else:
        plan = plan.resolve(graph)
        problems = check_plan(plan, find_backend(backend), graph)
        if problems:
            raise PlanError(problems)
    prepare(model, plan, graph=graph)
    try:
        problems = unexportable(model) if artefact and find_attachment(model) is not None else []
        if problems:
            raise PlanError(problems, title="no artefact can have these levels")
        calibrate(model, chain(first, stream), progress=progress)
    except BaseException:
        strip(model)
        raise
    return Quantized(model=model, plan=plan, graph=graph, example=example, backend=backend)
