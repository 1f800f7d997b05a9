"""`score_operators` and its result: how sensitive each operator is to the low precision of a kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from bitwright.core.arguments import Seed, strict
from bitwright.core.display import Summarized, Table
from bitwright.core.documents import parse_json, read_text
from bitwright.core.errors import BitwrightError, CalibrationError, UnknownName, did_you_mean
from bitwright.core.files import write_text
from bitwright.core.formatting import counted
from bitwright.core.registry import INDICATORS, KERNELS
from bitwright.core.schemas import Strict, validated
from bitwright.core.tensor_tree import batch_size
from bitwright.graph import Graph, Op, capture
from bitwright.plan import ComputeSpec
from bitwright.plan.schema import FLOAT
from bitwright.workload import Loss

_VERSION = 1
_FIX = "write it with `bitwright score WORKLOAD --indicator gradient-variance --formats int8 -o FILE`"

_Value = Annotated[float, Field(ge=0, le=1e30)]


class _File(Strict):
    """The file schema. A sensitivity is a squared error or a variance, so it is never negative."""

    version: Literal[1] = Field(alias="bitwright-operator-scores")
    indicator: str
    samples: int = Field(ge=0, le=10**12)
    seconds: float = Field(default=0.0, ge=0, le=1e12)
    values: dict[str, dict[str, _Value]]


@strict
@dataclass(frozen=True, kw_only=True)
class OperatorScores(Summarized):
    """The sensitivity score Ω(operator, format). Planners sum it over operators; it is 0 for `float`.

    >>> scores = OperatorScores(indicator="hessian", samples=64, values={"conv1": {"float": 0.0, "int8": 0.25}})
    >>> scores.value("conv1", "int8")
    0.25
    """

    indicator: str
    values: Mapping[str, Mapping[str, float]]
    samples: int
    #: CPU time of the whole run, for all operators and formats.
    seconds: float = 0.0

    def __repr__(self) -> str:
        of = f"{counted(len(self.values), 'operator')} by {self.indicator}"
        return f"<OperatorScores of {of} on {counted(self.samples, 'sample')}>"

    def value(self, operator: str, format: str) -> float:
        """The score of one operator in one format."""
        if operator not in self.values:
            fix = did_you_mean(operator, self.values)
            raise BitwrightError("this operator has no score", value=operator, fix=fix, code="not-scored")
        formats = self.values[operator]
        if format not in formats:
            fix = did_you_mean(format, formats)
            raise BitwrightError("no score in this format", where=operator, value=format, fix=fix, code="not-scored")
        return formats[format]

    def total(self, formats: Mapping[str, str]) -> float:
        """The sum of the scores for a choice of formats; operators that aren't listed are float."""
        return sum(self.value(operator, format) for operator, format in formats.items())

    def sorted(self, format: str) -> list[tuple[str, float]]:
        """Operators and their scores in this format, worst first, without operators that have no kernel for it."""
        known = [(name, found[format]) for name, found in self.values.items() if format in found]
        return sorted(known, key=lambda item: -item[1])

    def summary(self) -> Iterator[Table | str]:
        """The operators, worst first."""
        formats = list(dict.fromkeys(name for found in self.values.values() for name in found if name != FLOAT))
        worst = sorted(self.values.items(), key=lambda item: -max(item[1].values(), default=0.0))
        rows = [(name, *(f"{found[one]:.3g}" if one in found else None for one in formats)) for name, found in worst]
        yield Table(["operator", *(f"#{one}" for one in formats)], rows, most=20)
        yield f"{self.indicator} of {counted(self.samples, 'sample')} in {self.seconds:.1f} s of CPU time"

    def to_dict(self) -> dict[str, Any]:
        """The contents of a file as plain data."""
        return {
            "bitwright-operator-scores": _VERSION,
            "indicator": self.indicator,
            "samples": self.samples,
            "seconds": self.seconds,
            "values": {name: dict(found) for name, found in self.values.items()},
        }

    def to_json(self) -> str:
        """The contents of a file."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str = "scores") -> OperatorScores:
        """Parse the result of `to_json`."""
        data = parse_json(text, where=where, what="the sensitivity scores", fix=_FIX)
        if isinstance(data, dict) and (version := data.get("bitwright-operator-scores", _VERSION)) != _VERSION:
            fix = f"this version of Bitwright reads version {_VERSION}"
            raise BitwrightError(
                "unknown version of the scores file", where=where, value=version, fix=fix, code="unknown-version"
            )
        file = validated(_File, data, title=f"{where} isn't a valid scores file", fix=_FIX)
        return OperatorScores(indicator=file.indicator, values=file.values, samples=file.samples, seconds=file.seconds)

    def save(self, path: str | Path) -> None:
        """Write a file."""
        write_text(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> OperatorScores:
        """Read a file."""
        return OperatorScores.from_json(read_text(path, what="the sensitivity scores", fix=_FIX), where=str(path))


Values = dict[str, dict[str, float]]
"""Scores by operator and format."""
_WORDS = ("forward", "stochastic", "tensor", "weight")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The input of an indicator."""

    model: nn.Module
    #: Pairs of (inputs, target).
    batches: tuple[tuple[Any, Any], ...]
    loss: Loss
    graph: Graph
    #: For each operator, the formats (without `float`) that have a kernel for it.
    cases: Mapping[str, Mapping[str, ComputeSpec]]
    seed: int = 0

    def op(self, name: str) -> Op:
        """The operator with this name."""
        return self.graph.by_name[name]

    @property
    def any_spec(self) -> dict[str, ComputeSpec]:
        """One format per operator, enough to substitute it."""
        return {name: next(iter(specs.values())) for name, specs in self.cases.items()}

    def each(self, function: Callable[[str, ComputeSpec], float]) -> Values:
        """Call `function` for each operator and format."""
        return {
            name: {format: function(name, spec) for format, spec in specs.items()} for name, specs in self.cases.items()
        }


Indicator = Callable[[Subject], Values]


@strict
def score_operators(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Loss,
    *,
    indicator: str = "gradient-variance",
    formats: Sequence[str] = ("int8",),
    graph: Graph | None = None,
    seed: Seed = 0,
) -> OperatorScores:
    """Score every operator of a float model that a kernel of these formats supports.

    Batches are (inputs, target); a few are enough. A format is the name of a kernel with optional words after slashes,
    such as `int8/stochastic/weight`: `stochastic` rounds gradients stochastically, `weight` also computes the weight's
    gradient in this format, `forward` computes no gradient in it, `tensor` uses one scale per tensor. The model is
    unchanged afterwards.

    >>> import torch, bitwright
    >>> batch = torch.randn(16, 8), torch.randn(16, 4)
    >>> model, loss = torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.nn.functional.mse_loss
    >>> scores = bitwright.score_operators(model, [batch], loss, formats=["int8", "bf16"])
    >>> scores.value("0", "int8") > 0 == scores.value("0", "float")
    True
    """
    ask: Indicator = INDICATORS.get(indicator)
    specs = {text: spec_of(text) for text in formats}
    given = tuple(batches)
    if not given:
        raise CalibrationError(
            "no batch to compute scores with", fix="pass at least one batch of (inputs, target)", code="no-batches"
        )
    graph = capture(model, given[0][0]) if graph is None else graph
    cases = _cases(graph, {text: spec for text, spec in specs.items() if spec.is_low_precision})
    begin = time.process_time()
    subject = Subject(model=model, batches=given, loss=loss, graph=graph, cases=cases, seed=seed)
    found = ask(subject) if cases else {}
    values = {name: {FLOAT: 0.0, **found[name]} for name in cases}
    for name, by_format in values.items():
        for format, value in by_format.items():
            if not isfinite(value):
                raise BitwrightError(
                    f"{indicator} returned a score that isn't finite",
                    where=f"{name} in {format}",
                    value=value,
                    fix="check the loss of these batches",
                    code="score-not-finite",
                )
    return OperatorScores(
        indicator=indicator,
        values=values,
        samples=sum(batch_size(inputs) for inputs, _ in given),
        seconds=time.process_time() - begin,
    )


def spec_of(text: str) -> ComputeSpec:
    """Parse a format such as `int8` or `int8/stochastic/weight`.

    >>> spec_of("int8/stochastic/weight").backward
    ('input', 'weight')
    """
    name, *words = text.split("/")
    if name != FLOAT and name not in KERNELS:
        fix = did_you_mean(name, [*KERNELS.names(), FLOAT])
        raise UnknownName("unknown kernel", value=name, fix=fix, code="unknown-kernel")
    for word in words:
        if word not in _WORDS:
            fix = did_you_mean(word, _WORDS)
            raise BitwrightError("unknown option of a format", where=text, value=word, fix=fix, code="unknown-option")
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
