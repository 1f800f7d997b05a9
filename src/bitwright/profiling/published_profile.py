"""A profile from the data sheet of a device: good for planning examples, not a measurement.

Each operator takes as long as its arithmetic at the published peak or its memory traffic at the published bandwidth,
whichever is longer. Real steps take longer, because no device reaches its peaks. The profile shows which precision a
device is made for. One step of the model on this machine shows the calls and the tensors that backward saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError, did_you_mean
from bitwright.profiling.cost_key import TensorSpec
from bitwright.profiling.device_profile import (
    DeviceProfile,
    Host,
    MemoryFacts,
    OperatorCost,
    OperatorTime,
    SavedTensors,
    TensorsCost,
)
from bitwright.profiling.profiled_step import CLOCKS, TimedStep, Variant
from bitwright.profiling.step_timer import ACCUMULATE, CallWork, Key, Sample, StepTimer
from bitwright.training.step import Batch
from bitwright.workload import Loss

# Float32 tensors that are read or written for each parameter.
_PASSES = {"sgd": 5, "adamw": 7, "clip": 3, "accumulate": 3, "zero_grad": 0}


class Facts(BaseModel):
    """The facts of a data sheet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    operations_per_second: dict[str, float]
    bytes_per_second: float
    memory_gb: float
    source: str

    def arithmetic(self, operations: float, format: str) -> float:
        """Seconds of arithmetic. A format without its own units runs at the rate of float32."""
        peaks = self.operations_per_second
        return operations / peaks.get(format, peaks["float32"])

    def traffic(self, bytes: float) -> float:
        """Seconds of memory traffic."""
        return bytes / self.bytes_per_second


@cache
def published_devices() -> dict[str, Facts]:
    """All devices with published facts, by name."""
    text = files("bitwright.profiling").joinpath("published.yaml").read_text(encoding="utf-8")
    return {name: Facts.model_validate(facts) for name, facts in parse_yaml(text, where="published.yaml").items()}


def published(device: str, variants: Sequence[Variant], batches: Sequence[Batch], loss: Loss) -> DeviceProfile:
    """Return the lower bound of the costs of these models on a device."""
    known = published_devices()
    if device not in known:
        raise BitwrightError(
            "no published facts about this device",
            where="--published",
            value=device,
            fix=did_you_mean(device, known),
            code="unknown-device",
        )
    facts = known[device]
    costs: dict[Key, OperatorCost] = {}
    for variant in variants:
        variant.model.train()
        for batch in batches:
            step = TimedStep(variant.model, [batch], loss, variant.settings)
            timer = StepTimer(variant.model, variant.plan, variant.settings, CLOCKS["wall"])
            sample = timer.run(step, saving=True)
            costs.update({key: _cost(key, sample, facts) for key in sample.calls if key not in costs})
    return DeviceProfile(
        bitwright_profile=1,
        device=f"{facts.device} (published, not measured)",
        source="published",
        note=f"{facts.source}: each operator at the peak of arithmetic or memory; real steps take longer",
        operators=list(costs.values()),
        tensors=[
            TensorsCost(name=name, per_element=facts.traffic(4 * _PASSES[name.partition("/")[0]]), per_tensor=0.0)
            for name in ("sgd/loop", "sgd/foreach", "adamw/loop", "adamw/foreach", "clip", "accumulate", "zero_grad")
        ],
        host=Host(),
        memory=MemoryFacts(limit=int(facts.memory_gb * 2**30)),
    )


def _cost(key: Key, sample: Sample, facts: Facts) -> OperatorCost:
    text, format = key
    work = sample.work.get(key)
    if work is None:  # a gradient that is stored without addition
        assert format == ACCUMULATE, key
        return OperatorCost(operator=text, format=format, forward=_derived(0.0), backward=_derived(0.0))
    saved = sample.saved.get(key)
    there = facts.traffic(sum(spec.bytes for spec in (*work.inputs.values(), *work.outputs)))
    operations = multiply_adds(work) * 2
    forward = max(there, facts.arithmetic(operations, _units(format)))
    backward = max(
        2 * there if any(spec.grad for spec in work.outputs) else 0.0,
        sum(facts.arithmetic(operations, _units(format, gradient)) for gradient in _gradients(work)),
    )
    return OperatorCost(
        operator=text,
        format=format,
        forward=_derived(forward),
        backward=_derived(backward) if backward else None,
        saved=None if saved is None else SavedTensors(ports=sorted(saved.ports), own=saved.own),
    )


def _derived(seconds: float) -> OperatorTime:
    return OperatorTime(seconds=seconds, repetitions=0)


def _gradients(work: CallWork) -> list[str]:
    """The products of backward, one for each operand with a gradient."""
    return ["weight" if port == "weight" else "input" for port, spec in work.inputs.items() if spec.grad][:2]


def _units(format: str, gradient: str | None = None) -> str:
    """The arithmetic units: `kernel int8/input` uses INT8 in forward and for the gradient of the input."""
    words = format.removeprefix("kernel ").split("/")
    if format.startswith("amp-"):
        return format.removeprefix("amp-")
    if not format.startswith("kernel "):
        return "float32"
    if gradient is not None and gradient not in words[1].split("+"):
        return "float32"
    return words[0]


def multiply_adds(work: CallWork) -> float:
    """Multiply-adds of one call; 0 for operators that only move memory."""
    shapes = work.inputs
    made = sum(spec.elements for spec in work.outputs)
    kind = work.kind
    if kind.startswith("conv_transpose"):
        return shapes["input"].elements * _per_channel(shapes["weight"])
    if kind.startswith("conv"):
        return made * _per_channel(shapes["weight"])
    if kind == "linear":
        return made * shapes["weight"].shape[-1]
    if kind in ("matmul", "addmm"):
        return made * shapes["input"].shape[-1]
    if kind == "scaled_dot_product_attention":
        query, key = list(shapes.values())[:2]
        return 2.0 * query.elements * key.shape[-2]
    return 0.0


def _per_channel(weight: TensorSpec) -> float:
    return weight.elements / weight.shape[0]
