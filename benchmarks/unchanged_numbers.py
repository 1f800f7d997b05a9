"""Digests of numbers that a restructuring must not change: artefacts, leaderboard rows and one INT8 training step.

    python benchmarks/unchanged_numbers.py -o before.json
    python benchmarks/unchanged_numbers.py --against before.json

Needs BITWRIGHT_DATA. Vector instructions are restricted to AVX2, so that every x86 CPU computes the same bits. The
placement of all backends is compared by `tests/backends/snapshots`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import torch
from torch.nn import functional as F

import bitwright

HERE = Path(__file__).parent
ROWS = 20


def digest(array: np.ndarray) -> str:
    """A hash of an array's type, shape and bytes."""
    return hashlib.sha256(str((array.dtype, array.shape)).encode() + array.tobytes()).hexdigest()[:16]


def artefact(name: str, **choices: Any) -> dict[str, str]:
    """All initializers of a quantized workload's ONNX file: integer weights, scales, zero points, biases."""
    work = bitwright.load_workload(name)
    assert work.calibration is not None
    quantized = bitwright.quantize(work.model, work.calibration(), example=work.inputs, **choices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        quantized.export(path)
        model = onnx.load(path)
    return {one.name: digest(onnx.numpy_helper.to_array(one)) for one in model.graph.initializer}


def rows() -> dict[str, Any]:
    """Rows of the reference leaderboard, spread evenly over it."""
    board = bitwright.Leaderboard.load(HERE / "results" / "leaderboard.json")
    done = sorted(row.id for row in board.rows if row.status == "done")
    chosen = done[:: len(done) // ROWS][:ROWS]
    found = {}
    for again in bitwright.rerun_rows(board, chosen):
        device = again.result.device
        found[again.row.id] = [again.result.accuracy, None if device is None else device.accuracy, again.differences]
    return found


def kernel_step() -> dict[str, str]:
    """The gradients and weights of three INT8 training steps of ResNet-20."""
    from bitwright.plan import ComputeSpec, Plan

    work = bitwright.load_workload("resnet20-cifar10")
    model = work.model.train()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (16,), generator=generator)
    graph = bitwright.capture(model, inputs)
    products = [operator.name for operator in graph.ops if operator.kind in {"conv2d", "linear"}]
    bitwright.prepare(model, Plan(compute=dict.fromkeys(products, ComputeSpec(format="int8"))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(0)
    found = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        found[f"loss {step}"] = repr(loss.item())
        optimizer.step()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        found[name] = digest(weight.detach().numpy()) + digest(weight.grad.numpy())
    return found


def main() -> None:
    """Compute the digests, write them, and compare them with earlier ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="compare with this file; exit with 1 on a difference")
    options = parser.parse_args()
    found = {
        "resnet20 int8": artefact("resnet20-cifar10", saturating=True),
        "resnet20 int4": artefact("resnet20-cifar10", saturating=True, weights="int4/channel/sym", observer="mse"),
        "efficientnet-lite0 int8": artefact("efficientnet-lite0-imagenet", saturating=True),
        "leaderboard rows": rows(),
        "int8 training": kernel_step(),
    }
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, values in found.items():
        print(f"{name}: {len(values)} values, {hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]}")
    if options.against:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        different = [
            f"{name}: {key}"
            for name in before
            for key in before[name].keys() | found[name].keys()
            if json.dumps(before[name].get(key)) != json.dumps(found[name].get(key))
        ]
        print("\n".join(different[:20]) or "identical")
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
