"""Traces of other versions of torch, of other devices and of several steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_traces import ENGINE, events_of, graph, step, written

from bitwright.core.errors import BitwrightError
from bitwright.importers.trace import import_trace, match_trace
from bitwright.importers.trace_summary import TraceSummary, summarize_trace

OLD = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}


def as_torch_1_9() -> list[dict[str, Any]]:
    """The same step as torch 1.9 writes it: other categories, no events of the engine, steps as operators."""
    made = []
    for event in events_of():
        if str(event.get("name")).startswith(ENGINE):
            continue
        args = dict(event["args"])
        if "Input Dims" in args:
            args["Input dims"] = args.pop("Input Dims")
        if "Sequence number" in args:
            args["Fwd thread id"] = 0
        made.append({**event, "cat": OLD.get(event.get("cat", ""), ""), "args": args, "tid": str(event.get("tid"))})

    def backward(name: str, ts: float, dur: float, sequence: int) -> dict[str, Any]:
        args = {"Input dims": [[4, 8]], "Sequence number": sequence, "Fwd thread id": 1}
        return {"ph": "X", "cat": "Operator", "name": name, "ts": ts, "dur": dur, "tid": "2", "args": args}

    made = [event for event in made if event["name"] != "AddmmBackward0"]
    made += [backward("MseLossBackward", 52, 5, 3), backward("ReluBackward0", 58, 5, 2)]
    made.append(backward("AddmmBackward", 65, 28, 1))
    made.append({"ph": "X", "cat": "Operator", "name": "ProfilerStep#5", "ts": -1, "dur": 1200, "tid": "1", "args": {}})
    return made


def seconds_of(path: Path) -> dict[str, tuple[float, float]]:
    made = import_trace(path, graph())
    return {
        cost.operator.partition("(")[0]: (cost.forward.seconds, cost.backward.seconds if cost.backward else 0.0)
        for cost in made.operators
        if cost.format != "accumulate"
    }


def test_torch_1_9_gives_the_same_times_as_today(tmp_path: Path) -> None:
    today = seconds_of(written(tmp_path / "new.json", events_of()))
    old = seconds_of(written(tmp_path / "old.json", as_torch_1_9()))
    assert {name: pytest.approx(times) for name, times in today.items()} == old
    assert old["linear"] == pytest.approx((300e-6, 400e-6))


def test_without_shapes_operators_are_matched_by_order(tmp_path: Path) -> None:
    events = events_of()
    for event in events:
        event["args"].pop("Input Dims", None)
    path = written(tmp_path / "a.json", events)
    times = seconds_of(path)
    assert times["linear"] == pytest.approx((300e-6, 400e-6))
    assert times["relu"] == pytest.approx((40e-6, 1e-6))
    match = match_trace(path, graph())
    assert (match.by_shapes, match.matched, match.operators) == (False, 2, 2)
    assert match.confidence == 0.5  # no kernel of this trace has the name of a relu
    assert "no shapes" in match.profile.note


def test_warm_up_is_skipped(tmp_path: Path) -> None:
    events = [*step(1, 0, 9000, 5.0), *step(2, 10_000, 2000), *step(3, 20_000, 2010), *step(4, 30_000, 1500)]
    path = written(tmp_path / "a.json", events)
    assert seconds_of(path)["linear"] == pytest.approx((300e-6, 400e-6))
    assert "3 steps" in import_trace(path, graph()).note
    summary = summarize_trace(path)
    assert [one.steady for one in summary.steps] == [False, True, True, False]
    assert summary.step_seconds == pytest.approx(2005e-6)
    assert summary.steady[0].compute == pytest.approx(833e-6)


def test_collectives_are_no_operators(tmp_path: Path) -> None:
    """DDP launches an all-reduce in backward. Its kernel waits for other devices."""
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 97, "dur": 1, "tid": 2}
    wait = {"ph": "X", "cat": "kernel", "name": "ncclKernel_AllReduce_RING_LL_Sum_float(x)", "ts": 830, "dur": 5000}
    events = [
        *step(1, 0, 6000),
        {**launch, "args": {"correlation": 5}},
        {**wait, "tid": 9, "args": {"correlation": 5}},
    ]
    path = written(tmp_path / "a.json", events)
    summary = summarize_trace(path)
    assert summary.collectives == {"all_reduce": 1}
    assert summary.steps[0].collective == pytest.approx(5e-3)
    assert summary.steps[0].compute == pytest.approx(833e-6)
    made = import_trace(path, graph())
    assert sum(cost.backward.seconds for cost in made.operators if cost.backward) < 1e-3
    assert "collectives" in made.note
    assert "all_reduce" in str(summary)
    assert summary.to_dict()["collectives"] == {"all_reduce": 1}


def test_a_forward_without_backward_is_refused(tmp_path: Path) -> None:
    events = [event for event in events_of() if event.get("tid") != 2]
    path = written(tmp_path / "a.json", events)
    with pytest.raises(BitwrightError) as error:
        import_trace(path, graph())
    assert error.value.codes == ["no-backward"]
    assert not summarize_trace(path).has_backward


def test_launches_without_kernels_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [event for event in events_of() if event.get("cat") != "kernel"])
    for read in (summarize_trace, lambda file: import_trace(file, graph())):
        with pytest.raises(BitwrightError) as error:
            read(path)
        assert error.value.codes == ["no-kernels"]


def test_a_trace_without_operators_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [{"ph": "M", "name": "process_name"}])
    with pytest.raises(BitwrightError) as error:
        summarize_trace(path)
    assert error.value.codes == ["no-operators"]


def test_steps_without_marks_begin_at_forward(tmp_path: Path) -> None:
    events = [*step(1, 0, 1), *step(2, 2000, 1), *step(3, 4000, 1)]
    path = written(tmp_path / "a.json", [event for event in events if event["cat"] != "user_annotation"])
    assert summarize_trace(path).step_seconds == pytest.approx(2e-3)


PUBLISHED = {  # steady steps in ms, and the time of their kernels
    "kineto_resnet50_num_workers_0": ((173.9, 181.3), (96, 105)),
    "hta_ns_resolution": ((95.5, 95.8), (93.3, 93.8)),
    "hta_control": ((75, 81.2), (45, 48.2)),
}


@pytest.mark.realdata
def test_published_traces_are_read_or_refused(data_dir: Path) -> None:
    files = sorted((data_dir / "peers" / "traces").glob("*.json.gz"))
    if not files:
        pytest.skip("no published traces")
    read: dict[str, TraceSummary] = {}
    refused: list[str] = []
    for file in files:
        try:
            read[file.name] = summarize_trace(file)
        except BitwrightError as error:
            refused += error.codes
    assert set(refused) <= {"no-kernels"}
    for name, ((fast, slow), (least, most)) in PUBLISHED.items():
        for summary in (summary for file, summary in read.items() if file.startswith(name)):
            assert len(summary.steady) >= 3
            assert all(fast <= 1e3 * one.seconds <= slow for one in summary.steady)
            assert all(least <= 1e3 * one.compute <= most for one in summary.steady)
