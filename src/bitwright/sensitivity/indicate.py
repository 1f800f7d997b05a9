"""`indicate(model, batches, loss)`: how much each operator suffers in low precision, by an indicator of your choice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.documents import Strict, parse_json, read_text, validated
from bitwright.core.errors import BitwrightError, CalibrationError, UnknownName, did_you_mean
from bitwright.core.files import write_text
from bitwright.core.registry import INDICATORS, KERNELS
from bitwright.core.tensor_tree import batch_size
from bitwright.graph import Graph, Op, capture
from bitwright.plan import ComputeSpec
from bitwright.plan.compute import FLOAT

_VERSION = 1
_FIX = "write it with `bitwright score WORKLOAD --indicator gradient-variance --formats int8 -o FILE`"

_Value = Annotated[float, Field(ge=0, le=1e30)]


class _File(Strict):
    """What a file may say. A sensitivity is a squared error or a variance: never negative."""

    version: Literal[1] = Field(alias="bitwright-indications")
    indicator: str
    samples: int = Field(ge=0, le=10**12)
    seconds: float = Field(default=0.0, ge=0, le=1e12)
    values: dict[str, dict[str, _Value]]


@strict
@dataclass(frozen=True, kw_only=True)
class Indications:
    """Ω(operator, format): planners add it up over operators. `float` is always 0."""

    indicator: str
    values: Mapping[str, Mapping[str, float]]
    samples: int
    #: CPU time of the whole run, for all operators and formats.
    seconds: float = 0.0

    def value(self, operator: str, format: str) -> float:
        """Of one operator in one format."""
        if operator not in self.values:
            fix = did_you_mean(operator, self.values)
            raise BitwrightError("this operator was not scored", value=operator, fix=fix)
        formats = self.values[operator]
        if format not in formats:
            fix = did_you_mean(format, formats)
            raise BitwrightError("not scored in this format", where=operator, value=format, fix=fix)
        return formats[format]

    def total(self, formats: Mapping[str, str]) -> float:
        """Of a choice of a format for each operator; operators that aren't named are float."""
        return sum(self.value(operator, format) for operator, format in formats.items())

    def sorted(self, format: str) -> list[tuple[str, float]]:
        """Operators with their value in this format, worst first; those without a kernel for it are left out."""
        known = [(name, found[format]) for name, found in self.values.items() if format in found]
        return sorted(known, key=lambda item: -item[1])

    def to_json(self) -> str:
        """As the file has it."""
        data = {
            "bitwright-indications": _VERSION,
            "indicator": self.indicator,
            "samples": self.samples,
            "seconds": self.seconds,
            "values": {name: dict(found) for name, found in self.values.items()},
        }
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str = "indications") -> Indications:
        """Read what `to_json` wrote."""
        data = parse_json(text, where=where, what="the indications", fix=_FIX)
        if isinstance(data, dict) and (version := data.get("bitwright-indications", _VERSION)) != _VERSION:
            fix = f"this version of Bitwright reads {_VERSION}"
            raise BitwrightError("unknown version of indications", where=where, value=version, fix=fix)
        file = validated(_File, data, title=f"{where} is no file of indications", fix=_FIX)
        return Indications(indicator=file.indicator, values=file.values, samples=file.samples, seconds=file.seconds)

    def save(self, path: str | Path) -> None:
        """Write the file."""
        write_text(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Indications:
        """Read a file."""
        return Indications.from_json(read_text(path, what="the indications", fix=_FIX), where=str(path))


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
    cases = _cases(graph, {text: spec for text, spec in specs.items() if spec.is_low_precision})
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
