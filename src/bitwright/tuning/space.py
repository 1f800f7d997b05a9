"""Candidates of a search, and the search space, derived from the graph, the backend's table and the user's settings.

A candidate has settings for the whole model, and overrides for single operators.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from bitwright.backends import BackendTable, Choices, make_plan
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean
from bitwright.core.formats import Format
from bitwright.core.formatting import counted
from bitwright.core.registry import OBSERVERS
from bitwright.graph import Graph
from bitwright.graph.graph import SiteName
from bitwright.plan import Plan
from bitwright.ptq import read_steps

FLOAT: Literal["float"] = "float"


@dataclass(frozen=True, kw_only=True)
class Base:
    """Settings for the whole model; None means the default of the backend's table."""

    weights: str | None = None
    activations: str | None = None
    observer: str | None = None
    weight_observer: str | None = None
    steps: tuple[str, ...] = ()
    samples: int | None = None

    def choices(self) -> Choices:
        """The arguments for `make_plan`."""
        chosen: Choices = {}
        if self.weights is not None:
            chosen["weights"] = self.weights
        if self.activations is not None:
            chosen["activations"] = self.activations
        if self.observer is not None:
            chosen["observer"] = self.observer
        if self.weight_observer is not None:
            chosen["weight_observer"] = self.weight_observer
        return chosen

    def __str__(self) -> str:
        words = [
            self.weights and f"weights {self.weights}",
            self.activations and f"activations {self.activations}",
            self.observer,
            self.weight_observer and f"{self.weight_observer} for weights",
            " + ".join(self.steps),
            self.samples and f"{counted(self.samples, 'sample')}",
        ]
        return ", ".join(word for word in words if word) or "defaults"


@dataclass(frozen=True, kw_only=True)
class Override:
    """Settings that differ at one operator."""

    weights: str | None = None
    activations: str | None = None
    observer: str | None = None

    def __str__(self) -> str:
        return ", ".join(word for word in (self.weights, self.activations, self.observer) if word)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to quantize the model."""

    base: Base = Base()
    float: frozenset[str] = frozenset()
    overrides: Mapping[str, Override] = field(default_factory=dict)

    def with_float(self, operators: Iterable[str]) -> Candidate:
        """A copy with exactly these operators in float."""
        return replace(self, float=frozenset(operators))

    def to_json(self) -> dict[str, Any]:
        """The representation in a store; equal candidates have equal representations."""
        return {
            "base": {k: v for k, v in asdict(self.base).items() if v not in (None, ())},
            "float": sorted(self.float),
            "overrides": {
                name: {k: v for k, v in asdict(self.overrides[name]).items() if v is not None}
                for name in sorted(self.overrides)
                if name not in self.float
            },
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        """The inverse of `to_json`."""
        base = dict(data["base"])
        return Candidate(
            base=Base(**{**base, "steps": tuple(base.get("steps", ()))}),
            float=frozenset(data["float"]),
            overrides={name: Override(**one) for name, one in data["overrides"].items()},
        )

    @property
    def key(self) -> str:
        """A hash that is equal for equal candidates."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        names = sorted(self.float)
        kept = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        parts = [str(self.base), f"{kept} in float" if names else "all quantized"]
        if self.overrides:
            parts.append(f"{counted(len(self.overrides), 'operator')} with other settings")
        return "; ".join(parts)

    def plan(self, graph: Graph, backend: str, *, model: str | None, choices: Choices) -> Plan:
        """The plan of this candidate; `choices` are the user's settings for all candidates."""
        kept = [*choices.get("keep_float", ()), *(glob.escape(name) for name in sorted(self.float))]
        merged: Choices = {**choices, **self.base.choices(), "keep_float": kept}
        made = make_plan(graph, backend, model=model, **merged)
        changed = {}
        for site, spec in made.sites.items():
            name = SiteName.parse(site)
            own = self.overrides.get(site.rpartition(":")[0])
            if own is None or not spec.quantizes or spec.share is not None or name.port == "bias":
                continue
            format = own.weights if name.port == "weight" else own.activations
            new = spec if format is None else replace(spec, format=Format.parse(format))
            if own.observer is not None and name.port != "weight":
                new = replace(new, observer=own.observer)
            if new != spec:
                changed[site] = replace(new, why="chosen by the search")
        return made.with_sites(changed)


OperatorOption = Override | Literal["float"] | None
"""The setting of one operator: that of the base (None), float, or its own."""


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_list)]


class SpaceRule(BaseModel):
    """The allowed settings of some operators."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    keep: Literal["float", "quantized"] | None = None
    weights: Names = ()
    activations: Names = ()
    observer: Names = ()


@strict
class Space(BaseModel):
    """The values to try. Lists start with the preferred value; an empty list means the values the backend supports.

    `types` (kinds of operators) and `operators` (names, patterns, or `re:` with a regular expression) restrict it:
    {"linear": {"keep": "float"}}.

    >>> space = Space(weights=["int8", "int4"], types={"linear": {"keep": "float"}})
    >>> space.weights, space.types["linear"].keep
    (('int8', 'int4'), 'float')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    weights: Names = ()
    activations: Names = ()
    observer: Names = ()
    weight_observer: Names = ()
    steps: tuple[Names, ...] | None = Field(default=None, description="Lists of PTQ steps to try; [] means no step.")
    samples: Annotated[tuple[Annotated[int, Field(ge=1, le=10**12)], ...], BeforeValidator(_list)] = Field(
        default=(), description="Numbers of calibration samples to try."
    )
    types: dict[str, SpaceRule] = Field(default_factory=dict)
    operators: dict[str, SpaceRule] = Field(default_factory=dict)
    first: Literal["float"] | None = Field(
        default=None, description="Keep the first convolution or matrix product in float."
    )


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A quantizable operator with its allowed settings."""

    name: str
    kind: str
    macs: int
    options: tuple[OperatorOption, ...]

    @property
    def can_float(self) -> bool:
        """Whether it may stay in float."""
        return FLOAT in self.options

    @property
    def can_quantize(self) -> bool:
        """Whether it may be quantized."""
        return any(option != FLOAT for option in self.options)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """All candidates, generated on demand."""

    axes: Mapping[str, tuple[Any, ...]]
    operators: tuple[Operator, ...]

    @property
    def size(self) -> int:
        """The number of candidates."""
        return prod(map(len, self.axes.values())) * prod(len(op.options) for op in self.operators)

    @property
    def free(self) -> list[Operator]:
        """Operators that may be quantized or stay in float."""
        return [op for op in self.operators if op.can_float and op.can_quantize]

    def bases(self) -> Iterator[Base]:
        """All settings of the whole model, preferred ones and those with few changes first."""
        names = list(self.axes)
        spans = [range(len(self.axes[name])) for name in names]
        for places in sorted(product(*spans), key=lambda p: (sum(map(bool, p)), sum(p), p)):
            yield Base(**{name: self.axes[name][i] for name, i in zip(names, places, strict=True)})

    def start(self, base: Base | None = None) -> Candidate:
        """The candidate with preferred settings and as many quantized operators as possible."""
        base = next(self.bases()) if base is None else base
        return self.choose(base, {op.name: op.options[0] for op in self.operators})

    def choose(self, base: Base, options: Mapping[str, OperatorOption]) -> Candidate:
        """The candidate with these options."""
        return Candidate(
            base=base,
            float=frozenset(name for name, option in options.items() if option == FLOAT),
            overrides={name: option for name, option in options.items() if isinstance(option, Override)},
        )

    def floated(self, base: Base | None, operators: Any) -> Candidate:
        """`start` with these additional operators in float."""
        start = self.start(base)
        return start.with_float(start.float | set(operators))

    def random(self, generator: random.Random) -> Candidate:
        """A uniformly random candidate."""
        base = Base(**{name: generator.choice(values) for name, values in self.axes.items()})
        return self.choose(base, {op.name: generator.choice(op.options) for op in self.operators})

    def everything(self) -> Iterator[Candidate]:
        """All candidates; within a base, those with the fewest changes come first."""
        for base in self.bases():
            for options in _by_changes([op.options for op in self.operators]):
                yield self.choose(base, dict(zip((op.name for op in self.operators), options, strict=True)))


def _by_changes(options: list[tuple[OperatorOption, ...]]) -> Iterator[tuple[OperatorOption, ...]]:
    """The product of the options, with the fewest changes from the first options first, without storing it."""

    def rest(index: int, changes: int) -> Iterator[tuple[OperatorOption, ...]]:
        if index == len(options):
            if changes == 0:
                yield ()
            return
        if changes > sum(len(own) > 1 for own in options[index:]):
            return
        for place, option in enumerate(options[index]):
            if place and not changes:
                break
            for tail in rest(index + 1, changes - bool(place)):
                yield (option, *tail)

    for changes in range(sum(len(own) > 1 for own in options) + 1):
        yield from rest(0, changes)


def check_space(space: Space, graph: Graph, table: BackendTable) -> None:
    """Raise all problems of a search space for this model and backend together."""
    problems = _problems(space, graph, table)
    if problems:
        raise PlanError(problems, title="the search space has problems")


def make_space(space: Space, graph: Graph, table: BackendTable, plan: Plan, choices: Choices) -> SearchSpace:
    """The search space for this model and backend; `plan` is the uniform plan with the preferred formats."""
    check_space(space, graph, table)
    fixed = {name for name, value in choices.items() if value not in (None, (), [])}
    axes: dict[str, tuple[Any, ...]] = {
        "weights": space.weights or (() if "weights" in fixed else _granularities(table)),
        "activations": space.activations,
        "observer": space.observer or (() if "observer" in fixed else _observers(table.activations.observer)),
        "weight_observer": space.weight_observer,
        "steps": (_steps(graph) if space.steps is None else space.steps) or ((),),
        "samples": space.samples,
    }
    quantized = {site.rpartition(":")[0] for site, _ in plan.quantized}
    found = [op for op in graph.ops if op.name in quantized and op.kind in table.operators]
    first = next((op.name for op in found if op.macs), None) if space.first else None
    operators = [
        Operator(
            name=op.name,
            kind=op.kind,
            macs=op.macs,
            options=(FLOAT,) if op.name == first else _options(space, op.name, op.kind),
        )
        for op in found
    ]
    return SearchSpace(axes={name: values or (None,) for name, values in axes.items()}, operators=tuple(operators))


def _options(space: Space, name: str, kind: str) -> tuple[OperatorOption, ...]:
    """The last matching rule applies; rules for names take precedence over rules for types."""
    rules = [rule for pattern, rule in space.operators.items() if _matches(name, pattern)]
    rules = rules or [rule for pattern, rule in space.types.items() if fnmatch.fnmatchcase(kind, pattern)]
    rule = rules[-1] if rules else SpaceRule()
    if rule.keep == "float":
        return (FLOAT,)
    own: list[OperatorOption] = [
        Override(weights=weights, activations=activations, observer=observer)
        for weights, activations, observer in product(
            rule.weights or (None,), rule.activations or (None,), rule.observer or (None,)
        )
    ]
    quantized = [None if option == Override() else option for option in own]
    return (*quantized,) if rule.keep == "quantized" else (*quantized, FLOAT)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def _granularities(table: BackendTable) -> tuple[str, ...]:
    """Scales per channel and per tensor: channels are more accurate, tensors may be faster."""
    usual = table.weights.format
    others = [usual.replace("/channel/", "/tensor/"), usual.replace("/tensor/", "/channel/")]
    allowed = [text for text in others if text != usual and table.weights.allows(Format.parse(text))]
    return (usual, *allowed)


def _observers(usual: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((usual, "mse", "percentile")))


def _steps(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """PTQ steps for this kind of model, cheap ones first."""
    kinds = {op.kind for op in graph.ops}
    if "layer_norm" in kinds:
        return ((), ("smoothquant",), ("smoothquant:alpha=0.7",), ("bias-correction",))
    return ((), ("bias-correction",), ("equalize", "bias-correction"), ("adaround:iterations=200",))


def _problems(space: Space, graph: Graph, table: BackendTable) -> list[Problem]:
    kinds = sorted({op.kind for op in graph.ops})
    problems = []
    rules: list[tuple[str, SpaceRule | Space]] = [("space", space)]
    for where, rules_of, known in (("types", space.types, kinds), ("operators", space.operators, list(graph.by_name))):
        for pattern, rule in rules_of.items():
            place = f"space.{where}.{pattern}"
            rules.append((place, rule))
            if not any(_matches(name, pattern) for name in known):
                fix = did_you_mean(pattern, known)
                what = "the pattern matches nothing in this model"
                problems.append(Problem(what=what, where=place, value=pattern, fix=fix, code="pattern-matches-nothing"))
    for place, one in rules:
        for role, choice in (("weights", table.weights), ("activations", table.activations)):
            for text in getattr(one, role):
                try:
                    if not choice.allows(Format.parse(text)):
                        fix = f"use one of: {', '.join(choice.formats)}"
                        what, where = f"{table.name} can't run this format", f"{place}.{role}"
                        problems.append(Problem(what=what, where=where, value=text, fix=fix, code="unsupported-format"))
                except BitwrightError as error:
                    problems += error.problems
        for name in one.observer:
            if name not in OBSERVERS:
                fix = did_you_mean(name, OBSERVERS.names())
                what, where = "unknown observer", f"{place}.observer"
                problems.append(Problem(what=what, where=where, value=name, fix=fix, code="unknown-observer"))
    for steps in space.steps or ():
        try:
            read_steps(steps)
        except BitwrightError as error:
            problems += error.problems
    return problems
