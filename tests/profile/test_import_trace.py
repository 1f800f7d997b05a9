from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bitwright.errors import BitwrightError
from bitwright.plan import Plan
from bitwright.predict import predict
from bitwright.profile import StepSettings, TrainingStep, record_step
from bitwright.profile.import_trace import import_trace


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    return model, (torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,)))


def test_a_cpu_trace_becomes_a_profile(tmp_path: Path) -> None:
    model, batch = small()
    step = TrainingStep(model, [batch], F.cross_entropy, StepSettings())
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        for _ in range(3):
            step()
    path = tmp_path / "trace.json"
    run.export_chrome_trace(str(path))
    graph = record_step(model, batch, F.cross_entropy)
    made = import_trace(path, graph, device="my machine")
    assert made.source == "imported"
    assert made.device == "my machine"
    conv = next(cost for cost in made.operators if cost.operator.startswith("conv2d("))
    assert conv.forward.repetitions == 3
    assert conv.forward.seconds > 0
    assert conv.backward is not None
    assert conv.backward.seconds > 0
    assert "sgd/loop" in made.by_name
    whole = sum(cost.forward.seconds for cost in made.operators)
    assert predict(graph, Plan(), made).seconds > whole
    # what it lacks is said, and isn't made up
    with pytest.raises(BitwrightError, match="clip"):
        predict(graph, Plan(), made, settings=StepSettings(clip=1.0))


def gpu_trace() -> dict[str, Any]:
    """Two operators, their launches and kernels, and one backward; microseconds. Kernels run after their launches."""

    def op(name: str, ts: float, dur: float, dims: Any, sequence: int | None = None) -> dict[str, Any]:
        args = {"Input Dims": dims, **({} if sequence is None else {"Sequence number": sequence})}
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}

    def launch(ts: float, number: int) -> dict[str, Any]:
        args = {"correlation": number}
        return {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": ts,
            "dur": 2,
            "tid": 1,
            "args": args,
        }

    def kernel(ts: float, dur: float, number: int) -> dict[str, Any]:
        args = {"correlation": number, "stream": 7}
        return {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": ts, "dur": dur, "tid": 7, "args": args}

    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    return {
        "deviceProperties": [{"name": "A Big GPU"}],
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            op("aten::linear", 0, 20, [[4, 16], [8, 16], [8]], 5),
            op("aten::addmm", 2, 16, [[8], [4, 16], [16, 8]], 5),
            launch(5, 100),
            kernel(50, 300, 100),
            op("aten::relu", 30, 10, [[4, 8]], 6),
            launch(33, 101),
            kernel(360, 40, 101),
            op(engine, 60, 30, [], 5),
            op("aten::mm", 62, 20, [[8, 4], [4, 16]]),
            launch(65, 102),
            kernel(420, 250, 102),
            launch(75, 103),
            kernel(680, 150, 103),
        ],
    }


def test_a_gpu_trace_counts_kernels_not_launches(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    graph = record_step(model, (torch.randn(4, 16), torch.randn(4, 8)), F.mse_loss)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_trace()).encode()))
    made = import_trace(path, graph)
    assert made.device == "A Big GPU"
    linear, relu = (next(c for c in made.operators if c.operator.startswith(kind)) for kind in ("linear(", "relu("))
    assert linear.forward.seconds == pytest.approx(300e-6)
    assert linear.backward is not None
    assert linear.backward.seconds == pytest.approx(400e-6)
    assert relu.forward.seconds == pytest.approx(40e-6)


def test_a_trace_of_something_else_is_refused(tmp_path: Path) -> None:
    model, batch = small()
    graph = record_step(model, batch, F.cross_entropy)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(gpu_trace()))
    with pytest.raises(BitwrightError, match="no operator of this model"):
        import_trace(path, graph)
    path.write_text("nothing")
    with pytest.raises(BitwrightError, match="not a Chrome trace"):
        import_trace(path, graph)
