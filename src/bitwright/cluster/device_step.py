"""The step of one device: forward, loss, backward in reverse order, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate as running_sum

from bitwright.cluster.cost_lookup import Cost, Costs, kernel_estimate
from bitwright.cluster.data_parallel import gradients_of
from bitwright.core.errors import BitwrightError, did_you_mean
from bitwright.graph.graph import site_name
from bitwright.plan import Plan
from bitwright.profiling.cost_key import FLOATS, CallSpec, TensorSpec
from bitwright.profiling.device_profile import DeviceProfile
from bitwright.profiling.execution import IMPLEMENTATIONS, Cast, Execution, OperatorUnderPlan, base_format
from bitwright.profiling.step_graph import StepGraph, StepOp
from bitwright.profiling.step_timer import operator_key
from bitwright.training.config import AMP_DTYPES, Amp, StepSettings

_CONVOLUTIONS = [f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)]
_PRODUCTS = ["linear", "matmul", "addmm", "baddbmm", "addbmm", "addmv", "mv", "scaled_dot_product_attention", "prelu"]
_CELLS = ["lstm_cell", "gru_cell", "rnn_cell"]
ALLOW = frozenset([*_CONVOLUTIONS, *_PRODUCTS, *_CELLS])
_LOSSES = [
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "nll_loss", "smooth_l1_loss", "kl_div"),
    *("cosine_embedding_loss", "hinge_embedding_loss", "poisson_nll_loss", "triplet_margin_loss", "ctc_loss"),
]
_EXACT = ["avg_pool3d", "max_pool3d", "grid_sample", "polar", "prod", "quantile", "cdist", "trace", "stft", "inverse"]
DENY = frozenset([*_LOSSES, *_EXACT])
_NORMS = ["batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"]
# Statistics and parameters don't change the type of the result.
_FIRST = frozenset([*_NORMS, "dropout", "index_select"])
# Operators that cannot process integers, unless a kernel says otherwise.
_FLOAT_ONLY = ALLOW | DENY | frozenset([*_NORMS, "softmax", "log_softmax", "gelu", "silu", "tanh", "sigmoid", "loss"])
# These operators state their own output type.
_SAYS = frozenset(["to", "float", "half", "bfloat16", "double", "type", "type_as"])
_WIDTH = {"int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def given(op: StepOp, execution: Execution, amp: Amp | None, before: Mapping[str, str]) -> str:
    """The type of an operator's first output; `before` contains those of earlier operators."""
    recorded = op.outputs[0].dtype if op.outputs else "float32"
    if execution.gives is not None:
        return execution.gives
    if not op.outputs or not op.outputs[0].is_float or op.call.kind in _SAYS:
        return recorded
    if amp is not None and op.call.kind in ALLOW:
        return AMP_DTYPES[amp]
    if op.call.kind in DENY:
        return "float32"
    coming = [type for spec, type in incoming(op, before) if spec.is_float and spec.shape != ()]
    if op.call.kind in _FLOAT_ONLY:
        coming = [type if type in FLOATS else "float32" for type in coming]
    if not coming:
        return recorded
    if op.call.kind in _FIRST:
        return coming[0]
    return max(coming, key=lambda name: _WIDTH.get(name, 4))


def must_be_float(op: StepOp, execution: Execution) -> bool:
    """Whether inputs in another format must be cast: no kernel accepts them, and the kind doesn't keep the format."""
    return execution.takes is None and op.call.kind in _FLOAT_ONLY


def incoming(op: StepOp, before: Mapping[str, str]) -> list[tuple[TensorSpec, str]]:
    """For each port, the recorded tensor and its type under this plan."""
    return [
        (
            spec,
            before.get(source.removeprefix("op:"), spec.dtype)
            if source.startswith("op:") and spec.is_float
            else spec.dtype,
        )
        for (_, spec), source in zip(op.call.ports, op.sources, strict=True)
    ]


def flow(graph: StepGraph, executions: Mapping[str, Execution], amp: Amp | None) -> dict[str, str]:
    """The output types of operators."""
    found: dict[str, str] = {}
    for op in graph.ops:
        found[op.name] = given(op, executions[op.name], amp, found)
    return found


@dataclass(frozen=True)
class PlacedCast:
    """A cast of one tensor, with its cost."""

    cast: Cast
    tensor: TensorSpec
    cost: Cost


@dataclass(frozen=True)
class PlacedOperator:
    """One operator with its casts and the gradients that are complete after its backward."""

    op: StepOp
    execution: Execution
    cost: Cost
    casts: tuple[PlacedCast, ...]
    gives: str
    gradients: tuple[tuple[str, TensorSpec], ...]
    accumulation: float
    key: tuple[str, str] = ("", "")
    """The key of its cost."""

    @cached_property
    def forward(self) -> float:
        """Seconds, excluding the overhead of the host."""
        return self.cost.forward + sum(placed.cost.forward for placed in self.casts)

    @cached_property
    def backward(self) -> float:
        """Seconds, including the accumulation of gradients."""
        return self.cost.backward + sum(placed.cost.backward for placed in self.casts) + self.accumulation


@dataclass
class DeviceStep:
    """One device's step under one plan."""

    graph: StepGraph
    plan: Plan
    costs: Costs
    settings: StepSettings
    blocks: list[PlacedOperator] = field(default_factory=list)
    casts: bool = True
    """False omits the cost of casts, to measure their share."""
    known_trained: tuple[tuple[str, TensorSpec], ...] | None = None
    known_tail: dict[str, float] | None = None
    """`trained` and `tail` of a step with the same gradients, if there is one."""

    @property
    def profile(self) -> DeviceProfile:
        """What was measured."""
        return self.costs.profile

    @staticmethod
    def build(
        graph: StepGraph, plan: Plan, profile: DeviceProfile, settings: StepSettings, *, casts: bool = True
    ) -> DeviceStep:
        """Look up all costs; raise an error that lists all missing ones."""
        local = DeviceStep(graph, plan, Costs(profile), settings, casts=casts)
        gives: dict[str, str] = {}
        for op in graph.ops:
            block = local._block(op, plan, gives)
            gives[op.name] = block.gives
            local.blocks.append(block)
        _ = local.loss, local.tail
        local.costs.complain()
        return local

    def replaced(self, plan: Plan, changed: set[str]) -> DeviceStep:
        """The same step with another plan that differs only at these operators."""
        wrong = sorted(name for name in changed if name not in self.graph.position)
        if wrong:
            raise BitwrightError(
                "the step has no such operator",
                value=wrong[0],
                fix=did_you_mean(wrong[0], self.graph.position),
                code="unknown-operator",
            )
        local = DeviceStep(self.graph, plan, self.costs.fresh(), self.settings, list(self.blocks), casts=self.casts)
        gives = _Given(local)
        waiting = sorted(self.graph.position[name] for name in changed | self._with_affected_operators(plan, changed))
        seen = set(waiting)
        same = True
        while waiting:
            index = waiting.pop(0)
            old = local.blocks[index]
            new = local.blocks[index] = local._block(old.op, plan, gives)
            same = same and new.gradients == old.gradients
            moved = (new.execution.cast_at("output") is None) != (old.execution.cast_at("output") is None)
            if moved or new.gives != old.gives:  # readers get another type or other strides, so check them again
                for reader in self.graph.readers.get(old.op.name, ()):
                    if reader not in seen:
                        seen.add(reader)
                        waiting.append(reader)
                waiting.sort()
        if same:  # planners change plans often: reuse results that depend only on the gradients
            local.known_trained, local.known_tail = self.trained, self.tail
        _ = local.loss, local.tail
        local.costs.complain()
        return local

    def _with_affected_operators(self, plan: Plan, changed: set[str]) -> set[str]:
        """Operators that the plans treat differently because of others: folded norms, shared quantizers."""
        found: set[str] = set()
        before, now = self.plan.folds, plan.folds
        for norm in before.keys() | now.keys():
            old, new = before.get(norm), now.get(norm)
            if old != new:
                found |= {norm, *(fold.into for fold in (old, new) if fold is not None)}
        for sites in (self.plan.sites, plan.sites):
            for site, spec in sites.items():
                if spec.share is not None and spec.share.rpartition(":")[0] in changed:
                    found.add(site.rpartition(":")[0])
        return {name for name in found if name in self.graph.position}

    @property
    def compiled(self) -> bool:
        """Whether any operator calls compiled arithmetic."""
        return any(block.execution.compiled for block in self.blocks)

    def _block(self, op: StepOp, plan: Plan, before: Mapping[str, str]) -> PlacedOperator:
        settings = self.settings
        execution = IMPLEMENTATIONS.execution(OperatorUnderPlan(op.name, op.call, plan, settings.amp, settings.fuse))
        types = incoming(op, before)
        back = must_be_float(op, execution)
        now = {
            port: spec.with_(dtype=type)
            for (port, spec), (_, type) in zip(op.call.ports, types, strict=True)
            if spec.dtype != type and execution.takes is None and not (back and type not in FLOATS)
        }
        for (port, spec), source in zip(op.call.ports, op.sources, strict=True):
            if spec.strides is not None and self._is_cast(source, plan):
                now[port] = now.get(port, spec).compact()
        call = op.call if not now else _with(op, now)
        text, format = operator_key(call, execution)
        gives = given(op, execution, settings.amp, before)
        cost = self.costs.operator(text, format, op.name, lambda: kernel_estimate(op.call, plan.compute.get(op.name)))
        placed = [self._placed(op, cast, call.port(cast.port), gives) for cast in execution.casts]
        placed += [
            self._placed(op, Cast(port, f"{type}→{execution.takes}"), spec.with_(dtype=type), gives)
            for (port, spec), (_, type), source in zip(op.call.ports, types, op.sources, strict=True)
            if execution.takes is not None and source.startswith("op:") and spec.is_float and type != execution.takes
        ]
        if back:  # cast a kernel's own format back for operators that can't read it
            placed += [
                self._placed(op, Cast(port, f"{type}→float32"), spec, gives)
                for (port, spec), (_, type) in zip(op.call.ports, types, strict=True)
                if spec.is_float and type not in FLOATS
            ]
        gradients = gradients_of(self.graph, op, execution, plan)
        taken = sum(self.costs.accumulation(tensor) for _, tensor in gradients)
        casts = tuple(placed) if self.casts else ()
        return PlacedOperator(
            op, execution, cost, casts, gives, gradients, taken if op.has_backward else 0.0, (text, format)
        )

    @staticmethod
    def _is_cast(source: str, plan: Plan) -> bool:
        """Whether there is a quantizer between the operator that creates this tensor and its readers."""
        spec = plan.sites.get(site_name(source.removeprefix("op:"), "output"))
        return spec is not None and spec.quantizes

    def _placed(self, op: StepOp, cast: Cast, spec: TensorSpec | None, gives: str) -> PlacedCast:
        if spec is None:  # the output, or the bias of a folded norm
            spec = op.outputs[0].with_(dtype=gives)
        return PlacedCast(cast, spec, self.costs.cast(cast, spec, op.name))

    # -- seconds ---------------------------------------------------------------------------------------------

    @cached_property
    def gap(self) -> float:
        """The overhead of the host for all operators of one forward pass."""
        hooked = sum(bool(block.execution.casts) for block in self.blocks)
        return self.profile.host.between(len(self.blocks), hooked, prepared=self.plan.changes_models)

    @cached_property
    def loss(self) -> Cost:
        """The loss."""
        return self.costs.operator(self.loss_text, base_format(self.settings.amp), "loss")

    @property
    def loss_text(self) -> str:
        """The loss, with the output types of the model under this plan."""
        call, position = self.graph.loss, self.graph.position
        now = {
            port: spec.with_(dtype=self.blocks[position[name]].gives)
            for (port, spec), source in zip(call.ports, self.graph.loss_sources, strict=True)
            if spec.is_float and (name := source.removeprefix("op:")) in position
        }
        return call.key(now)

    @cached_property
    def forward_seconds(self) -> float:
        """Seconds of one batch without the loss."""
        return sum(block.forward for block in self.blocks) + self.gap

    @cached_property
    def backward_offsets(self) -> list[float]:
        """For each operator in reverse order: the time from the start of backward until its backward is done."""
        start = self.profile.host.start(len(self.blocks)) + self.loss.backward
        return list(running_sum((block.backward for block in reversed(self.blocks)), initial=start))[1:]

    @cached_property
    def gradient_offsets(self) -> dict[str, tuple[float, int]]:
        """For each gradient: the time from the start of backward until it is complete, and its position."""
        found: dict[str, tuple[float, int]] = {}
        for block, offset in zip(reversed(self.blocks), self.backward_offsets, strict=True):
            for name, _ in block.gradients:
                found[name] = (offset, len(found) + 1)
        return found

    @cached_property
    def backward_seconds(self) -> float:
        """Seconds of one batch."""
        return self.backward_offsets[-1] if self.blocks else 0.0

    @cached_property
    def trained(self) -> tuple[tuple[str, TensorSpec], ...]:
        """All tensors with a gradient, in the order of their gradients."""
        if self.known_trained is not None:
            return self.known_trained
        return tuple(item for block in reversed(self.blocks) for item in block.gradients)

    @cached_property
    def tail(self) -> dict[str, float]:
        """Seconds after the last backward pass, and the fixed work of a step."""
        if self.known_tail is not None:
            return self.known_tail
        tensors = len(self.trained)
        elements = sum(spec.elements for _, spec in self.trained)
        settings, host, costs = self.settings, self.profile.host, self.costs
        again = settings.accumulate - 1
        clips = settings.clip is not None
        scaling = costs.scaling(elements, tensors) if settings.amp == "fp16" else 0.0
        return {
            "accumulate": again * costs.on_all("accumulate", elements, tensors) if again else 0.0,
            "clip": costs.on_all("clip", elements, tensors) + scaling
            if clips
            else 0.0,  # clipping needs unscaled gradients
            "optimizer": costs.optimizer(settings, elements, tensors) + (0.0 if clips else scaling),
            "other": host.step
            + costs.on_all("zero_grad", elements, tensors)
            + (host.schedule if settings.schedule else 0.0),
        }

    @cached_property
    def host_limit(self) -> float:
        """Seconds for which the device waits because the host can't issue work faster."""
        floor = self.profile.host.floor
        if not floor:
            return 0.0
        own = self.settings.accumulate * (self.forward_seconds + self.loss.forward + self.backward_seconds)
        return max(0.0, floor - own - sum(self.tail.values()))

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds of one step alone, by phase."""
        count = self.settings.accumulate
        tail = self.tail
        return {
            "forward": count * self.forward_seconds,
            "loss": count * self.loss.forward,
            "backward": count * self.backward_seconds + tail["accumulate"],
            "clip": tail["clip"],
            "optimizer": tail["optimizer"],
            "other": tail["other"] + self.host_limit,
        }

    @property
    def still(self) -> dict[str, float]:
        """Seconds of the phases before the collectives that do not depend on the batch."""
        return {"backward": self.tail["accumulate"], "other": self.tail["other"] + self.host_limit}

    @property
    def lacks_scaling(self) -> bool:
        """Whether the step needs fp16 loss scaling that the profile doesn't have."""
        return self.settings.amp == "fp16" and "scaling" not in self.profile.by_name

    @property
    def stood_in(self) -> int:
        """Operators without a measurement in their format."""
        loss = (self.loss_text, base_format(self.settings.amp))
        return sum(key in self.costs.stood_in for key in [*(block.key for block in self.blocks), loss])

    @property
    def seconds(self) -> float:
        """Seconds of one step of a single device."""
        return sum(self.phases.values())


class _Given(dict[str, str]):
    """The output types of blocks, read from the blocks themselves."""

    def __init__(self, local: DeviceStep) -> None:
        super().__init__()
        self.local = local

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        index = self.local.graph.position.get(name)
        return default if index is None else self.local.blocks[index].gives


def _with(op: StepOp, now: Mapping[str, TensorSpec]) -> CallSpec:
    return replace(op.call, ports=tuple((port, now.get(port, spec)) for port, spec in op.call.ports))
