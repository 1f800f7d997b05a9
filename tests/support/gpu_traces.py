"""A trace of a training step on a GPU, as torch writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bitwright.profiling import record_step
from bitwright.profiling.step_graph import StepGraph

ENGINE = "autograd::engine::evaluate_function: "


def gpu_trace() -> dict[str, Any]:
    """One step of a linear layer, a relu and a loss as torch writes it for a GPU; microseconds.

    Backward has a thread of its own. Kernels run after their launches. A linear layer makes two nodes (the weight is
    transposed), the first of them at the operator's own number.
    """

    def op(name: str, ts: float, dur: float, dims: Any, sequence: int | None = None, tid: int = 1) -> dict[str, Any]:
        args = {"Input Dims": dims, **({} if sequence is None else {"Sequence number": sequence})}
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    def launch(ts: float, number: int, tid: int = 1) -> dict[str, Any]:
        args = {"correlation": number}
        name = "cudaLaunchKernel"
        return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 2, "tid": tid, "args": args}

    def kernel(ts: float, dur: float, number: int) -> dict[str, Any]:
        args = {"correlation": number, "stream": 7}
        return {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": ts, "dur": dur, "tid": 7, "args": args}

    return {
        "deviceProperties": [{"name": "A Big GPU"}],
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            op("aten::linear", 0, 20, [[4, 16], [8, 16], [8]], 0),
            op("aten::t", 1, 1, [[8, 16]], 0),
            op("aten::addmm", 2, 16, [[8], [4, 16], [16, 8], [], []], 1),
            launch(5, 100),
            kernel(50, 300, 100),
            op("aten::relu", 30, 10, [[4, 8]], 2),
            launch(33, 101),
            kernel(360, 40, 101),
            op("aten::mse_loss", 42, 8, [[4, 8], [4, 8], []], 3),
            launch(44, 104),
            kernel(402, 10, 104),
            op(f"{ENGINE}MseLossBackward0", 52, 5, [], 3, 2),
            launch(53, 105, 2),
            kernel(414, 5, 105),
            op(f"{ENGINE}ReluBackward0", 58, 5, [], 2, 2),
            launch(59, 106, 2),
            kernel(419, 1, 106),
            op(f"{ENGINE}AddmmBackward0", 64, 30, [], 1, 2),
            op("AddmmBackward0", 65, 28, [[4, 8]], 1, 2),
            op("aten::mm", 66, 20, [[8, 4], [4, 16]], None, 2),
            launch(67, 102, 2),
            kernel(420, 250, 102),
            launch(75, 103, 2),
            kernel(680, 150, 103),
            op(f"{ENGINE}torch::autograd::AccumulateGrad", 95, 3, [], None, 2),
            op("torch::autograd::AccumulateGrad", 96, 2, [[8]], None, 2),
            op(f"{ENGINE}TBackward0", 99, 3, [], 0, 2),
            op(f"{ENGINE}torch::autograd::AccumulateGrad", 103, 3, [], None, 2),
            op("torch::autograd::AccumulateGrad", 104, 2, [[8, 16]], None, 2),
            op("aten::add_", 120, 9, [[8, 16], [8, 16], []]),
            launch(122, 107),
            kernel(900, 77, 107),
        ],
    }


def graph() -> StepGraph:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    return record_step(model, (torch.randn(4, 16), torch.randn(4, 8)), F.mse_loss)


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"deviceProperties": [{"name": "A Big GPU"}], "traceEvents": events}))
    return path


def events_of() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = gpu_trace()["traceEvents"]
    return events


def step(number: int, begin: float, dur: float, factor: float = 1.0) -> list[dict[str, Any]]:
    """The step at another time, with kernels that take longer."""
    made: list[dict[str, Any]] = []
    for event in events_of():
        if event["ph"] != "X":
            continue
        args = dict(event["args"])
        for key, count in (("correlation", 1000), ("Sequence number", 10)):
            if key in args:
                args[key] += count * number
        longer = factor if event["cat"] == "kernel" else 1.0
        made.append({**event, "ts": event["ts"] + begin, "dur": event["dur"] * longer, "args": args})
    name = f"ProfilerStep#{number}"
    mark = {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin - 1, "dur": dur, "tid": 1, "args": {}}
    return [*made, mark]
