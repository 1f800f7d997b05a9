"""`quantize(model, batches)`: the whole road in one call: capture, plan, prepare, calibrate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from bitwright.backends import Choices, fitting, make_plan, refuse_beside_plan
from bitwright.backends import backend as find_backend
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, CalibrationError, PlanError, Problem, log_warnings
from bitwright.deploy import Artefact, Check, Distance, check, export, measure_distance, unexportable
from bitwright.graph import Graph, capture_paths
from bitwright.graph.interception import bare
from bitwright.plan import Plan
from bitwright.ptq.calibration import find_ranges
from bitwright.ptq.calibration_data import CalibrationData
from bitwright.ptq.run import StepCallback, StepResult, run_steps
from bitwright.ptq.step import MEMORY, Data, PtqContext, Step, read_steps, require_rereadable
from bitwright.quantizers import find_attachment, in_mode, prepare, strip, warnings_of, weights_may_change

_RECORDED = 16  # batches at most, to find paths that only some inputs take


@strict
@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A prepared and calibrated model with what was decided about it."""

    model: nn.Module
    plan: Plan
    graph: Graph
    example: Any
    backend: str
    steps: tuple[StepResult, ...] = ()
    """What the PTQ steps did, and what they left alone."""
    distance: Distance | None = None
    """How far it is from the float model, on some samples of the calibration data; None: not measured."""
    warnings: tuple[Problem, ...] = ()
    """What to know about the result; each was logged as well."""

    def __repr__(self) -> str:
        """In one line: a notebook would show all weights, the graph and the example otherwise."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        floats = sum(name not in parameters for name in self.plan.float)
        left = f", {floats} operators in float" if floats else ""
        sites = sum(1 for _ in self.plan.quantized)
        return f"<Quantized {type(self.model).__name__} for {self.backend}: {sites} quantized sites{left}>"

    def export(self, path: str | Path, *, dynamic_batch: bool = True, artefact: str | None = None) -> Artefact:
        """Write what the backend's tools read: the first artefact of its table, or the one that is named."""
        return export(self.model, path, self.example, dynamic_batch=dynamic_batch, artefact=artefact)

    def check(
        self,
        path: str | Path,
        batches: Iterable[Any] | None = None,
        *,
        runtime: str | None = None,
        per_site: bool = False,
        threads: int | None = None,
        measure: bool = True,
    ) -> Check:
        """Compare an artefact with this model, on the backend's runtime unless another `runtime` is named."""
        given = [self.example] if batches is None else batches
        return check(self.model, path, given, runtime=runtime, per_site=per_site, threads=threads, measure=measure)


@strict
def quantize(
    model: nn.Module,
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    backend: str = "onnxruntime",
    plan: Plan | None = None,
    graph: Graph | None = None,
    example: Any = None,
    name: str | None = None,
    artefact: bool = False,
    progress: Callable[[int], None] | None = None,
    steps: Sequence[str | Step] = (),
    seed: int = 0,
    memory: int = MEMORY,
    folder: str | Path | None = None,
    keep_state: bool = False,
    watch: StepCallback | None = None,
    on_start: Callable[[nn.Module], None] | None = None,
    measure: bool = True,
    **choices: Unpack[Choices],
) -> Quantized:
    """Quantize `model` in place for `backend` with the ranges of `batches` (tensors, tuples or dicts of inputs).

    `example` (default: the first batch) is the call that is exported; it and the first batches are recorded until one
    brings nothing new, so that paths which only some inputs take are found; a `graph` from before saves that. If
    anything fails, the model is float again. `choices` go to `make_plan` (weights="int4/group32/sym",
    keep_float=["head*"], observer="mse", …) unless there is a `plan`. With `artefact`, what could be simulated and
    trained but not exported is refused before calibration.

    `steps` are PTQ algorithms, by name ("equalize", "adaround:iterations=500") or as objects. They read the data
    several times: `batches` is then a list, a loader, or a function that gives a new iterator. `seed` is that of their
    random numbers, `memory` (MiB) bounds the activations that they keep, `folder` lets a killed run resume
    (with `keep_state` it stays there when the steps have finished, until the caller has saved the model), `watch` is
    told of each unit of work. `on_start` gets the prepared model when nothing was found wrong and nothing changed yet.

    With `measure`, some samples of the first batch run through the float model and the quantized one: `distance` of the
    result says how far apart they are, and `warnings` what to try if that is far.
    """
    if plan is not None:
        refuse_beside_plan(choices)
    table = find_backend(backend)
    model = bare(model)
    wanted = read_steps(steps)
    data = Data(batches)
    if wanted:
        require_rereadable(data)
    if find_attachment(model) is not None:
        raise BitwrightError("this model is quantized already", fix="strip(model) first")
    seen = CalibrationData()
    stream = map(seen.see, data)
    first = list(islice(stream, 1))
    if not first:
        raise CalibrationError(
            "the calibration loader yielded no batch", fix="give a loader (or list) with at least one batch"
        )
    given = [] if example is None else [example]
    if graph is None:
        graph = capture_paths(model, chain(given, first, _kept(stream, first)), most=_RECORDED)
    measured = first[0]
    example = first[0] if example is None else example
    plan = make_plan(graph, backend, model=name, **choices) if plan is None else fitting(plan, table, graph, name=name)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} if wanted else {}
    prepare(model, plan, graph=graph)
    if find_attachment(model) is None:
        raise _nothing_to_quantize(plan, backend)
    try:
        problems = unexportable(model) if artefact else []
        if problems:
            raise PlanError(problems, title="no artefact can have these levels")
        if on_start is not None:
            with in_mode(model, "float"):
                on_start(model)
        ran: tuple[StepResult, ...] = ()
        if wanted:
            context = PtqContext(model=model, graph=graph, plan=plan, data=data, seed=seed, memory=memory)
            place = None if folder is None else Path(folder)
            with weights_may_change(model):
                ran = run_steps(context, wanted, folder=place, keep=keep_state, calibrating=progress, watch=watch)
        else:
            find_ranges(model, chain(first, stream), progress=progress)
    except BaseException:
        strip(model)
        put_back(model, before)
        raise
    distance = measure_distance(model, measured) if measure else None
    noted = (*seen.warnings(), *(() if distance is None else distance.warnings))
    log_warnings(noted)
    noted += warnings_of(model) if find_attachment(model) is not None else ()  # logged when they came up
    return Quantized(
        model=model,
        plan=plan,
        graph=graph,
        example=example,
        backend=backend,
        steps=ran,
        distance=distance,
        warnings=noted,
    )


def _nothing_to_quantize(plan: Plan, backend: str) -> PlanError:
    """Every operator stays in float: a result that nobody asks for, so each reason is told."""
    reasons: dict[str, list[str]] = {}
    for operator, why in plan.float.items():
        reasons.setdefault(why, []).append(operator)
    fix = "take another backend or plan, or export the float model as it is: export_float(model, path, inputs)"
    problems = [
        Problem(what=why, where=", ".join(operators), fix=fix, code="nothing-to-quantize")
        for why, operators in reasons.items()
    ] or [Problem(what="no operator has a weight or multiplies", fix=fix, code="nothing-to-quantize")]
    return PlanError(problems, title=f"nothing in this model can be quantized for {backend}")


def _kept(stream: Iterator[Any], kept: list[Any]) -> Iterator[Any]:
    """Batches that are recorded now are calibrated with later."""
    for batch in stream:
        kept.append(batch)
        yield batch


@torch.no_grad()
def put_back(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Steps change weights: a model that shall be as it was gets these back."""
    for name, tensor in model.state_dict().items():
        if name in before:
            tensor.copy_(before[name])
