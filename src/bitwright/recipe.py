"""`quantize(model, batches)`: the whole road in one call: capture, plan, prepare, calibrate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from bitwright.attach import find_attachment, in_mode, prepare, strip
from bitwright.backends import Choices, fitting
from bitwright.backends import backend as find_backend
from bitwright.deploy import Artefact, Check, check, export, unexportable
from bitwright.errors import BitwrightError, CalibrationError, PlanError
from bitwright.graph import Graph, capture_paths
from bitwright.plan import Plan
from bitwright.planners import make_plan
from bitwright.ptq import MEMORY, Data, Ran, Step, Watch, Work, calibrate, need_data, read_steps, run_steps

_RECORDED = 16  # batches at most, to find paths that only some inputs take


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A prepared and calibrated model with what was decided about it."""

    model: nn.Module
    plan: Plan
    graph: Graph
    example: Any
    backend: str
    steps: tuple[Ran, ...] = ()
    """What the PTQ steps did, and what they left alone."""

    def __repr__(self) -> str:
        """In one line: a notebook would show all weights, the graph and the example otherwise."""
        left = f", {len(self.plan.float)} operators in float" if self.plan.float else ""
        sites = sum(1 for _ in self.plan.quantized)
        return f"<Quantized {type(self.model).__name__} for {self.backend}: {sites} quantized sites{left}>"

    def export(self, path: str | Path, *, dynamic_batch: bool = True, artefact: str | None = None) -> Artefact:
        """Write what the backend's tools read: the first artefact of its table, or the one that is named."""
        return export(self.model, path, self.example, dynamic_batch=dynamic_batch, artefact=artefact)

    def check(self, path: str | Path, batches: Iterable[Any] | None = None, **options: Any) -> Check:
        """Compare an artefact with this model on the real runtime."""
        return check(self.model, path, [self.example] if batches is None else batches, **options)


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
    watch: Watch | None = None,
    on_start: Callable[[nn.Module], None] | None = None,
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
    random numbers, `memory` (MiB) bounds the activations that they keep, `folder` lets a killed run go on, `watch` is
    told of each unit of work. `on_start` gets the prepared model when nothing was found wrong and nothing changed yet.
    """
    wanted = read_steps(steps)
    data = Data(batches)
    if wanted:
        need_data(data)
    if find_attachment(model) is not None:
        raise BitwrightError("this model is quantized already", fix="strip(model) first")
    stream = iter(data)
    first = list(islice(stream, 1))
    if not first:
        raise CalibrationError(
            "the calibration loader yielded no batch", fix="give a loader (or list) with at least one batch"
        )
    given = [] if example is None else [example]
    if graph is None:
        graph = capture_paths(model, chain(given, first, _kept(stream, first)), most=_RECORDED)
    example = first[0] if example is None else example
    if plan is None:
        plan = make_plan(graph, backend, model=name, **choices)
    else:
        plan = fitting(plan, find_backend(backend), graph, name=name)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} if wanted else {}
    prepare(model, plan, graph=graph)
    if wanted and find_attachment(model) is None:
        raise BitwrightError("the plan quantizes nothing, so there is nothing for steps to do", fix="leave them out")
    try:
        problems = unexportable(model) if artefact and find_attachment(model) is not None else []
        if problems:
            raise PlanError(problems, title="no artefact can have these levels")
        if on_start is not None:
            with in_mode(model, "float"):
                on_start(model)
        ran: tuple[Ran, ...] = ()
        if wanted:
            work = Work(model=model, graph=graph, plan=plan, data=data, seed=seed, memory=memory)
            place = None if folder is None else Path(folder)
            ran = run_steps(work, wanted, folder=place, calibrating=progress, watch=watch)
        else:
            calibrate(model, chain(first, stream), progress=progress)
    except BaseException:
        strip(model)
        put_back(model, before)
        raise
    return Quantized(model=model, plan=plan, graph=graph, example=example, backend=backend, steps=ran)


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
