"""A profile from the data sheet of a device and fitted efficiencies: good for planning, not a measurement.

Each operator takes as long as its arithmetic or its memory traffic, whichever is longer. `published.yaml` has the peaks
of the data sheets and the share of them that real steps reach. `benchmarks/published_fit.py` fits these shares to
published measurements and predicts models that were left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import product

from pydantic import BaseModel, ConfigDict, Field

from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError, did_you_mean
from bitwright.graph.operators import macs
from bitwright.profiling.cost_key import CallSpec, TensorSpec
from bitwright.profiling.device_profile import (
    CastCost,
    DeviceProfile,
    Host,
    Line,
    MemoryFacts,
    OperatorCost,
    OperatorTime,
    SavedTensors,
    TensorsCost,
)
from bitwright.profiling.profiled_step import CLOCKS, TimedStep, Variant
from bitwright.profiling.step_graph import StepGraph
from bitwright.profiling.step_timer import ACCUMULATE, CallWork, Key, Sample, StepTimer
from bitwright.training.step import Batch
from bitwright.workload import Loss

__all__ = ["Facts", "derived_profile", "published", "published_devices"]

# Float32 tensors that are read or written for each parameter, by the kernels of an optimizer without fusion.
_PASSES = {"sgd": 9, "adamw": 16, "clip": 3, "accumulate": 3, "zero_grad": 0}
_LAUNCH = 5e-6  # seconds between two kernels of a GPU
# These operators return a view. `reshape` and `contiguous` copy tensors that aren't contiguous.
_VIEWS = frozenset(
    (
        *("view", "view_as", "reshape", "contiguous", "transpose", "permute", "expand", "expand_as", "unsqueeze"),
        *("squeeze", "flatten", "unflatten", "getitem", "split", "chunk", "narrow", "select", "unbind", "detach", "t"),
        *("swapaxes", "movedim", "attribute_T", "attribute_mT"),
    )
)
_COPIES = ("reshape", "contiguous", "flatten", "view_as")
# Traffic of backward relative to forward's. Others read a gradient and a saved tensor, and write a gradient.
_BACKWARD = {"add": 0.0, "sub": 0.0, "batch_norm": 2.5, "layer_norm": 2.5, "group_norm": 2.5, "rms_norm": 2.5}
_WIDTHS = {"float32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
_UNITS = {"float16": "fp16", "bfloat16": "bf16"}
_CASTS = {"float32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8", "fp8": "int8"}


class Facts(BaseModel):
    """The facts of a data sheet, and the share of them that training steps reach."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    operations_per_second: dict[str, float]
    bytes_per_second: float
    memory_gb: float
    source: str
    efficiency: dict[str, float] = Field(default_factory=dict)
    """The share of the peak: `memory`, and each format."""
    origin: str = ""
    """What the efficiencies were fitted to."""
    casts: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Measured casts: seconds per element, and fixed seconds."""

    def arithmetic(self, operations: float, format: str) -> float:
        """Seconds of arithmetic. A format without its own units runs at the rate of float32."""
        units = format if format in self.operations_per_second else "float32"
        return operations / (self.operations_per_second[units] * self.efficiency.get(units, 1.0))

    def traffic(self, bytes: float) -> float:
        """Seconds of memory traffic."""
        return bytes / (self.bytes_per_second * self.efficiency.get("memory", 1.0))

    def cast_line(self, source: str, target: str) -> tuple[float, float]:
        """Seconds per element and fixed seconds of a cast: measured, or one pass over both tensors."""
        known = self.casts.get(f"{source}→{target}")
        if known is not None:
            return known
        width = {"float32": 4, "int8": 1}
        reads = 2 if target == "int8" else 1  # the largest value first
        return self.traffic(reads * width.get(source, 2) + width.get(target, 2)), _LAUNCH

    def cast(self, source: str, target: str, elements: float) -> float:
        """Seconds of a cast."""
        if source == target or not elements:
            return 0.0
        per_element, fixed = self.cast_line(source, target)
        return per_element * elements + fixed


@cache
def published_devices() -> dict[str, Facts]:
    """All devices with published facts, by name."""
    text = files("bitwright.profiling").joinpath("published.yaml").read_text(encoding="utf-8")
    return {name: Facts.model_validate(facts) for name, facts in parse_yaml(text, where="published.yaml").items()}


def _facts(device: str) -> Facts:
    known = published_devices()
    if device not in known:
        raise BitwrightError(
            "no published facts about this device",
            where="--published",
            value=device,
            fix=did_you_mean(device, known),
            code="unknown-device",
        )
    return known[device]


def published(device: str, variants: Sequence[Variant], batches: Sequence[Batch], loss: Loss) -> DeviceProfile:
    """Return derived costs of these models on a device. One step of each shows its calls and what backward keeps."""
    facts = _facts(device)
    costs: dict[Key, OperatorCost] = {}
    for variant in variants:
        variant.model.train()
        for batch in batches:
            step = TimedStep(variant.model, [batch], loss, variant.settings)
            timer = StepTimer(variant.model, variant.plan, variant.settings, CLOCKS["wall"])
            sample = timer.run(step, saving=True)
            costs.update({key: _sampled(key, sample, facts) for key in sample.calls if key not in costs})
    return _profile(facts, list(costs.values()))


def derived_profile(facts: Facts | str, graph: StepGraph, formats: Sequence[str] = ()) -> DeviceProfile:
    """Return derived costs of a recorded step, also of a batch that this machine can't run (`extrapolate`).

    `formats` are formats of operators besides float: `kernel fp16/input+weight`, or those of another implementation.
    Operators without such a format pass on what they get: their costs are given for float16 inputs, too.
    """
    facts = _facts(facts) if isinstance(facts, str) else facts
    costs: dict[Key, OperatorCost] = {}
    for op in graph.ops:
        work = CallWork(op.call.kind, dict(op.call.ports), op.outputs)
        saved = SavedTensors(ports=sorted(op.saved), own=op.saved_own)
        for changed, call in _types(op.call, op.sources):
            outputs = op.outputs
            if changed:
                own = [spec.dtype for port, spec in call.ports if spec.is_float and spec.shape and port in changed]
                wide = [p for p, spec in op.call.ports if spec.is_float and spec.shape and p not in changed]
                low = own and not [p for p in wide if p not in ("weight", "bias")]
                outputs = tuple(s.with_(dtype="float16") if low and s.is_float else s for s in op.outputs)
            one = replace(work, inputs=dict(call.ports), outputs=outputs)
            costs.setdefault((call.key(), "float32"), _cost((call.key(), "float32"), one, facts, saved))
        for format in formats:
            key = (op.call.key(), format)
            costs.setdefault(key, _cost(key, work, facts, saved))
    for _, call in _types(graph.loss, graph.loss_sources):
        work = CallWork("loss", dict(call.ports), ())
        costs.setdefault((call.key(), "float32"), _cost((call.key(), "float32"), work, facts, None))
    return _profile(facts, list(costs.values()))


def _types(call: CallSpec, sources: Sequence[str]) -> Iterator[tuple[set[str], CallSpec]]:
    """The call with each float32 result of another operator as it is, and in float16."""
    ports = [
        port
        for (port, spec), source in zip(call.ports, sources, strict=True)
        if spec.dtype == "float32" and source.startswith("op:")
    ]
    for low in product((False, True), repeat=min(len(ports), 3)):
        chosen = {port for port, is_low in zip(ports, low, strict=False) if is_low}
        now = [(p, spec.with_(dtype="float16") if p in chosen else spec) for p, spec in call.ports]
        yield chosen, replace(call, ports=tuple(now))


def _profile(facts: Facts, costs: list[OperatorCost]) -> DeviceProfile:
    pairs = [(a, b) for a in ("float32", "float16", "int8") for b in ("float32", "float16", "int8") if a != b]
    casts = []
    for source, target in pairs:
        there = Line(per_element=facts.cast_line(source, target)[0], fixed=facts.cast_line(source, target)[1])
        back = Line(per_element=facts.cast_line(target, source)[0], fixed=facts.cast_line(target, source)[1])
        backward = [] if "int8" in (source, target) else [back]
        casts.append(CastCost(kind=f"{source}→{target}", forward=[there], backward=backward))
    fitted = f"; efficiencies: {facts.origin}" if facts.origin else ""
    return DeviceProfile(
        bitwright_profile=1,
        device=f"{facts.device} (published, not measured)",
        source="published",
        note=f"{facts.source}: each operator at its share of the peak of arithmetic or memory{fitted}",
        operators=costs,
        casts=casts,
        tensors=[
            TensorsCost(name=name, per_element=facts.traffic(4 * _PASSES[name.partition("/")[0]]), per_tensor=0.0)
            for name in ("sgd/loop", "sgd/foreach", "adamw/loop", "adamw/foreach", "clip", "accumulate", "zero_grad")
        ],
        host=Host(),
        memory=MemoryFacts(limit=int(facts.memory_gb * 2**30)),
    )


def _sampled(key: Key, sample: Sample, facts: Facts) -> OperatorCost:
    work = sample.work.get(key)
    if work is None:  # a gradient that is stored without addition
        assert key[1] == ACCUMULATE, key
        return OperatorCost(operator=key[0], format=key[1], forward=_derived(0.0), backward=_derived(0.0))
    saved = sample.saved.get(key)
    kept = None if saved is None else SavedTensors(ports=sorted(saved.ports), own=saved.own)
    return _cost(key, work, facts, kept)


def _cost(key: Key, work: CallWork, facts: Facts, saved: SavedTensors | None) -> OperatorCost:
    text, format = key
    forward, backward = _seconds(work, format, facts)
    return OperatorCost(
        operator=text,
        format=format,
        forward=_derived(forward),
        backward=_derived(backward) if backward else None,
        saved=saved,
    )


def _derived(seconds: float) -> OperatorTime:
    return OperatorTime(seconds=seconds, repetitions=0)


def _seconds(work: CallWork, format: str, facts: Facts) -> tuple[float, float]:
    """Seconds of forward and backward."""
    if work.kind in _VIEWS:
        copies = work.kind in _COPIES and any(spec.strides is not None for spec in work.inputs.values())
        if not copies:
            return 0.0, 0.0
    units = _units(format, work)
    operations = 2.0 * multiply_adds(work)
    kernel = format.startswith("kernel ")
    grads = [port for port, spec in work.inputs.items() if spec.grad and port != "bias"]
    has_backward = any(spec.grad for spec in work.outputs) or bool(grads)
    inputs = sum(spec.elements for spec in work.inputs.values() if spec.is_float)
    outputs = sum(spec.elements for spec in work.outputs if spec.is_float)
    narrow = _CASTS.get(units, "float32")
    forward = max(facts.arithmetic(operations, units), facts.traffic(_moved(work, units))) + _LAUNCH
    backward = 0.0
    if operations:
        for port in grads[:2]:
            own = _gradient_units(format, port, units)
            backward += max(facts.arithmetic(operations, own), facts.traffic(_moved(work, own))) + _LAUNCH
            if kernel and own != "float32":
                backward += facts.cast("float32", _CASTS.get(own, "float32"), outputs)
        if not kernel and units == "int8" and backward:  # gradients have 16 bits, their tensors are cast
            activations = sum(s.elements for p, s in work.inputs.items() if p not in ("weight", "bias") and s.grad)
            backward += facts.cast("int8", "float16", inputs) + facts.cast("float32", "float16", outputs)
            backward += facts.cast("float16", "float32", activations)
    elif has_backward:
        backward = facts.traffic(_moved_back(work, units)) + (_LAUNCH if _BACKWARD.get(work.kind, 1.0) else 0.0)
    if kernel and units != "float32":  # a kernel casts its inputs, and its result back
        forward += facts.cast("float32", narrow, inputs)
        if units != "int8":
            forward += facts.cast(narrow, "float32", outputs)
            if backward and not operations:
                backward += facts.cast("float32", narrow, outputs) + facts.cast(narrow, "float32", inputs)
    return forward, backward


def _moved(work: CallWork, units: str) -> float:
    """Bytes that forward, or the product of one gradient, reads and writes."""
    if work.kind == "embedding":  # it reads rows of the table
        return 2.0 * sum(spec.elements for spec in work.outputs) * _WIDTHS.get(units, 4)
    inputs = [_bytes(spec, units) for spec in work.inputs.values()]
    outputs = [_bytes(spec, "float32" if units == "int8" else units) for spec in work.outputs]
    moved = float(sum(inputs) + sum(outputs))
    if work.kind == "batch_norm":
        moved += max(inputs, default=0)  # once for the statistics
    elif "max_pool" in work.kind:
        moved += 8 * sum(spec.elements for spec in work.outputs)  # positions
    return moved


def _moved_back(work: CallWork, units: str) -> float:
    """Bytes that backward of an operator without products reads and writes."""
    if work.kind == "embedding":
        return _moved(work, units) + sum(spec.bytes for port, spec in work.inputs.items() if port == "weight")
    inputs = sum(_bytes(spec, units) for spec in work.inputs.values())
    outputs = sum(_bytes(spec, units) for spec in work.outputs)
    if "max_pool" in work.kind:
        return 2 * inputs + outputs + 8 * sum(spec.elements for spec in work.outputs)
    alone = sum(spec.is_float for spec in work.inputs.values()) == 1
    share = 1.0 if work.kind in ("mul", "truediv", "div") and alone else _BACKWARD.get(work.kind, 1.5)
    return share * (inputs + outputs)


def _bytes(spec: TensorSpec, units: str) -> int:
    """Bytes of a tensor that these units read or write."""
    if not spec.is_float or (spec.dtype != "float32" and units in ("float32", "fp16", "bf16")):
        return spec.bytes
    return spec.elements * _WIDTHS.get(units, 4)


def _units(format: str, work: CallWork) -> str:
    """The arithmetic units of forward: `kernel int8/input` uses INT8."""
    if format.startswith("amp-"):
        return format.removeprefix("amp-")
    prefix, _, name = format.partition(" ")
    if name and prefix in ("kernel", "qsync"):
        return name.partition("/")[0]
    types = {spec.dtype for port, spec in work.inputs.items() if spec.is_float and spec.shape and port != "bias"}
    return _UNITS.get(next(iter(types)), "float32") if len(types) == 1 else "float32"


def _gradient_units(format: str, port: str, forward: str) -> str:
    """The units of one gradient: `kernel int8/input` computes the gradient of the weight in float32."""
    if format.startswith("kernel "):
        name = "weight" if port == "weight" else "input"
        return forward if name in format.partition("/")[2].split("/")[0].split("+") else "float32"
    return "fp16" if forward == "int8" else forward


def multiply_adds(work: CallWork) -> float:
    """Multiply-adds of one call; 0 for operators that only move memory."""
    output: tuple[int, ...] = work.outputs[0].shape if work.outputs else ()
    return float(macs(work.kind, {port: spec.shape for port, spec in work.inputs.items()}, output))
