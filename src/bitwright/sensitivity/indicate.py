"""`indicate(model, batches, loss)`: how much each operator suffers in low precision, by an indicator of your choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor, nn

from bitwright.arguments import strict
from bitwright.errors import BitwrightError, CalibrationError, UnknownName, did_you_mean
from bitwright.graph import Graph, Op, capture
from bitwright.graph.tree import batch_size
from bitwright.plan import ComputeSpec
from bitwright.plan.compute import FLOAT
from bitwright.registry import INDICATORS, KERNELS
from bitwright.sensitivity.indications import Indications

Loss = Callable[[Any, Any], Tensor]
Values = dict[str, dict[str, float]]
"""By operator and format."""
_WORDS = ("forward", "stochastic", "tensor", "weight")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What an indicator is asked about."""

    model: nn.Module
    #: Pairs of (inputs, target).
    batches: tuple[tuple[Any, Any], ...]
    loss: Loss
    graph: Graph
    #: For each operator the formats that a kernel has for it, `float` aside.
    cases: Mapping[str, Mapping[str, ComputeSpec]]
    seed: int = 0

    def op(self, name: str) -> Op:
        """The recorded operator."""
        return self.graph.by_name[name]

    @property
    def any_spec(self) -> dict[str, ComputeSpec]:
        """One format for each operator: enough to take hold of it."""
        return {name: next(iter(specs.values())) for name, specs in self.cases.items()}

    def each(self, function: Callable[[str, ComputeSpec], float]) -> Values:
        """A value for each operator and format."""
        return {
            name: {format: function(name, spec) for format, spec in specs.items()} for name, specs in self.cases.items()
        }


Indicator = Callable[[Subject], Values]


@strict
def indicate(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Loss,
    *,
    indicator: str = "gradient-variance",
    formats: Sequence[str] = ("int8",),
    graph: Graph | None = None,
    seed: int = 0,
) -> Indications:
    """Ask an indicator about every operator of a float model that a kernel of these formats can run.

    Batches are (inputs, target); a few are enough. A format is a kernel's name, with words after slashes: `stochastic`
    (gradients are rounded at random), `weight` (the weight's gradient is computed in that format, too), `forward` (no
    gradient is), `tensor` (one scale for a tensor): `int8/stochastic/weight`. The model is left as it was.
    """
    ask: Indicator = INDICATORS.get(indicator)
    specs = {text: spec_of(text) for text in formats}
    given = tuple(batches)
    if not given:
        raise CalibrationError("there was no batch to score with", fix="give at least one batch of (inputs, target)")
    graph = capture(model, given[0][0]) if graph is None else graph
    cases = _cases(graph, {text: spec for text, spec in specs.items() if spec.low})
    begin = time.process_time()
    subject = Subject(model=model, batches=given, loss=loss, graph=graph, cases=cases, seed=seed)
    found = ask(subject) if cases else {}
    values = {name: {FLOAT: 0.0, **found[name]} for name in cases}
    for name, by_format in values.items():
        for format, value in by_format.items():
            if not isfinite(value):
                fix = "look at the loss of these batches"
                raise BitwrightError(f"{indicator} gave no number", where=f"{name} in {format}", value=value, fix=fix)
    return Indications(
        indicator=indicator,
        values=values,
        samples=sum(batch_size(inputs) for inputs, _ in given),
        seconds=time.process_time() - begin,
    )


def spec_of(text: str) -> ComputeSpec:
    """A format as it is written: `int8`, `int8/stochastic/weight`.

    >>> spec_of("int8/stochastic/weight").backward
    ('input', 'weight')
    """
    name, *words = text.split("/")
    if name != FLOAT and name not in KERNELS:
        raise UnknownName("unknown kernel", value=name, fix=did_you_mean(name, [*KERNELS.names(), FLOAT]))
    for word in words:
        if word not in _WORDS:
            raise BitwrightError("unknown word of a format", where=text, value=word, fix=did_you_mean(word, _WORDS))
    backward = () if "forward" in words else ("input", "weight") if "weight" in words else ("input",)
    scales = "tensor" if "tensor" in words else "row"
    return ComputeSpec(format=name, backward=backward, stochastic="stochastic" in words, scales=scales)


def _cases(graph: Graph, specs: Mapping[str, ComputeSpec]) -> dict[str, dict[str, ComputeSpec]]:
    cases = {}
    for op in graph.ops:
        known = {text: spec for text, spec in specs.items() if KERNELS.get(spec.format).refuses(op, spec) is None}
        if known:
            cases[op.name] = known
    return cases
