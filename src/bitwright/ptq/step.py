"""The base class of PTQ steps, and the context in which they run: the model, its graph and rereadable data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import frexp, inf
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from bitwright.core.errors import BitwrightError, CalibrationError, PlanError, Problem, did_you_mean
from bitwright.core.registry import STEPS
from bitwright.core.tensor_tree import eval_mode
from bitwright.graph import Graph, Op, Source
from bitwright.graph.operators import EXPERT_PRODUCTS
from bitwright.graph.recording import Runner, Tape, Values, inputs_of, parameters_of, record
from bitwright.plan import Plan
from bitwright.quantizers import Attachment, Quantizer, attachment_of, grid_from_range, in_mode
from bitwright.workload.data import split

MEMORY = 1024
"""MiB of activations that steps keep in memory; the rest is written to disk."""


class Data:
    """Batches that can be read repeatedly: a list, a loader, or a function that returns a new iterator."""

    def __init__(self, batches: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches() if callable(self.batches) else self.batches)

    @property
    def once(self) -> bool:
        """Whether the batches can be read only once."""
        return isinstance(self.batches, Iterator)

    def pieces(self, size: int) -> Iterator[Any]:
        """Batches of at most `size` samples: larger batches are divided, smaller ones aren't joined."""
        return split(self, size)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A quantized weight and the first operator that uses it."""

    op: Op
    quantizer: Quantizer
    parameter: nn.Parameter
    name: str


@dataclass(kw_only=True)
class PtqContext:
    """The state of a prepared model while steps run on it."""

    model: nn.Module
    graph: Graph
    plan: Plan
    data: Data
    seed: int = 0
    memory: int = MEMORY
    reference: Values = field(default_factory=dict)
    """Parameters and buffers of the float model before the first step that needs ranges."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Operators or sites that the current step skipped, with the reason."""
    cache: dict[str, Any] = field(default_factory=dict)
    """State that a step keeps between units; after a resume the step must rebuild it."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    """Seeded for each unit, so that a resumed run draws the same numbers."""

    @property
    def attachment(self) -> Attachment:
        """The quantizers of the model."""
        return attachment_of(self.model)

    @cached_property
    def readers(self) -> dict[Source, int]:
        """The number of ports that read each source."""
        return {source: len(pairs) for source, pairs in self.graph.consumers.items()}

    @cached_property
    def tape(self) -> Tape:
        """The recording of one small call."""
        with in_mode(self.model, "float"):
            return record(self.model, next(self.data.pieces(2)))[0]

    @torch.no_grad()
    def watch(self, batch: int, look: Runner) -> None:
        """Run all data through the current float model; `look` executes each call."""
        tapes: dict[tuple[Any, ...], Tape] = {}
        with eval_mode(self.model), in_mode(self.model, "float"):
            for piece in self.data.pieces(batch):
                inputs = inputs_of(self.model, piece)
                shape = tuple((source, tensor.shape) for source, tensor in inputs.items())
                if shape not in tapes:
                    tapes[shape] = record(self.model, piece)[0]
                tape = tapes[shape]
                tape.run(0, len(tape.calls), inputs, {**tape.constants, **self.current_tensors()}, look)

    def weight_of(self, op: Op, port: str = "weight") -> nn.Parameter | None:
        """The parameter at a port of an operator, or None if the value isn't stored as a parameter."""
        found = op.port(port)
        if found is None or len(found.sources) != 1 or found.sources[0].kind != "param":
            return None
        return self.model.get_parameter(found.sources[0].name)

    def weights(self) -> list[Weight]:
        """The quantized weights in order of first use; unsupported ones are added to `skipped`."""
        result: list[Weight] = []
        for op in self.graph.ops:
            quantizer = self.attachment.quantizers.get(op.site("weight"))
            if quantizer is None:
                experts = op.site("input0" if op.name in self.graph.selections else "input1")
                known = op.kind in EXPERT_PRODUCTS or op.name in self.graph.selections
                if known and experts in self.attachment.quantizers:
                    self.skipped[experts] = "steps don't change weights of experts: rounded to nearest"
                continue
            parameter = self.weight_of(op)
            if parameter is None:
                self.skipped[quantizer.site] = "the weight is computed from a parameter, not stored as one"
            elif self.graph.partial(op):
                self.skipped[quantizer.site] = "only some inputs reach this operator"
            elif not is_uniform(quantizer):
                self.skipped[quantizer.site] = f"the levels of {quantizer.spec.quantizer} aren't a uniform grid"
            else:
                port = op.port("weight")
                assert port is not None
                result.append(Weight(op=op, quantizer=quantizer, parameter=parameter, name=port.sources[0].name))
        return result

    def fold_factor(self, weight: Weight) -> Tensor | None:
        """The factor of the folded norm, in a shape that broadcasts to the weight."""
        fold = weight.quantizer.fold
        return None if fold is None else fold.spread(fold.unit(), weight.parameter).detach()

    def folded(self, weight: Weight) -> Tensor:
        """The weight as its quantizer sees it."""
        factor = self.fold_factor(weight)
        wide = weight.parameter.detach().float()
        return wide if factor is None else wide * factor

    @torch.no_grad()
    def put(self, weight: Weight, folded: Tensor) -> None:
        """Set the weight to the value that its quantizer sees as `folded`."""
        factor = self.fold_factor(weight)
        if factor is not None:
            alive = factor.abs() > 0
            folded = torch.where(alive, folded / torch.where(alive, factor, 1.0), weight.parameter.float())
        weight.parameter.copy_(folded.to(weight.parameter.dtype))

    def current_tensors(self) -> Values:
        """The current parameters and buffers."""
        return parameters_of(self.model)


def is_uniform(quantizer: Quantizer) -> bool:
    """Whether the quantizer rounds values to the nearest point of a stored uniform grid."""
    plain = type(quantizer).transform is Quantizer.transform and not quantizer.of
    return quantizer.exportable and plain and not quantizer.spec.format.dynamic


def round_weight(quantizer: Quantizer, weight: Tensor) -> Tensor:
    """Return the weight as its quantizer would round it after calibration."""
    observer = quantizer.new_observer()
    observer.observe(quantizer.layout.rows(weight))
    grid = grid_from_range(*observer.range(), quantizer.spec.format, site=quantizer.site)
    scale, zero = (quantizer.layout.over(part, weight) for part in (grid.scale, grid.zero_point))
    return (torch.clamp(torch.round(weight / scale) + zero, grid.qmin, grid.qmax) - zero) * scale


def magnitude_unit(peak: float) -> float:
    """A power of two near `peak`, or 1 for ordinary magnitudes; steps divide by it before they square values.

    Squares of numbers beyond 1e±19 exceed the range of float32. Division by a power of two is exact.
    """
    if not 0.0 < peak < inf or 2.0**-20 <= peak <= 2.0**20:
        return 1.0
    return 2.0 ** max(-120, min(120, frexp(peak)[1]))


def require_rereadable(data: Data) -> None:
    """Raise an error if the data can be read only once."""
    if data.once:
        raise CalibrationError(
            "PTQ steps read the calibration data several times, but this data can be read only once",
            value=type(data.batches).__name__,
            fix="pass a list, a DataLoader, or a function that returns a new iterator",
            code="data-not-rereadable",
        )


class Step(BaseModel):
    """A PTQ algorithm. Its fields are its settings. A new algorithm is one file and one entry point."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    """The registered name."""

    needs_ranges: ClassVar[bool] = True
    """Whether the step runs after calibration; otherwise it runs before, on float weights."""

    needs_reference: ClassVar[bool] = True
    """Whether the step compares with the float weights from before the first step that needs ranges (a copy)."""

    def __init__(self, **settings: Any) -> None:
        """Validate all settings at once."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise PlanError(
                [self._problem(d) for d in error.errors()], title=f"invalid settings of {self.name}"
            ) from None

    @classmethod
    def _problem(cls, detail: Any) -> Problem:
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            near = did_you_mean(key, cls.model_fields)
            return Problem(what="unknown setting", where=f"{cls.name}: {key}", fix=near, code="unknown-argument")
        field = cls.model_fields.get(key)
        fix = field.description if field is not None else None
        where = f"{cls.name}: {key}"
        return Problem(what=detail["msg"], where=where, value=detail["input"], fix=fix, code="invalid-setting")

    def problems(self, context: PtqContext) -> Iterable[Problem]:
        """Problems that prevent the step from running, found before any long computation."""
        return ()

    def units(self, context: PtqContext) -> Sequence[str]:
        """Names of the units of work, in order; a run can resume after each of them."""
        raise NotImplementedError

    def run(self, context: PtqContext, unit: str) -> None:
        """Execute one unit and change the model in place."""
        raise NotImplementedError

    def finish(self, context: PtqContext) -> None:
        """Release resources after the last unit, or after an error."""

    def __str__(self) -> str:
        said = ",".join(f"{key}={value}" for key, value in self.model_dump(exclude_defaults=True).items())
        return f"{self.name}:{said}" if said else self.name


def read_steps(steps: Iterable[str | Step]) -> list[Step]:
    """Parse steps from names ("adaround", "adaround:iterations=500,lr=0.01"); all problems are reported together."""
    found: list[Step] = []
    problems: list[Problem] = []
    for step in steps:
        try:
            found.append(step if isinstance(step, Step) else _read(step))
        except BitwrightError as error:
            problems += error.problems
    late = [step.name for index, step in enumerate(found) if not step.needs_ranges and _ranged(found[:index])]
    for name in late:
        what = "changes float weights, so it must come before steps that need ranges"
        problems.append(Problem(what=what, where="steps", value=name, fix=f"put {name} first", code="step-order"))
    if problems:
        raise PlanError(problems, title="the steps have problems")
    return found


def _ranged(steps: list[Step]) -> bool:
    return any(step.needs_ranges for step in steps)


def _read(text: str) -> Step:
    name, _, rest = text.partition(":")
    kind: type[Step] = STEPS.get(name.strip())
    settings: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise BitwrightError(
                "settings have the form key=value",
                where=f"step {name}",
                value=part,
                fix=f"{name}:iterations=500",
                code="invalid-setting",
            )
        settings[key.strip().replace("-", "_")] = value.strip()
    return kind(**settings)
