"""The whole road of one architecture: capture, plan, prepare, calibrate, backward, export, run, strip.

Each step asserts what must hold; what is measured on the way is returned. The tests and
`benchmarks/breadth.py` share it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log10
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from architectures import Architecture, fresh_inputs
from automatic import AUTOMATIC, build_automatically
from torch import Tensor, nn

import bitwright
from bitwright.core.tensor_tree import tensors_in

CALIBRATION_BATCHES, CHECK_BATCHES = 4, 2
# Kinds whose cost an INT8 runtime can save. Fused attention isn't among them: no backend has a rule for it yet.
MULTIPLYING = ("linear", "matmul", "addmm", "baddbmm", "bilinear", "einsum", "conv")
INTEGER_KERNELS = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat")


@dataclass(frozen=True, kw_only=True)
class Journey:
    """What was measured."""

    name: str
    family: str
    share: float
    """Multiply-accumulates of linears, convolutions and matrix products that the plan quantizes."""
    share_of_all: float
    """The same, of all multiply-accumulates including fused attention."""
    left_float: dict[str, str]
    simulated_db: float
    """Simulated against float, the worst floating-point output."""
    runtime_db: float
    """ONNX Runtime against simulated, the worst output."""
    runtime_share: float
    """The runtime's deviation relative to the error of quantization itself, at the worst output."""
    dynamic_batch: bool
    planned_kernels: int
    """Convolutions and matrix products of the artefact that read two quantized tensors."""
    integer_kernels: int
    """Integer kernels that ONNX Runtime makes of them."""
    weights: int
    activations: int
    biases: int
    seconds: float


def travel(architecture: Architecture, folder: Path) -> Journey:
    """Walk the road; an AssertionError or a BitwrightError says where it ends."""
    start = time.perf_counter()
    model, example = architecture.build()
    fresh = [fresh_inputs(example, seed) for seed in range(1, 1 + CALIBRATION_BATCHES + CHECK_BATCHES)]
    calibration, checked = [example, *fresh[:CALIBRATION_BATCHES]], [example, *fresh[CALIBRATION_BATCHES:]]
    before = _outputs(model, checked)
    learning = _gradients(model, example)

    graph = bitwright.capture(model, example)
    plan = bitwright.make_plan(graph, "onnxruntime")
    bitwright.prepare(model, plan, graph=graph)
    bitwright.calibrate(model, calibration)
    quantized = _outputs(model, checked)
    simulated = [_sqnr(f, q) for f, q in zip(before, quantized, strict=True) if f.is_floating_point()]
    gradients = _gradients(model, example)
    assert {name for name in gradients if not name.startswith("bitwright.")} == set(learning), (
        "other parameters have gradients"
    )
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values()), "gradients aren't finite"

    artefact = bitwright.export(model, folder / "model.onnx", example)
    assert min(artefact.weights, artefact.activation_pairs) > 0, "nothing is quantized"
    check = bitwright.check(model, artefact.path, checked)
    assert check.passed, f"ONNX Runtime differs: {[o for o in check.outputs if not o.passed]}"

    planned, integer = _kernels(artefact.path)

    bitwright.strip(model)
    after = _outputs(model, checked)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "strip changed the model"
    multiplying = [op for op in graph.ops if op.kind.startswith(MULTIPLYING) and not op.constant]
    done = sum(op.macs for op in multiplying if op.name not in plan.float)
    return Journey(
        name=architecture.name,
        family=architecture.family,
        share=done / max(1, sum(op.macs for op in multiplying)),
        share_of_all=done / max(1, graph.macs),
        left_float=dict(plan.float),
        simulated_db=min(simulated),
        runtime_db=min(output.sqnr_db for output in check.outputs),
        runtime_share=max(output.quantization_share for output in check.outputs),
        dynamic_batch=artefact.dynamic_batch,
        planned_kernels=planned,
        integer_kernels=integer,
        weights=artefact.weights,
        activations=artefact.activation_pairs,
        biases=artefact.int32_biases,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What was measured of a model that was built automatically."""

    name: str
    model: str
    weights: int
    activations: int
    runtime_db: float
    dynamic_batch: bool
    seconds: float


def arrive(kind: str, folder: Path) -> Arrival:
    """Quantize, export and run a model type of `automatic.py`; the runtime must compute what the simulation does."""
    start = time.perf_counter()
    model, example = build_automatically(kind, AUTOMATIC[kind])
    fresh = [fresh_inputs(example, seed) for seed in range(1, 5)]
    graph = bitwright.capture(model, example)
    bitwright.prepare(model, bitwright.make_plan(graph, "onnxruntime"), graph=graph)
    bitwright.calibrate(model, [example, *fresh[:3]])
    artefact = bitwright.export(model, folder / "model.onnx", example)
    assert min(artefact.weights, artefact.activation_pairs) > 0, "nothing is quantized"
    check = bitwright.check(model, artefact.path, [example, fresh[3]])
    assert check.passed, f"ONNX Runtime differs: {[o for o in check.outputs if not o.passed]}"
    return Arrival(
        name=kind,
        model=AUTOMATIC[kind],
        weights=artefact.weights,
        activations=artefact.activation_pairs,
        runtime_db=min(output.sqnr_db for output in check.outputs),
        dynamic_batch=artefact.dynamic_batch,
        seconds=time.perf_counter() - start,
    )


def finer(architecture: Architecture) -> float:
    """Simulated against float in 16 bits on the calibration data, dB: rounding and clipping hardly disturb there.

    Tells a random network that amplifies every disturbance from one whose quantization is wrong.
    """
    model, example = architecture.build()
    batches = [fresh_inputs(example, seed) for seed in range(4)]
    before = _outputs(model, batches)
    choices = {"weights": "int16/channel/sym", "activations": "uint16/tensor/asym"}
    bitwright.quantize(model, batches, **choices)
    return min(_sqnr(f, q) for f, q in zip(before, _outputs(model, batches), strict=True) if f.is_floating_point())


def _kernels(path: Path) -> tuple[int, int]:
    """Planned and real integer kernels."""
    written = onnx.load(str(path)).graph.node
    integers = {output for node in written if node.op_type == "DequantizeLinear" for output in node.output}
    planned = sum(
        node.op_type in ("Conv", "Gemm", "MatMul") and integers.issuperset(node.input[:2]) for node in written
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(options.optimized_model_filepath).graph.node
    return planned, sum(node.op_type in INTEGER_KERNELS for node in optimized)


@torch.no_grad()
def _outputs(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Each output over all batches, one tensor each."""
    runs = [[tensor for _, tensor in tensors_in(model(**batch))] for batch in batches]
    return [torch.stack(tensors) for tensors in zip(*runs, strict=True)]


def _gradients(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gradients of the sum of all floating-point outputs in train mode; of a copy: norms and caches change there."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(0)
    loss = sum(tensor.sum() for _, tensor in tensors_in(model(**batch)) if tensor.requires_grad)
    assert isinstance(loss, Tensor)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _sqnr(exact: Tensor, other: Tensor) -> float:
    signal, noise = (float(t.double().pow(2).sum()) for t in (exact, exact - other))
    return inf if noise == 0 else 10 * log10(max(signal, 1e-300) / noise)
