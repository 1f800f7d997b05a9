"""Measurements on this machine: latency, peak memory, and whether 8-bit sums saturate."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from bitwright.core.arguments import Amount, Count, strict
from bitwright.core.display import Progress
from bitwright.core.environment import peak_resident_bytes, reset_peak, resident_bytes
from bitwright.core.errors import ArtefactError
from bitwright.core.files import scratch_folder
from bitwright.core.formats import Format
from bitwright.core.registry import RUNTIMES
from bitwright.deployment.runtimes.base import OnnxReader, Runtime, open_runtime
from bitwright.plan import Plan, SiteSpec
from bitwright.quantizers import prepare, quantizers_of

Name = TypeVar("Name", bound=Hashable)


UNSURE = 0.5
"""The interquartile range, relative to the median, above which a median is too unsure to compare it."""
TOO_BUSY = "this machine is too busy to tell"


def relative_spread(values: Sequence[float]) -> float:
    """The interquartile range relative to the median.

    >>> relative_spread([0.5, 0.52, 0.48, 0.51, 9.0]) < UNSURE, relative_spread([0.5, 2.0, 11.0, 0.7, 4.0]) > UNSURE
    (True, True)
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latency of one callable in milliseconds: the median (p50) and other percentiles."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    p99_ms: float
    runs: int
    spread: float = 0.0
    """The interquartile range relative to the median. Above `UNSURE`, a comparison of medians is unreliable."""

    @classmethod
    def of(cls, times: Sequence[float]) -> Latency:
        """Percentiles of measured milliseconds, interpolated between the measurements.

        >>> Latency.of([1.0, 2.0, 4.0])
        Latency(median_ms=2.0, p10_ms=1.2, p90_ms=3.6, p99_ms=3.96, runs=3, spread=0.75)
        """
        cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else [times[0]] * 99
        return cls(
            median_ms=median(times),
            p10_ms=cuts[9],
            p90_ms=cuts[89],
            p99_ms=cuts[98],
            runs=len(times),
            spread=relative_spread(times),
        )


@strict
def measure_latency(
    calls: Mapping[Name, Callable[[], Any]],
    *,
    runs: Count = 50,
    warmup: Amount = 5,
    progress: Progress | None = None,
) -> dict[Name, Latency]:
    """Time each of `calls` `runs` times, in alternation and in a shuffled (seeded) order.

    The order is shuffled because a call affects the next one: threads of a session keep spinning after its run.

    >>> import torch, bitwright
    >>> x = torch.randn(64, 64)
    >>> measured = bitwright.measure_latency({"sum": lambda: x.sum(), "product": lambda: x @ x}, runs=10)
    >>> {name: latency.runs for name, latency in measured.items()}
    {'sum': 10, 'product': 10}
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[Name, list[float]] = {name: [] for name in calls}
    order, shuffler = list(calls.items()), random.Random(0)
    for done in range(runs):
        shuffler.shuffle(order)
        for name, call in order:
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
        if progress is not None:
            progress(done + 1, runs, "timing")
    return {name: Latency.of(values) for name, values in times.items()}


@dataclass(frozen=True, kw_only=True)
class GenerationSpeed:
    """How fast a decoder reads a prompt, and generates one token after the other."""

    prompt: int
    """Tokens of the prompt."""
    prefill: float
    """Tokens of the prompt per second."""
    decode: float
    """Generated tokens per second."""
    spread: float = 0.0
    """The interquartile range of the time of a generated token relative to its median."""


@strict
def measure_generation(
    runtimes: Mapping[Name, Runtime],
    prompt: NDArray[Any],
    *,
    tokens: Count = 16,
    runs: Count = 5,
    progress: Progress | None = None,
) -> dict[Name, GenerationSpeed]:
    """Let open runtimes of decoders read `prompt`, (1, tokens), and generate `tokens`, `runs` times and in turns.

    Runtimes without a cache of keys and values are left out.

    >>> import tempfile, torch, bitwright
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    >>> model.config.use_cache = False
    >>> ids = torch.arange(12).view(2, 6)
    >>> quantized = bitwright.quantize(model, [{"input_ids": ids}], "w8a16")
    >>> artefact = quantized.export(tempfile.mkdtemp())
    >>> opened = {"onnxruntime": bitwright.open_runtime("onnxruntime", artefact.path)}
    >>> speed = measure_generation(opened, ids[:1].numpy(), tokens=4, runs=2)["onnxruntime"]
    >>> speed.prompt, speed.prefill > 0, speed.decode > 0
    (6, True, True)
    """
    times: dict[Name, tuple[list[float], list[float]]] = {}
    order, shuffler = list(runtimes.items()), random.Random(0)
    for done in range(runs + 1):  # the first run warms up
        shuffler.shuffle(order)
        for name, runtime in order:
            step = runtime.decoding()
            if step is None:
                continue
            start = time.perf_counter()
            scores = step(prompt)
            read = [time.perf_counter() - start]
            written = []
            for _ in range(tokens):
                ids = scores[:, -1:].argmax(axis=-1).astype(np.int64)
                start = time.perf_counter()
                scores = step(ids)
                written.append(time.perf_counter() - start)
            known = times.setdefault(name, ([], []))
            if done:
                known[0].extend(read)
                known[1].extend(written)
        if progress is not None:
            progress(done, runs, "generating")
    return {
        name: GenerationSpeed(
            prompt=prompt.shape[1],
            prefill=prompt.shape[1] / median(read),
            decode=1 / median(written),
            spread=relative_spread(written),
        )
        for name, (read, written) in times.items()
    }


_SECONDS = 600


def peak_memory(runtime: str, path: Path, feed: Mapping[str, NDArray[Any]], *, threads: int = 1) -> int:
    """The growth of a process's peak memory, in bytes, when it loads the artefact and runs it on `feed`."""
    with scratch_folder() as folder:
        inputs = folder / "feed.npz"
        np.savez(inputs, **feed)  # type: ignore[arg-type]
        command = [
            sys.executable,
            "-m",
            "bitwright.deployment.measurement",
            runtime,
            str(path),
            str(inputs),
            str(threads),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        what = f"can't measure the memory: {lines[-1]}"
        raise ArtefactError(what, where=str(path), fix="omit memory from the goal", code="memory-not-measured")
    return int(done.stdout)


def _now() -> int:
    """The resident memory, after a reset of the peak; on systems without /proc, the peak so far."""
    reset_peak()
    return resident_bytes() or _peak()


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return peak_resident_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(runtime: str, path: str, inputs: str, threads: str) -> int:
    """Load the artefact, run it three times, and return the additional memory."""
    with np.load(inputs) as stored:
        feed = {name: stored[name] for name in stored.files}
    before = _now()
    session = open_runtime(runtime, path, threads=int(threads))
    for _ in range(3):
        session.run(feed)
    return max(0, _peak() - before)


if __name__ == "__main__":
    sys.stdout.write(f"{main(*sys.argv[1:])}\n")


@cache
def saturates(runtime: str) -> bool:
    """Whether this runtime on this CPU loses bits in 8-bit products: 255·127 + 255·127 exceeds int16.

    The function runs a convolution with such values and compares the result with the exact sum.
    """
    if runtime not in RUNTIMES or RUNTIMES.get(runtime).missing() is not None:
        return False
    channels = 16
    ones = np.ones((1, channels, 8, 8), dtype=np.float32)
    kind: type[Runtime] = RUNTIMES.get(runtime)
    if kind.decoders_only:
        return False  # they have no plans of 8-bit activations that a guard would change
    with scratch_folder() as folder:
        path = folder / f"probe{kind.suffix}"
        if issubclass(kind, OnnxReader):
            ir.save(_probe(channels), path)
        else:
            kind.write(_prepared_probe(channels, kind.activations), path, torch.from_numpy(ones))
        opened = open_runtime(runtime, path, threads=1)
        result = opened.run({opened.inputs[0]: ones})[0]
    return not np.allclose(result, channels * 1.0, rtol=0.02)


def _prepared_probe(channels: int, activations: str) -> nn.Module:
    """The same convolution as a prepared model, for runtimes with their own artefact format."""
    conv = nn.Conv2d(channels, channels, 1, bias=False)
    nn.init.ones_(conv.weight)
    model = nn.Sequential(conv).eval()
    formats = {"0:weight": "int8/channel/sym", "0:input": activations, "0:output": activations}
    prepare(model, Plan(sites={site: SiteSpec(format=Format.parse(text)) for site, text in formats.items()}))
    highest = {"0:weight": 1.0, "0:input": 1.0, "0:output": channels * 1.02}
    for site, quantizer in quantizers_of(model).items():
        top = torch.full((channels if quantizer.weight else 1,), highest[site])
        quantizer.set_range(torch.zeros_like(top), top, conv.weight.shape)
    return model


def _probe(channels: int) -> ir.Model:
    """x → Q/DQ → Conv with all weights 127/127 → Q/DQ; the exact output is `channels`."""

    def constant(name: str, array: np.ndarray) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        constants.append(value)
        return value

    constants: list[ir.Value] = []
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, channels, 8, 8]))
    scale = constant("scale", np.array(1 / 255, dtype=np.float32))
    zero = constant("zero", np.array(0, dtype=np.uint8))
    weight = constant("weight", np.full((channels, channels, 1, 1), 127, dtype=np.int8))
    weight_scale = constant("weight_scale", np.array(1 / 127, dtype=np.float32))
    weight_zero = constant("weight_zero", np.array(0, dtype=np.int8))
    out_scale = constant("out_scale", np.array(channels / 250, dtype=np.float32))
    q = ir.node("QuantizeLinear", [x, scale, zero])
    dq = ir.node("DequantizeLinear", [q.outputs[0], scale, zero])
    dqw = ir.node("DequantizeLinear", [weight, weight_scale, weight_zero])
    conv = ir.node("Conv", [dq.outputs[0], dqw.outputs[0]])
    q2 = ir.node("QuantizeLinear", [conv.outputs[0], out_scale, zero])
    dq2 = ir.node("DequantizeLinear", [q2.outputs[0], out_scale, zero])
    y = dq2.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, channels, 8, 8])
    graph = ir.Graph(
        [x], [y], nodes=[q, dq, dqw, conv, q2, dq2], initializers=constants, opset_imports={"": 21}, name="probe"
    )
    return ir.Model(graph, ir_version=10)
