from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest
import torch
from planted import workload
from problems import raises_problem
from torch import nn

from bitwright import (
    Budget,
    Goal,
    Plan,
    Space,
    Tuned,
    Workload,
    evaluate,
    load_checkpoint,
    prepare,
    strip,
    tune,
)
from bitwright.core.registry import STRATEGIES
from bitwright.deployment import open_runtime
from bitwright.tuning import Base, CandidateGenerator, Measuring, Search, Strategy
from bitwright.zoo.workloads import digits_untrained

ONE_BASE = Space(weights="int8/channel/sym", observer="minmax", steps=((),))
QUICK = Measuring(runs=5)


def search(work: Workload, **options: object) -> Tuned:
    arguments: dict[str, object] = {"backend": "tensorrt", "space": ONE_BASE, **options}
    return tune(work, Goal(drop="10%"), **arguments)  # type: ignore[arg-type]


def test_a_passing_model_is_measured_on_the_real_runtime_and_saved(tmp_path: Path) -> None:
    work = workload(6, ())
    tuned = tune(work, Goal(drop="5%"), space=ONE_BASE, output=tmp_path, measuring=QUICK)
    assert tuned.met_goal
    assert "goal met" in tuned._repr_html_()
    assert repr(tuned).startswith("<Tuned planted: goal met, ")
    assert "\n" not in repr(tuned)
    assert tuned.plot()._repr_svg_().startswith("<svg")
    outcome = tuned.outcome
    assert outcome.latency_ms is not None
    assert outcome.float_latency_ms is not None
    assert outcome.size is not None
    assert outcome.objective == pytest.approx(outcome.latency_ms / outcome.float_latency_ms)
    assert tuned.on_runtime is not None
    assert tuned.on_runtime["top1"] == pytest.approx(outcome.metrics["top1"], abs=1.0)
    assert open_runtime("onnxruntime", tmp_path / "model.onnx").accuracy(work) == tuned.on_runtime
    # and what was saved is that model
    fresh = workload(6, ())
    prepare(fresh.model, Plan.load(tmp_path / "plan.yaml"))
    load_checkpoint(fresh.model, tmp_path / "checkpoint.safetensors")
    assert evaluate(fresh, fresh.model) == outcome.metrics
    kept = json.loads((tmp_path / "tuning.json").read_text())
    assert kept["met_goal"] is True
    assert kept["history"][0]["pareto"] is True
    assert kept["paired"]["only_float"] >= 0
    assert kept == json.loads(json.dumps(tuned.to_dict()))
    # the report is that of the command line
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tuning"]["met_goal"] is True
    assert [one["where"] for one in report["accuracies"]] == ["float", "simulated", "onnxruntime"]


def test_a_missed_goal_gives_the_best_model_and_says_by_how_much(tmp_path: Path) -> None:
    work = workload(20, (7,))
    never = Space(weights="int8/channel/sym", observer="minmax", steps=((),), operators={"*": {"keep": "quantized"}})
    tuned = search(work, space=never, output=tmp_path)
    assert tuned.met_goal is False
    assert tuned.outcome.margin < 0
    assert tuned.quantized is not None
    ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    kept = json.loads((tmp_path / "tuning.json").read_text())
    assert kept["met_goal"] is False
    assert kept["margin"] == pytest.approx(tuned.outcome.margin)


def test_limits_count_as_much_as_accuracy() -> None:
    tuned = tune(workload(4, ()), Goal(drop="10%", size=10), space=ONE_BASE, measuring=QUICK)
    assert tuned.met_goal is False
    assert tuned.outcome.accurate
    assert tuned.outcome.exceeded[0].startswith("size")


@pytest.mark.slow
def test_memory_is_measured_where_the_goal_speaks_of_it() -> None:
    goal = Goal(drop="10%", memory="4 GB", objective={"memory": 1.0, "size": 1.0})
    tuned = tune(workload(4, ()), goal, Budget(trials=1), space=ONE_BASE, measuring=QUICK)
    assert tuned.met_goal
    assert tuned.outcome.memory is not None
    assert tuned.outcome.memory > 0
    assert tuned.outcome.objective is not None
    assert tuned.outcome.objective > 0


def test_the_time_is_held_within_one_trial() -> None:
    work = workload(20, (7,))
    slow = replace(work, evaluate=lambda predict: (time.sleep(0.5), {"top1": 50.0 * bool(id(predict))})[1])
    begin = time.monotonic()
    tuned = search(slow, budget=Budget(minutes=2 / 60, trials=None), strategy="random")
    assert "minutes" in tuned.stopped_because
    assert any(f"{2 / 60:g}" in note for note in tuned.notes)  # how much longer it took
    assert 2 <= len(tuned.history) <= 5
    assert time.monotonic() - begin < 10  # set-up, two seconds, one trial, and the best model once more


def test_the_first_that_passes_is_enough_if_that_is_asked_for() -> None:
    tuned = search(workload(20, (7,)), budget=Budget(stop="first"), strategy="exhaustive")
    assert tuned.met_goal
    assert [asked.outcome.passed for asked in tuned.history].index(True) == len(tuned.history) - 1


def test_without_an_evaluation_it_is_quantized_once() -> None:
    work = replace(workload(6, ()), evaluation=None, loss=None)
    tuned = search(work)
    assert tuned.met_goal is None
    assert tuned.plan is not None
    assert list(tuned.history) == []
    strip(work.model)


def test_a_result_slower_than_float_says_so() -> None:
    tuned = search(workload(6, ()), budget=Budget(trials=1))
    slow, fast = (
        replace(tuned, outcome=tuned.outcome.model_copy(update={"latency_ms": ms, "float_latency_ms": 1.0}))
        for ms in (2.0, 0.5)
    )
    assert slow.slower_than_float
    assert not fast.slower_than_float
    assert repr(slow).replace("2.00", "0.50") != repr(fast)
    assert f"{len(tuned.history)} trial" in repr(slow)


def test_overlap_of_calibration_and_evaluation_is_said() -> None:
    work = workload(4, ())
    [(data, _target), *_] = list(work.evaluation())  # type: ignore[misc]
    tuned = search(replace(work, calibration=lambda: [data[:30]]), budget=Budget(trials=1))
    assert tuned.baseline is not None
    assert tuned.baseline.overlap == 30
    assert any("30 calibration samples are also evaluation samples" in note for note in tuned.notes)
    assert search(workload(4, ()), budget=Budget(trials=1)).baseline.overlap == 0  # type: ignore[union-attr]


def test_a_model_no_better_than_the_majority_class_is_called_so() -> None:
    work = workload(3, ())
    biased = [(data, torch.zeros(len(data), dtype=torch.int64)) for data, _ in work.evaluation()]  # type: ignore[misc]
    tuned = search(replace(work, evaluation=lambda: biased), budget=Budget(trials=1))
    assert tuned.baseline is not None
    assert tuned.baseline.majority == 100.0
    assert any("proves nothing" in note for note in tuned.notes)


def test_one_candidate_that_fails_does_not_end_the_search() -> None:
    work, calls = workload(20, (7,)), [0]

    def moody(predict: object) -> dict[str, float]:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("the metric broke")
        return evaluate(replace(work, evaluate=None), predict)  # type: ignore[arg-type]

    tuned = search(replace(work, evaluate=moody), strategy="exhaustive", budget=Budget(trials=12))
    assert "evaluate raised RuntimeError: the metric broke, at test_tune.py:" in (tuned.history[0].outcome.failed or "")
    assert len(tuned.history) == 12


def test_if_every_candidate_fails_the_reasons_are_given() -> None:
    work, calls = workload(4, ()), [0]

    def once(predict: object) -> dict[str, float]:
        calls[0] += 1
        if calls[0] > 1:
            raise RuntimeError("only once")
        return {"top1": 100.0}

    with raises_problem("candidate-failed", mentions="only once"):
        search(replace(work, evaluate=once), budget=Budget(trials=2))
    assert not hasattr(work.model, "bitwright")  # float again


def test_a_study_goes_on_where_it_was_and_repeats_nothing(tmp_path: Path) -> None:
    store = tmp_path / "study.db"
    first = search(workload(20, (7,)), strategy="random", budget=Budget(trials=5), store=store)
    again = search(workload(20, (7,)), strategy="random", budget=Budget(trials=9), store=store, resume=True)
    assert [a.candidate for a in again.history][:5] == [a.candidate for a in first.history]
    assert [a.fresh for a in again.history] == [False] * 5 + [True] * 4
    whole = search(workload(20, (7,)), strategy="random", budget=Budget(trials=9))
    assert [a.candidate for a in whole.history] == [a.candidate for a in again.history]


@pytest.mark.parametrize("change", ["model", "calibration data", "evaluation data", "seed", "space.weights"])
def test_a_changed_study_is_refused_with_the_difference(tmp_path: Path, change: str) -> None:
    store = tmp_path / "study.db"
    search(workload(4, ()), budget=Budget(trials=1), store=store)
    work, options = workload(4, ()), {}
    if change == "model":
        with torch.no_grad():
            work.model[2].weight[0, 0] += 1e-3  # type: ignore[index]
    elif change == "calibration data":
        work = replace(work, calibration=lambda: [torch.randn(64, 32, generator=torch.Generator().manual_seed(9))])
    elif change == "evaluation data":
        work = replace(work, evaluation=lambda: list(workload(4, ()).evaluation())[:5])  # type: ignore[misc]
    elif change == "seed":
        options = {"seed": 1}
    else:
        options = {"space": Space(weights="int8/tensor/sym", steps=((),))}
    with raises_problem("study-changed", where=change):
        search(work, budget=Budget(trials=1), store=store, resume=True, **options)


def test_steps_of_candidates_leave_the_weights_as_they_were() -> None:
    """A candidate without steps is worth to the bit what it is worth if none with steps came before it."""
    made = digits_untrained()
    data = next(iter(made.evaluation()))[0]  # type: ignore[misc]
    work = replace(made, evaluate=lambda predict: {"norm": float(predict(data).norm())}, metric="norm")
    plain, stepped = Base(observer="minmax"), Base(observer="minmax", steps=("bias-correction",))

    def ordered(*bases: Base) -> Strategy:
        def ask(search: Search) -> CandidateGenerator:
            for base in bases:
                yield [search.space.start(base)]

        return ask

    norms: list[dict[str, float]] = []
    for bases in ((plain,), (stepped, plain)):
        STRATEGIES.register("ordered", ordered(*bases))
        try:
            tuned = tune(work, Goal(drop="90%"), strategy="ordered", backend="tensorrt", samples=64)
        finally:
            STRATEGIES.unregister("ordered")
        norms.append({"steps" if a.candidate.base.steps else "plain": a.outcome.metrics["norm"] for a in tuned.history})
        strip(work.model)
        work.model.load_state_dict(digits_untrained().model.state_dict())  # the best one's steps stay in its weights
    assert norms[1]["steps"] != norms[1]["plain"]
    assert norms[1]["plain"] == norms[0]["plain"]


def test_no_stubs_and_no_manual_fusion_are_needed() -> None:
    """Batch norms, residuals and functional calls, as they come."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.norm(self.a(x)))
            x = torch.relu(x + self.b(x))
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    model, data = Net().eval(), torch.randn(120, 3, 8, 8)
    with torch.no_grad():
        target = model(data).argmax(1)
    work = Workload(
        name="net",
        model=model,
        inputs=(data[:1],),
        calibration=lambda: [data[:60] * 0.9],
        evaluation=lambda: [(data[60:], target[60:])],
    )
    tuned = tune(work, Goal(drop="20%"), Budget(trials=4), space=ONE_BASE, measuring=QUICK)
    assert tuned.met_goal
    assert tuned.plan is not None
    assert list(tuned.plan.fold.values()) == ["a"]


def test_a_metric_of_ones_own_keeps_the_statistics_of_samples() -> None:
    work = workload(4, ())
    own = replace(work, evaluate=lambda predict: {"agreement": evaluate(replace(work, evaluate=None), predict)["top1"]})
    tuned = search(replace(own, metric="agreement"), budget=Budget(trials=1))
    assert tuned.paired is not None
    assert tuned.baseline is not None
    assert tuned.baseline.overlap == 0
    assert tuned.baseline.part is None  # but nothing is given up early on a metric that we don't know
    assert tuned.outcome.metrics.keys() == {"agreement"}
