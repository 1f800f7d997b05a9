from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_traces import gpu_trace
from problems import raises_problem
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bitwright.cluster import predict_step
from bitwright.importers.trace import import_trace
from bitwright.importers.trace_events import Event, _tops
from bitwright.plan import Plan
from bitwright.profiling import StepSettings, TimedStep, record_step


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    return model, (torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,)))


class Mixed(nn.Module):
    """Operators that make several nodes or none, aten's order of arguments, equal shapes with other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.dense = nn.Linear(16, 16)
        self.full = nn.Conv1d(16, 16, 3, padding=1)
        self.short = nn.Conv1d(16, 16, 3, padding=1, stride=4)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense(self.words(x[:, :32])).transpose(1, 2)
        y = F.interpolate(y, scale_factor=2.0)  # aten has another name for it
        product = torch.matmul(self.full(y).transpose(1, 2), self.short(y))
        return self.head(self.short(y).mean(-1)) + product.mean()


def mixed() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Mixed(), (torch.randint(0, 50, (8, 40)), torch.randint(0, 4, (8,)))


def traced(path: Path, model: nn.Module, batch: Any, steps: int = 4, **settings: Any) -> list[dict[str, Any]]:
    """Train, write the trace, and give its events."""
    step = TimedStep(model, [batch], F.cross_entropy, StepSettings(**settings))
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        for _ in range(steps):
            step()
    run.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def test_a_cpu_trace_becomes_a_profile(tmp_path: Path) -> None:
    model, batch = small()
    path = tmp_path / "trace.json"
    traced(path, model, batch, 3)
    graph = record_step(model, batch, F.cross_entropy)
    made = import_trace(path, graph, device="my machine")
    assert made.source == "imported"
    assert made.device == "my machine"
    conv = next(cost for cost in made.operators if cost.operator.startswith("conv2d("))
    assert conv.forward.repetitions in (2, 3)  # the first step may be warm-up
    assert conv.forward.seconds > 0
    assert conv.backward is not None
    assert conv.backward.seconds > 0
    assert "sgd/loop" in made.by_name
    # what it lacks is said, and isn't made up
    with raises_problem("not-profiled", where="clip"):
        predict_step(graph, Plan(), made, settings=StepSettings(clip=1.0))


def test_nothing_of_a_traced_step_is_lost(tmp_path: Path) -> None:
    """Autograd makes several nodes for most operators, and one for each parameter."""
    model, batch = mixed()
    path = tmp_path / "trace.json"
    events = traced(path, model, batch, 2)  # two steps: all of them are ordinary ones
    graph = record_step(model, batch, F.cross_entropy)
    made = import_trace(path, graph)
    engine = sum(e["dur"] for e in events if "evaluate_function" in e["name"]) / 2e6
    predicted = predict_step(graph, Plan(), made)
    phases = predicted.devices[0].phases
    assert phases["backward"] == pytest.approx(engine, rel=0.03)
    ops = sorted((e for e in events if e["cat"] == "cpu_op"), key=lambda e: (e["ts"], -e["dur"]))
    forward, end = 0.0, 0.0
    for event in ops:
        if event["ts"] >= end:
            end = event["ts"] + event["dur"]
            forward += event["dur"] if event["args"].get("Fwd thread id") == 0 else 0.0
    assert phases["forward"] + phases["loss"] == pytest.approx(forward / 2e6, rel=0.03)
    gradients = [cost for cost in made.operators if cost.format == "accumulate"]
    assert {cost.operator for cost in gradients} == {str(spec) for spec in graph.parameters.values()}
    # each operator has its own: an embedding though aten has its weight first, convolutions by their strides
    by_kind = {cost.operator: cost for cost in made.operators}
    full, short = (
        next(c for text, c in by_kind.items() if text.startswith("conv1d(") and s in text)
        for s in ("[1], [1], [1]", "[4], [1], [1]")
    )
    assert (full.forward.repetitions, short.forward.repetitions) == (2, 4)
    for kind in ("embedding(", "interpolate(", "matmul(", "loss:"):
        cost = next(cost for text, cost in by_kind.items() if text.startswith(kind))
        assert cost.forward.seconds > 0
        assert cost.backward is not None


def test_autocast_is_read_from_the_types(tmp_path: Path) -> None:
    model, batch = mixed()
    path = tmp_path / "trace.json"
    events = traced(path, model, batch, 2, amp="bf16")
    graph = record_step(model, batch, F.cross_entropy)
    made = import_trace(path, graph)
    assert {cost.format for cost in made.operators} == {"amp-bf16", "accumulate"}
    predicted = predict_step(graph, Plan(), made, settings=StepSettings(amp="bf16"))
    engine = sum(e["dur"] for e in events if "evaluate_function" in e["name"]) / 2e6
    assert predicted.devices[0].phases["backward"] == pytest.approx(engine, rel=0.05)
    with raises_problem("not-profiled", where="dense", mentions="float32"):
        predict_step(graph, Plan(), made)


def test_long_traces_are_read_in_time() -> None:
    """Each launch within one operator within another: the time may not grow with the square."""
    events = []
    for number in range(20_000):
        start = 10.0 * number
        events += [Event("linear", start, start + 9, 1), Event("addmm", start + 1, start + 8, 1)]
        events.append(Event("launch", start + 2, start + 3, 1, correlation=number))
    began = time.process_time()
    tops = _tops(events, dict.fromkeys(range(20_000), 5.0))
    assert time.process_time() - began < 2.0
    assert len(tops) == 20_000
    assert all(top.device == 5.0 for top in tops)


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
    whole = sum(c.forward.seconds + (c.backward.seconds if c.backward else 0.0) for c in made.operators)
    assert whole == pytest.approx((300 + 40 + 10 + 5 + 1 + 250 + 150) * 1e-6)


def test_a_trace_of_something_else_is_refused(tmp_path: Path) -> None:
    model, batch = small()
    graph = record_step(model, batch, F.cross_entropy)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(gpu_trace()))
    with raises_problem("no-match", mentions="trace.json"):
        import_trace(path, graph)
    path.write_text("nothing")
    with raises_problem("invalid-json", where=f"{path}:1:1"):
        import_trace(path, graph)
    for text in ("[1, 2]", '{"traceEvents": 5}', "5", "{}", '{"traceEvents": [1]}'):
        path.write_text(text)
        with raises_problem("invalid-value", where=path):
            import_trace(path, graph)
    with raises_problem("unreadable-file", mentions="none.json"):
        import_trace(tmp_path / "none.json", graph)


LOSSES: dict[str, Any] = {
    "two operators": lambda out, target: F.nll_loss(F.log_softmax(out, 1), target),
    "a sum": lambda out, target: F.mse_loss(out, F.one_hot(target, 10).float()) + F.l1_loss(out, torch.ones_like(out)),
    "many": lambda out, target: (out.softmax(1).log().square().mean() + out.abs().sum() * 0.1).exp().log(),
    "none": lambda out, target: out.sum(),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_may_be_made_of_any_operators(tmp_path: Path, name: str) -> None:
    model, batch = small()
    path = tmp_path / "trace.json"
    loss = LOSSES[name]
    step = TimedStep(model, [batch], loss, StepSettings())
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        for _ in range(3):
            step()
    run.export_chrome_trace(str(path))
    made = import_trace(path, record_step(model, batch, loss))
    conv = next(cost for cost in made.operators if cost.operator.startswith("conv2d("))
    assert conv.forward.repetitions in (2, 3)  # the first step may be warm-up
    assert conv.backward is not None
    graph = record_step(model, batch, loss)
    of_loss = [cost for cost in made.operators if cost.operator == graph.loss.key()]
    assert sum(cost.forward.seconds for cost in of_loss) > 0
