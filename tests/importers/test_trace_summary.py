"""The steady step of a trace is replayed from its own costs, and predicted from its own profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_traces import events_of, graph, step, written
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from bitwright.cluster import predict_step
from bitwright.core.errors import BitwrightError
from bitwright.importers.trace import match_trace
from bitwright.importers.trace_summary import summarize_trace
from bitwright.plan import Plan
from bitwright.profiling import StepSettings, record_step
from bitwright.zoo import resnet50


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def recorded(path: Path, *, marks: bool, steps: int = 6, **options: Any) -> tuple[nn.Module, Any]:
    """Train on this CPU with some profiler options. With `marks`, a schedule marks the steps."""
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(32, 3, 24, 24), torch.randint(0, 10, (32,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    train()
    when = schedule(wait=1, warmup=1, active=steps) if marks else None
    with profile(activities=[ProfilerActivity.CPU], schedule=when, **options) as run:
        for _ in range(steps + 2 if marks else steps):
            with record_function("my own range"):
                train()
            run.step() if marks else None
    run.export_chrome_trace(str(path))
    return model, batch


OPTIONS: dict[str, dict[str, Any]] = {
    "shapes": {"record_shapes": True},
    "no shapes": {},
    "stacks": {"record_shapes": True, "with_stack": True},
    "modules and memory": {"record_shapes": True, "profile_memory": True, "with_modules": True},
}


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_this_cpu_are_predicted_from_their_own_trace(tmp_path: Path, name: str, marks: bool) -> None:
    errors = []
    for attempt in range(10):  # other processes interrupt single steps: one undisturbed recording is enough
        path = tmp_path / f"trace {attempt}.json"
        model, batch = recorded(path, marks=marks, **OPTIONS[name])
        summary = summarize_trace(path)
        assert len(summary.steps) == (6 if marks else 5)  # without marks, from one forward to the next
        step_graph = record_step(model, batch, F.cross_entropy)
        match = match_trace(path, step_graph)
        assert (match.by_shapes, match.matched, match.operators) == ("record_shapes" in OPTIONS[name], 6, 6)
        assert match.confidence == (1.0 if match.by_shapes else 0.5)  # a CPU has no kernels to confirm the order
        assert match.measured is not None
        predicted = predict_step(step_graph, Plan(), match.profile, settings=StepSettings(optimizer="sgd"))
        assert summary.error is not None
        errors.append(max(abs(summary.error), abs(predicted.seconds / match.measured - 1), match.unmatched_share))
        if errors[-1] < 0.05:
            break
    assert min(errors) < 0.05, errors


def gpu_step(number: int, begin: float, *, host: float, kernel: float, copies: bool = False) -> list[dict[str, Any]]:
    """Ten kernels: the host needs `host` microseconds for each launch, the device `kernel` for each kernel."""
    made: list[dict[str, Any]] = []

    def add(category: str, name: str, ts: float, dur: float, **args: Any) -> None:
        tid = 7 if category == "kernel" else 1
        made.append({"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args})

    at, free = begin, begin
    for index in range(10):
        correlation = 100 * number + index
        add("cpu_op", "aten::mm", at, host, **{"Sequence number": index, "Fwd thread id": int(index >= 5)})
        add("cuda_runtime", "cudaLaunchKernel", at + 1, 2, correlation=correlation)
        free = max(free, at + 1) + kernel
        add("kernel", "sgemm", free - kernel, kernel, correlation=correlation, stream=7)
        at += host
    if copies:  # loss.item()
        add("cuda_runtime", "cudaStreamSynchronize", at, max(1.0, free - at), correlation=100 * number + 50)
        at = max(at + 1, free)
    add("user_annotation", f"ProfilerStep#{number}", begin, at - begin)
    return made


@pytest.mark.parametrize(
    ("host", "kernel", "waits", "seconds", "floor", "bound"),
    [
        (100, 20, False, 1000e-6, 1000e-6, "host"),
        (10, 200, True, 2001e-6, 105e-6, "device"),
        (100, 90, True, 1001e-6, 1001e-6, "host"),
        (50, 100, True, 1001e-6, 505e-6, "device"),
    ],
)
def test_the_replay_knows_what_limits_a_step(
    tmp_path: Path, host: float, kernel: float, waits: bool, seconds: float, floor: float, bound: str
) -> None:
    events: list[dict[str, Any]] = []
    for number in range(1, 5):
        events += gpu_step(number, 5000.0 * number, host=host, kernel=kernel, copies=waits)
    summary = summarize_trace(written(tmp_path / "a.json", events))
    assert summary.replay is not None
    assert summary.replay.seconds == pytest.approx(seconds, rel=0.01)
    assert summary.replay.host == pytest.approx(floor, rel=0.01)
    assert summary.replay.bound == bound
    assert summary.error == pytest.approx(0, abs=0.01)


def test_a_host_bound_step_is_not_shorter_on_a_faster_device(tmp_path: Path) -> None:
    """The profile has the least time that the host needs; predictions with faster kernels keep it."""
    path = written(tmp_path / "a.json", [event for n in range(1, 4) for event in step(n, 2000.0 * n, 2000)])
    match = match_trace(path, graph())
    whole = predict_step(graph(), Plan(), match.profile)
    faster = [
        cost.model_copy(update={"forward": cost.forward.model_copy(update={"seconds": cost.forward.seconds / 2})})
        for cost in match.profile.operators
    ]
    quick = predict_step(graph(), Plan(), match.profile.model_copy(update={"operators": faster}))
    floor = match.profile.host.floor
    assert whole.seconds == pytest.approx(2000e-6, rel=0.01)
    assert quick.seconds == pytest.approx(max(floor, whole.seconds - 170e-6), rel=0.02)
    assert sum(quick.devices[0].phases.values()) == pytest.approx(quick.seconds)


def test_what_belongs_to_no_operator_is_listed_with_its_share(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [event for n in range(1, 4) for event in step(n, 2000.0 * n, 2000)])
    (other,) = match_trace(path, graph()).unmatched
    assert other.name == "add_"
    assert other.share == pytest.approx(77 * 2 / 3 / 2000)  # that of the last step comes after the last backward


STEPS = [*step(1, 0, 2000), *step(2, 2000, 2000), *step(3, 4000, 2000)]


def mark(number: int, begin: float, taken: float) -> dict[str, Any]:
    name = f"ProfilerStep#{number}"
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": taken, "tid": 1, "args": {}}


def amd() -> list[dict[str, Any]]:
    text = json.dumps(STEPS).replace("cudaLaunchKernel", "hipLaunchKernel").replace("cuda_runtime", "hip_runtime")
    found: list[dict[str, Any]] = json.loads(text)
    return found


READ: dict[str, tuple[list[dict[str, Any]], int]] = {  # events, steps
    "AMD": (amd(), 3),
    "no marks": ([event for event in STEPS if event["cat"] != "user_annotation"], 2),
    "a step in a step": ([*STEPS, mark(9, 10, 100)], 3),
    "steps in a step": ([*STEPS, mark(0, -10, 9000)], 3),
    "numbers as texts": ([{**event, "ts": str(event["ts"]), "dur": str(event["dur"])} for event in STEPS], 3),
}


@pytest.mark.parametrize("name", READ)
def test_unusual_traces_give_the_same_step(tmp_path: Path, name: str) -> None:
    events, steps = READ[name]
    path = written(tmp_path / "a.json", events)
    summary = summarize_trace(path)
    assert len(summary.steady) == steps
    assert summary.step_seconds == pytest.approx(2000e-6)
    assert summary.error == pytest.approx(0, abs=0.01)
    assert match_trace(path, graph()).confidence == 1.0


RAW = json.dumps({"traceEvents": STEPS}).encode()
REFUSED: dict[str, tuple[bytes, str]] = {
    "cut off": (RAW[: len(RAW) // 2], "invalid-json"),
    "cut off and compressed": (gzip.compress(RAW)[:400], "invalid-gzip"),
    "nothing": (b"", "invalid-json"),
    "no events": (b"[]", "no-operators"),
    "beginnings and ends": (b'[{"ph": "B", "name": "x", "ts": 1}, {"ph": "E", "ts": 2}]', "no-operators"),
    "an execution trace": (b'{"schema": "1.0.2-chakra.0.0.4", "pid": 1, "nodes": [{"id": 2}]}', "invalid-value"),
    "a browser": (b'[{"ph": "X", "cat": "toplevel", "name": "Loop", "ts": 1, "dur": 4}]', "no-operators"),
    "kernels only": (json.dumps([e for e in STEPS if e["cat"] == "kernel"]).encode(), "no-operators"),
    "no durations": (json.dumps([{**e, "dur": None} for e in events_of()]).encode(), "invalid-value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    data, code = REFUSED[name]
    path = tmp_path / "a.json"
    path.write_bytes(data)
    for read in (summarize_trace, lambda file: match_trace(file, graph())):
        with pytest.raises(BitwrightError) as error:
            read(path)
        assert error.value.codes == [code]
        assert str(path) in str(error.value.problems[0].where)


@pytest.mark.slow
@pytest.mark.realdata
def test_published_steps_are_replayed(data_dir: Path) -> None:
    files = sorted((data_dir / "peers" / "traces").glob("*.json.gz"))
    if not files:
        pytest.skip("no published traces")
    replayed = 0
    for file in files:
        try:
            summary = summarize_trace(file)
        except BitwrightError:
            continue
        if summary.steady:
            assert summary.error == pytest.approx(0, abs=0.05), file.name
            replayed += 1
    assert replayed


@pytest.mark.slow
@pytest.mark.realdata
def test_published_resnet50_steps_are_predicted_from_their_own_profile(data_dir: Path) -> None:
    folder = data_dir / "peers" / "traces"
    names = ("kineto_resnet50_num_workers_0", "hta_ns_resolution")
    files = {name: file for name in names for file in folder.glob(f"{name}*")}
    if not files:
        pytest.skip("no published traces of ResNet-50")
    batch = torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,))
    step_graph = record_step(resnet50(), batch, F.cross_entropy)
    errors = {}
    for name, file in files.items():
        match = match_trace(file, step_graph)
        assert match.measured is not None
        assert match.replay is not None
        assert match.by_shapes == (name != "hta_ns_resolution")
        assert match.replay.bound == ("device" if name == "hta_ns_resolution" else "host")
        assert match.matched > 0.9 * match.operators
        assert match.confidence > 0.9
        assert match.unmatched_share < 0.05
        errors[name] = predict_step(step_graph, Plan(), match.profile).seconds / match.measured - 1
    assert errors == pytest.approx(dict.fromkeys(files, 0.0), abs=0.05)
