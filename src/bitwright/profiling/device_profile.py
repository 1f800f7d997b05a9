"""`DeviceProfile`: the measured costs of one kind of device, as versioned JSON with a published schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from bitwright.core import display
from bitwright.core.arguments import strict
from bitwright.core.display import Summarized, Table
from bitwright.core.documents import parse_json, read_text, reject_other_kind
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.files import write_text
from bitwright.core.formatting import counted
from bitwright.core.schemas import Strict, validated
from bitwright.profiling.cost_key import CostKey, TensorSpec

if TYPE_CHECKING:
    from bitwright.profiling.step_graph import StepGraph

MOST_SECONDS, MOST_BYTES, MOST_COUNT = 1e9, 2**50, 2**40
_MANY = 8


class OperatorTime(Strict):
    """Seconds of one call: the mean over typical steps, and its 95 % confidence interval."""

    seconds: float = Field(ge=0, le=MOST_SECONDS)
    low: float | None = Field(default=None, ge=0, le=MOST_SECONDS, description="Lower end of the confidence interval.")
    high: float | None = Field(default=None, ge=0, le=MOST_SECONDS, description="Upper end of the confidence interval.")
    repetitions: int = Field(default=1, ge=0, le=MOST_COUNT, description="0: not measured here (published or derived).")


class SavedTensors(Strict):
    """The tensors that a call saves for backward."""

    ports: list[str] = Field(
        default_factory=list,
        description="Saved tensors that exist anyway: a port (after its cast, if it has one), or `output`.",
    )
    own: int = Field(default=0, ge=0, le=MOST_BYTES, description="Bytes that only this call holds.")


class OperatorCost(Strict):
    """One operator with its shapes and arguments in one format."""

    operator: str = Field(description="The call as text: `conv2d(input=f32[32,3,32,32], weight=…)`; `*` in a rate.")
    format: str = Field(description="`float32`, `amp-bf16`, `float32/fold4`, or the format of a registered kernel.")
    forward: OperatorTime
    backward: OperatorTime | None = None
    saved: SavedTensors | None = None


class Line(Strict):
    """seconds = fixed + per_element · n for n elements, both non-negative, for n ≥ `start`."""

    per_element: float = Field(ge=0, le=MOST_SECONDS)
    fixed: float = Field(ge=0, le=MOST_SECONDS)
    start: int = Field(default=0, ge=0, le=MOST_BYTES)
    r2: float | None = Field(default=None, description="R² of the fit at all sizes.")
    held_out: float | None = Field(
        default=None, description="Largest relative error at sizes that were left out of the fit."
    )


class CastCost(Strict):
    """A kind of cast or quantizer: fitted lines, and the sizes that were measured within models."""

    kind: str = Field(description="`lsq int8/channel/sym fused`, `float32→bfloat16`, …")
    forward: list[Line]
    backward: list[Line] = Field(default_factory=list)


class TensorsCost(Strict):
    """Work on all parameters: fixed + per_element · elements + per_tensor · tensors."""

    name: str = Field(description="`sgd/loop`, `adamw/foreach`, `clip`, `accumulate`, `zero_grad`.")
    per_element: float = Field(ge=0, le=MOST_SECONDS)
    per_tensor: float = Field(ge=0, le=MOST_SECONDS)
    fixed: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    r2: float | None = None
    held_out: float | None = None

    def seconds(self, elements: int, tensors: int) -> float:
        """Seconds for this number of elements and tensors."""
        return self.fixed + self.per_element * elements + self.per_tensor * tensors


class CollectiveCost(Strict):
    """The cost of a collective in a group of `world` processes: latency + bytes · per_byte."""

    operation: Literal["all_reduce", "broadcast"]
    backend: str
    world: int = Field(ge=2, le=1_000_000)
    latency: float = Field(ge=0, le=MOST_SECONDS)
    per_byte: float = Field(ge=0, le=MOST_SECONDS)
    r2: float | None = None
    held_out: float | None = None


class Host(Strict):
    """The overhead of the host besides operators."""

    gap: float = Field(
        default=0.0,
        ge=-MOST_SECONDS,
        le=MOST_SECONDS,
        description="Seconds per operator that a float model takes beyond the measured times of its operators.",
    )
    prepared_gap: float = Field(
        default=0.0,
        ge=-MOST_SECONDS,
        le=MOST_SECONDS,
        description="Seconds per operator that a prepared model takes beyond the times of its operators.",
    )
    seen: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="Seconds that interception adds to an operator of a prepared model.",
    )
    hooked: float = Field(
        default=0.0, ge=0, le=MOST_SECONDS, description="Seconds that interception adds to an operator with quantizers."
    )
    hook: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="Seconds that the timer added to each backward node; already subtracted.",
    )
    engine: float = Field(
        default=0.0, ge=0, le=MOST_SECONDS, description="Seconds from the call of backward to its first node."
    )
    engine_operator: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="Additional seconds before the first node for each operator of the model.",
    )
    step: float = Field(default=0.0, ge=0, le=MOST_SECONDS, description="Fixed work of a step, without the scheduler.")
    schedule: float = Field(
        default=0.0, ge=0, le=MOST_SECONDS, description="Seconds to set the learning rate at each step."
    )
    floor: float = Field(
        default=0.0, ge=0, le=MOST_SECONDS, description="Seconds that the host needs for a step, even on a fast device."
    )
    yardstick: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="Seconds of the reference workload while operators were measured.",
    )
    ddp_forward: float = Field(
        default=0.0, ge=0, le=MOST_SECONDS, description="Seconds that DDP adds to a forward pass."
    )
    ddp_gradient: float = Field(default=0.0, ge=0, le=MOST_SECONDS, description="Seconds that DDP adds per gradient.")
    contention: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Share of its speed that computation loses while a collective runs.",
    )
    stretch: float = Field(
        default=1.0, ge=1, le=1e6, description="Factor by which a collective takes longer while the device computes."
    )

    def start(self, operators: int) -> float:
        """Seconds from the call of backward to its first node; autograd first visits all nodes."""
        return self.engine + self.engine_operator * operators

    def between(self, operators: int, hooked: int, *, prepared: bool) -> float:
        """Seconds of a forward pass outside of its operators, of which `hooked` have quantizers."""
        if not prepared:
            return self.gap * operators
        return self.prepared_gap * operators + self.hooked * hooked + self.seen * (operators - hooked)


class MemoryFacts(Strict):
    """The memory of a process that its tensors do not explain."""

    process: int = Field(
        default=0,
        ge=0,
        le=MOST_BYTES,
        description="Bytes of a training process outside of its tensors: libraries, workspaces.",
    )
    compiler: int = Field(
        default=0,
        ge=0,
        le=MOST_BYTES,
        description="Additional bytes of torch's compiler, if arithmetic is compiled (quantizers, int8 kernels).",
    )
    limit: int | None = Field(default=None, ge=0, le=MOST_BYTES, description="Memory of the device in bytes.")


@strict
class DeviceProfile(Summarized, Strict):
    """The measured, imported or published costs of one kind of device.

    `bitwright.profile` creates it, `save` and `DeviceProfile.load` write and read it as JSON, and `bitwright.predict`
    uses it.

    >>> profile = DeviceProfile(bitwright_profile=1, device="an example")
    >>> profile
    DeviceProfile('an example', measured, 0 operators)
    >>> DeviceProfile.from_json(profile.to_json()) == profile
    True
    """

    bitwright_profile: Literal[1] = Field(description="Version of this schema.")
    device: str = Field(description="A readable name of the device.")
    source: Literal["measured", "imported", "published"] = "measured"
    note: str = ""
    clock: Literal["wall", "cpu"] = "wall"
    threads: int = Field(default=1, ge=1, le=100_000)
    torch: str = ""
    operators: list[OperatorCost] = Field(default_factory=list)
    casts: list[CastCost] = Field(default_factory=list)
    tensors: list[TensorsCost] = Field(default_factory=list)
    collectives: list[CollectiveCost] = Field(default_factory=list)
    host: Host = Field(default_factory=Host)
    memory: MemoryFacts = Field(default_factory=MemoryFacts)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> DeviceProfile:
        """Return a copy with its own lookup tables, because its costs may differ."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("by_operator", "by_cast", "by_name"):
            copy.__dict__.pop(name, None)
        return copy

    @cached_property
    def by_operator(self) -> dict[tuple[str, str], OperatorCost]:
        """Costs by (operator, format)."""
        return {(cost.operator, cost.format): cost for cost in self.operators}

    @cached_property
    def by_cast(self) -> dict[str, CastCost]:
        """Casts by kind."""
        return {cost.kind: cost for cost in self.casts}

    @cached_property
    def by_name(self) -> dict[str, TensorsCost]:
        """Costs of work on all parameters."""
        return {cost.name: cost for cost in self.tensors}

    def __repr__(self) -> str:
        return f"DeviceProfile({self.device!r}, {self.source}, {counted(len(self.operators), 'operator')})"

    __str__ = __repr__

    def summary(self) -> Iterator[Table | str]:
        """The slowest operators."""
        heads = ["slowest operators", "format", "#forward", "#backward", "#±"]
        slowest = sorted(self.operators, key=lambda cost: -cost.forward.seconds)
        yield Table(heads, [_cells(cost) for cost in slowest], title=repr(self), most=10)
        if self.note:
            yield self.note

    def plot(self) -> display.Chart:
        """The forward time of the slowest operators."""
        slowest = sorted(self.operators, key=lambda cost: -cost.forward.seconds)[:10]
        bars = [
            (f"{cost.operator[:90]}, {cost.format}", f"{1e3 * cost.forward.seconds:.3f} ms", cost.forward.seconds)
            for cost in slowest
        ]
        return display.bar_chart(bars, label="Forward time of the slowest operators")

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON-compatible data, as `save` writes it."""
        return self.model_dump(exclude_none=True)

    def to_json(self) -> str:
        """Return the text of a profile file."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def save(self, path: str | Path) -> Path:
        """Write the profile atomically."""
        return write_text(Path(path), self.to_json() + "\n")

    @staticmethod
    def from_json(text: str, *, where: str = "profile") -> DeviceProfile:
        """Read a profile from text."""
        fix = "write it with `bitwright profile`; docs/profile.md has the schema"
        data = parse_json(text, where=where, what="the profile", fix=fix)

        def refusal(problems: list[Problem]) -> BitwrightError:
            if len(problems) > _MANY:  # a file of another kind
                problems = [replace(problems[0], what=f"not a device profile: {problems[0].what}")]
            return PlanError(
                [replace(one, where=f"{where}, {one.where}") for one in problems],
                title=f"{where} is not a device profile",
            )

        return validated(DeviceProfile, data, title="", fix=fix, error=refusal)

    @staticmethod
    def load(path: str | Path) -> DeviceProfile:
        """Read a file."""
        reject_other_kind(path, what="a device profile", fix="give a JSON file of `bitwright profile`")
        text = read_text(path, what="the profile", fix="make it with `bitwright profile`")
        return DeviceProfile.from_json(text, where=str(path))


def at(lines: Iterable[Line], elements: int) -> float | None:
    """Seconds for this number of elements; None without a matching line."""
    best = None
    for line in lines:
        if line.start <= elements and (best is None or line.start >= best.start):
            best = line
    return None if best is None else best.fixed + best.per_element * elements


def relative_uncertainty(operators: Sequence[OperatorCost]) -> float:
    """Return half the width of the confidence intervals, relative to the time of all operators."""
    known = [c.forward for c in operators if c.forward.low is not None and c.forward.high is not None]
    whole = sum(timing.seconds for timing in known)
    spread = sum((t.high or 0.0) - (t.low or 0.0) for t in known) / 2
    return spread / whole if whole else math.inf if spread else 0.0


def _cells(cost: OperatorCost) -> tuple[object, ...]:
    spread = relative_uncertainty([cost])
    return (
        cost.operator[:90],
        cost.format,
        f"{1e3 * cost.forward.seconds:.3f} ms",
        None if cost.backward is None else f"{1e3 * cost.backward.seconds:.3f} ms",
        (f"{100 * spread:.1f} %" if spread <= 1 else "> 100 %") if spread else None,
    )


# -- quality -----------------------------------------------------------------------------------------------------

_LEAST_R2, _LARGEST_ERROR = 0.9, 0.3
_UNCERTAIN = 0.1


def operators_of_step(profile: DeviceProfile, step: StepGraph) -> list[OperatorCost]:
    """Return the costs that belong to the operators of a step, in any format.

    A profile also has the operators of other models that were measured on the device.
    """
    calls = {CostKey.parse(call.key()).shapes_only() for call in (*(op.call for op in step.ops), step.loss)}
    tensors = {_without_gradient(tensor) for key in calls for tensor in key.tensors}
    found = []
    for cost in profile.operators:
        key = CostKey.parse(cost.operator).shapes_only()
        own = key in calls if key.is_call else all(_without_gradient(tensor) in tensors for tensor in key.tensors)
        if own:
            found.append(cost)
    return found


def _without_gradient(tensor: TensorSpec) -> TensorSpec:
    return tensor.with_(grad=False)


def step_uncertainty(profile: DeviceProfile, step: StepGraph) -> float:
    """Return the relative uncertainty of the times of a step's operators, in any format."""
    return relative_uncertainty(operators_of_step(profile, step))


def uncertain_times(profile: DeviceProfile, step: StepGraph, *, where: str | None = None) -> list[Problem]:
    """Return a warning if the times of a step are too uncertain to rely on."""
    spread = step_uncertainty(profile, step)
    if spread <= _UNCERTAIN:
        return []
    fix = "--rounds 100" if profile.clock == "cpu" else "--clock cpu"
    return [
        Problem(
            what=f"the times of the profile are uncertain by {uncertainty_text(spread)}",
            where=where,
            fix=f"profile again on an idle machine, or with {fix}",
            code="uncertain-times",
        )
    ]


def uncertainty_text(spread: float) -> str:
    """The uncertainty as a percentage.

    >>> uncertainty_text(0.25), uncertainty_text(47.95)
    ('±25 %', 'more than ±100 %')
    """
    return f"±{100 * spread:.0f} %" if spread <= 1 else "more than ±100 %"


def quality_notes(profile: DeviceProfile, step: StepGraph) -> list[str]:
    """Describe what makes the times of a step uncertain."""
    notes = [str(problem) for problem in uncertain_times(profile, step)]
    bad = poor_fits(profile)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        notes.append(f"poor fits, so times of other sizes are rough: {'; '.join(bad[:3])}{more}")
    return notes


def poor_fits(profile: DeviceProfile) -> list[str]:
    """Describe the fitted lines that differ much from the measurements."""
    lines: list[tuple[str, Line | TensorsCost | CollectiveCost]] = [
        (f"{cost.kind} {direction}", line)
        for cost in profile.casts
        for direction, found in (("forward", cost.forward), ("backward", cost.backward))
        for line in found
    ]
    lines += [(tensors.name, tensors) for tensors in profile.tensors]
    lines += [(f"{cost.operation} of {cost.world}", cost) for cost in profile.collectives]
    return [
        f"{name} (R² {line.r2:.2f}, error at held-out sizes {100 * (line.held_out or 0):.0f} %)"
        for name, line in lines
        if line.r2 is not None and (line.r2 < _LEAST_R2 or (line.held_out or 0) > _LARGEST_ERROR)
    ]
