"""Adaptive training: what ranks measure, when they switch, and that data and gradients stay exact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_ranks
from elastic import killed_run
from hypothesis import given, settings
from hypothesis import strategies as st
from paced import BATCH, replanner, workload
from problems import raises_problem
from safetensors.torch import load_file
from torch import nn

from bitwright import DriftSettings, Plan, TrainConfig, Trainer
from bitwright.cluster.replanning import section_names
from bitwright.plan import ComputeSpec, Device
from bitwright.reports.files import new_record
from bitwright.reports.markdown import markdown
from bitwright.reports.page import page
from bitwright.reports.sections import training_record
from bitwright.training.adaptive import Adaptation, DriftDetector, Planned, Replanned, Replanner
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks, SingleProcess, agree_on_attempt
from bitwright.training.step import PHASES, MeasuredStep

HERE = Path(__file__).parent

# -- detection ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.87, 1.14), min_size=2, max_size=40))
@settings(max_examples=50, deadline=None)
def test_noise_is_no_drift(noise: list[float]) -> None:
    detector = DriftDetector(DriftSettings(), [1.0, 2.0], 0.1)
    assert not any(detector.add([1.0 * n, 2.0 / n], 0.1, 2.2) for n in noise)


@given(st.floats(1.2, 50.0), st.booleans(), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_sustained_changes_are_drift(change: float, faster: bool, sustained: int) -> None:
    factor = 1 / change if faster else change
    detector = DriftDetector(DriftSettings(sustained=sustained), [1.0, 2.0], 0.1)
    found = [detector.add([1.0, 2.0 * factor], 0.1, 2.0) for _ in range(sustained)]
    assert found == [[]] * (sustained - 1) + [[1]]


def test_a_pause_and_opposite_changes_are_no_drift() -> None:
    detector = DriftDetector(DriftSettings(), [1.0], 0.0)
    assert [detector.add([seconds], 0.0, 1.0) for seconds in (5.0, 1.0, 5.0, 1.0, 0.2, 5.0, 0.2)] == [[]] * 7


def test_a_slower_link_is_drift() -> None:
    detector = DriftDetector(DriftSettings(), [1.0, 1.0], 0.1)
    assert [detector.add([1.0, 1.0], 0.6, 1.6) for _ in range(2)] == [[], [-1]]


def test_settings_without_meaning_are_refused() -> None:
    for name, value in {"interval": 0, "threshold": 0.0, "sustained": 0, "min_gain": -0.1, "cooldown": -1}.items():
        with raises_problem("invalid-setting", where=name):
            DriftSettings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"precision": "int8"}, "precision"),
        ({"config": TrainConfig(parallel="fsdp")}, "parallel"),
        ({"config": TrainConfig(compile=True)}, "compile"),
    ],
)
def test_settings_that_cannot_change_within_a_run_are_refused(options: dict[str, Any], where: str) -> None:
    work = workload()
    with raises_problem("adaptive-unsupported", where=where):
        Trainer(work, adaptive=replanner(work), **options)


# -- measurement -------------------------------------------------------------------------------------------------


class _Waits(SingleProcess):
    """As DDP does, this waits before the model's forward and after the last gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.net = self.call  # type: ignore[assignment]

    def call(self, x: torch.Tensor) -> Any:
        _sleep(0.03)
        return _AfterBackward.apply(self.model(x))


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        # callbacks of the engine run after the last gradient, where DDP waits for its messages
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _sleep(0.05))  # type: ignore[attr-defined]
        return grad


def _sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def test_waiting_for_others_is_not_own_work() -> None:
    work = workload(0.002)
    model = work.model
    step = MeasuredStep(_Waits(model), lambda out, _, y: work.loss(out, y), torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[misc]
    x, y = torch.randn(20, 8), torch.zeros(20, dtype=torch.long)
    for _ in range(6):
        step.run([(x, y, 1.0)], 1)
    rows = step.rows
    step.close()
    assert len(rows) == 4  # the first steps aren't typical
    fastest = [min(column) for column in zip(*rows, strict=True)]
    own, wait, period = fastest[:3]
    phases = dict(zip(PHASES, fastest[3:], strict=True))
    assert own >= 0.04
    assert wait >= 0.05
    assert own <= period - 0.08 + 1e-3  # both waits are left out
    assert phases["forward"] >= 0.04
    assert all(abs(sum(row[3:]) - row[0]) < 1e-3 for row in rows)
    assert not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]


def test_a_model_whose_last_gradient_changes_is_still_measured() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.calls = layers, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layers[self.calls // 8 % 2](x)  # type: ignore[no-any-return]

    model = Changing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = MeasuredStep(SingleProcess(model), lambda out, _, y: (out - y).square().mean(), optimizer)
    for _ in range(32):
        step.run([(torch.randn(2, 4), torch.randn(2, 4), 1.0)], 1)
    assert 20 <= len(step.rows) < 32
    assert all(row[0] > 0 for row in step.rows)


# -- data and gradients ------------------------------------------------------------------------------------------


class _Fixed(Ranks):
    parts: Sequence[int] = ()

    def gather(self, value: Any) -> list[Any]:
        return list(self.parts)


def _data(parts: Sequence[int], size: int, rank: int) -> TrainingData:
    given_ = replace(workload(), training=lambda: [(torch.zeros(2), 0)] * size)
    kind = type("Fixed", (_Fixed,), {"parts": tuple(parts)})
    return TrainingData(given_, batch=parts[rank], seed=3, ranks=kind(rank=rank, world=len(parts)), workers=0)


@st.composite
def _histories(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    total = draw(st.integers(4, 40))
    splits = []
    for _ in range(draw(st.integers(1, 4))):
        world = draw(st.integers(1, min(4, total)))
        cuts = sorted(draw(st.permutations(range(1, total)))[: world - 1])
        splits.append([b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)])
    return draw(st.integers(total, 6 * total)), splits


@given(_histories())
@settings(max_examples=60, deadline=None)
def test_each_sample_counts_once_in_an_epoch_with_several_plans_and_other_ranks(
    history: tuple[int, list[list[int]]],
) -> None:
    size, splits = history
    first = [_data(splits[0], size, rank) for rank in range(len(splits[0]))]
    batches = first[0].batches
    seen: dict[int, float] = {}
    for number in range(batches):
        parts = splits[number * len(splits) // batches]  # the plan of this part of the epoch
        weights = 0.0
        for rank in range(len(parts)):
            data = _data(parts, size, rank)
            data.redistribute(list(parts), batches=batches)
            assert data.batches == batches
            keys = data.order(1)[number]
            assert keys  # collectives need every rank
            weight = data.weight(number, range(number, number + 1)) / len(parts)
            weights += weight
            for _, _, index in keys:
                seen[index] = seen.get(index, 0.0) + weight / len(keys)
        assert weights == pytest.approx(1)
    whole = [_data([sum(splits[0])], size, 0).order(1)]
    assert sorted(index for index, weight in seen.items() if weight > 0) == list(range(size))
    shares = {round(weight, 9) for weight in seen.values()}
    assert len(shares) <= 2  # samples of the last batch have another weight than those of whole batches
    assert len(whole[0]) >= 1


def test_ranks_without_samples_of_a_short_batch_count_nothing() -> None:
    for rank in range(4):
        data = _data([4, 4, 4, 4], 35, rank)
        data.redistribute([4, 4, 4, 4], batches=3)
        assert data.sizes(2) == [3, 0, 0, 0]
        assert len(data.order(0)[2]) == (3 if rank == 0 else 2)
        assert (data.weight(2, range(2, 3)) > 0) == (rank == 0)


def test_the_name_of_an_attempt_is_that_of_the_living() -> None:
    """The store has entries of processes that died; a number of restarts wouldn't tell them apart."""
    store = dist.HashStore()
    names: list[str] = []
    for attempt in range(3):
        store.set("bitwright/rank/2", f"dead-{attempt}")  # it presented itself and died
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(partial(agree_on_attempt, store, world=3, seconds=20), range(3)))
        assert len(set(found)) == 1
        names.append(found[0])
    assert len(set(names)) == 3


def test_missing_ranks_are_reported() -> None:
    with raises_problem("ranks-missing", where="rank"):
        agree_on_attempt(dist.HashStore(), 0, 2, seconds=0.1)


# -- plans -------------------------------------------------------------------------------------------------------


def _begun(machines: list[str | None], kinds: str = "a,b", **options: Any) -> tuple[Any, Planned]:
    work = workload()
    planner = replanner(work, kinds)
    given_ = {"samples": None, "plan": None, "state": None, **options}
    return planner, planner.begin(work, TrainConfig(batch=BATCH), machines, **given_)


def test_a_slower_rank_gets_fewer_samples_and_a_faster_one_gets_them_back() -> None:
    planner, first = _begun(["a", "b"])
    assert first.batches == (BATCH, BATCH)
    even = planner.replan([0.1, 0.1], 0.001)
    assert even.best.batches == (BATCH, BATCH)
    assert even.current.own == pytest.approx((0.1, 0.1), rel=1e-3)
    slow = planner.replan([0.1, 0.2], 0.001)
    assert slow.current.seconds == pytest.approx(0.2, rel=0.05)
    assert slow.best.batches[0] + slow.best.batches[1] == 2 * BATCH
    assert slow.best.batches[0] in range(20, 25)
    assert slow.best.seconds < 0.75 * slow.current.seconds
    planner.adopt(slow.best)
    back = planner.replan([slow.best.own[0], slow.best.own[1] / 2], 0.001)
    assert back.best.batches == (BATCH, BATCH)
    assert json.loads(json.dumps(planner.state()))["machines"] == ["a", "b"]


def test_the_wait_for_messages_rescales_the_link() -> None:
    planner, _ = _begun(["a", "b"])
    fast, slow = (planner.replan([0.1, 0.1], seconds) for seconds in (0.002, 0.08))
    assert fast.current.exposed == pytest.approx(0.002, rel=0.1)
    assert slow.current.exposed == pytest.approx(0.08, rel=0.1)
    assert slow.current.seconds - fast.current.seconds == pytest.approx(0.078, rel=0.1)


def test_plans_keep_the_samples_of_a_step_for_any_number_of_ranks() -> None:
    planner, three = _begun(["a", "a", "a"], "a", samples=50)
    assert three.sections == ("a-0", "a-1", "a-2")
    assert sorted(three.batches) == [16, 17, 17]
    planner.replan([0.1, 0.2, 0.1], 0.001)
    state = json.loads(json.dumps(planner.state()))
    # the first rank may have one sample less than the second
    assert state["slowdowns"][1] == pytest.approx(2 * state["slowdowns"][0], rel=0.1)
    _, two = _begun(["a", "a"], "a", samples=50, state=state)
    assert two.sections == ("a-0", "a-1")
    assert two.batches[0] > 1.5 * two.batches[1]  # the second was slow before
    _, one = _begun(["a"], "a", samples=50, state=state)
    assert one.sections == ("a",)
    assert one.batches == (50,)


def test_a_given_plan_is_the_first_one() -> None:
    int8 = ComputeSpec(format="int8")
    plan = Plan(devices={"a": Device(batch=20), "b": Device(batch=12, compute={"f*": int8})})
    planner, planned = _begun(["b", "a"], plan=plan)
    assert planned.sections == ("b", "a")
    assert planned.batches == (12, 20)
    assert planned.low == [1, 0]
    assert Planned.from_dict(json.loads(json.dumps(planned.to_dict()))) == planned
    assert sum(planner.replan([0.1, 0.1], 0.001).best.batches) == 32
    with raises_problem("formats-not-scored", where="first"):
        _begun(["b", "a"], plan=Plan(compute={"first": ComputeSpec(format="bf16")}))


def test_uncertain_profiles_say_nothing_about_batches(caplog: pytest.LogCaptureFixture) -> None:
    work = workload()
    planner = replanner(work)
    assert planner.profiles is not None
    known = planner.profiles["b"]
    noisy = [
        cost.model_copy(
            update={
                "forward": cost.forward.model_copy(update={"seconds": 50 * cost.forward.seconds, "low": 0, "high": 1})
            }
        )
        for cost in known.operators
    ]
    planner.profiles = {"a": known, "b": known.model_copy(update={"operators": noisy})}
    options: dict[str, Any] = {"samples": None, "plan": None, "state": None}
    first = planner.begin(work, TrainConfig(batch=BATCH), ["a", "b"], **options)
    assert first.batches == (BATCH, BATCH)
    assert first.low == [0, 0]
    assert "the times of b are uncertain" in caplog.text
    slow = planner.replan([0.1, 0.3], 0.001)
    assert slow.best.batches in [(23, 9), (24, 8), (25, 7)]


def test_unknown_kinds_of_machines_are_reported() -> None:
    with raises_problem("unknown-device-kind", where="kind"):
        _begun(["a", "c"])
    with raises_problem("device-kind-required", where="kind"):
        _begun([None, "a"])
    assert _begun([None], "a")[1].sections == ("a",)


def test_names_of_sections_are_unique() -> None:
    assert section_names(["a", "a-0", "a", "b"]) == ("a-1", "a-0", "a-2", "b")


# -- decisions ---------------------------------------------------------------------------------------------------


class _Scripted(Replanner):
    """Offers a plan with a given gain."""

    def __init__(self, gain: float, penalty: float = 1.0, **options: Any) -> None:
        self.settings = DriftSettings(**options)
        self.gain, self.penalty, self.asked, self.adopted = gain, penalty, 0, 0

    def begin(self, *args: Any, **options: Any) -> Planned:
        return self._planned(100.0, 1.0)

    def replan(self, own: Sequence[float], exposed: float) -> Replanned:
        self.asked += 1
        return Replanned(current=self._planned(100.0, 1.0), best=self._planned(100.0 / (1 + self.gain), self.penalty))

    def adopt(self, planned: Planned) -> None:
        self.adopted += 1

    def state(self) -> dict[str, Any]:
        return {}

    def _planned(self, seconds: float, penalty: float) -> Planned:
        plan = Plan(devices={"a": Device(batch=BATCH)})
        own = (1e-9,)  # any step is a drift
        return Planned(
            plan=plan, sections=("a",), batches=(BATCH,), seconds=seconds, own=own, exposed=0.0, penalty=penalty
        )


@pytest.mark.parametrize(
    ("planner", "switches"),
    [
        (_Scripted(0.5, cooldown=0), True),
        (_Scripted(0.04, cooldown=0), False),
        (_Scripted(0.04, cooldown=0, min_gain=0.01), True),
        (_Scripted(0.0, penalty=0.5, cooldown=0), True),
        (_Scripted(-0.05, penalty=0.5, cooldown=0), False),
        (_Scripted(0.5, cooldown=100), False),  # longer than the run
    ],
)
def test_ranks_switch_only_if_it_pays(planner: _Scripted, switches: bool) -> None:
    config = TrainConfig(batch=BATCH, epochs=1)
    result = Trainer(workload(samples=20 * BATCH), adaptive=planner, config=config).fit()
    assert (planner.adopted > 0) == switches
    assert any("switched to" in note for note in result.notes) == switches
    assert planner.adopted <= planner.asked <= 2


def test_cool_downs_limit_the_number_of_switches() -> None:
    often, seldom = (_Scripted(0.5, interval=1, sustained=1, cooldown=steps) for steps in (0, 12))
    for planner in (often, seldom):
        Trainer(workload(samples=30 * BATCH), adaptive=planner, config=TrainConfig(batch=BATCH)).fit()
    assert seldom.adopted in (1, 2)
    assert often.adopted > 2 * seldom.adopted


def test_long_timelines_are_merged() -> None:
    adaptation = Adaptation(_Scripted(0.0), Ranks(), _Scripted(0.0).begin(), ["a"])
    for step in range(3000):
        adaptation.timeline.add({"step": step, "seconds": 1.0, "own": [0.5], "sections": ["a"]})
    assert len(adaptation.timeline.rows) <= 512
    assert adaptation.timeline.rows[-1]["step"] == 2999
    assert {row["own"][0] for row in adaptation.timeline.rows} == {0.5}


# -- whole runs --------------------------------------------------------------------------------------------------


def test_two_ranks_switch_to_another_plan_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("ADAPTIVE_OUT", str(run))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    found = two_ranks.run(HERE / "adaptive_worker.py", tmp_path, seconds=240)
    assert [one["steps"] for one in found] == [96, 96]
    facts = json.loads((run / "result.json").read_text())
    switches = facts["adaptive"]["switches"]
    first = next(switch for switch in switches if switch["batches"][1] < BATCH - 4)
    assert 25 <= first["step"] <= 60  # slower from step 20 to 50
    assert all(sum(switch["batches"]) == 2 * BATCH for switch in switches)
    assert {0, 1} >= set(range(len(facts["adaptive"]["rows"][0]["own"])))
    # the checkpoint continues with the current plan
    saved = sorted((run / "checkpoints").glob("step-*"))[-1]
    state = json.loads((saved / "trainer.json").read_text())
    assert state["adaptive"]["planned"]["batches"] == switches[-1]["batches"] == facts["batches"]
    assert any("switch" in row for row in map(json.loads, (run / "history.jsonl").read_text().splitlines()))
    # the same global batches in one process give the same weights, except for the order of sums
    config = TrainConfig(epochs=3, batch=2 * BATCH, lr=0.05)
    alone = Trainer(workload(), config=config, device="cpu").fit().model.state_dict()
    for name, tensor in load_file(run / "checkpoint.safetensors").items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=1e-5)
    record = new_record("paced", training=training_record(run))
    assert record.training is not None
    assert record.training.adaptive is not None
    assert record.training.adaptive.ranks == ("a", "b")
    assert any(one.measured_ms for one in record.training.adaptive.switches)
    assert all(0 <= share < 1 for share in record.training.adaptive.idle)
    text = page(record)
    assert 'id="ranks"' in text
    assert text.count('class="dot') >= 3 * 4
    assert "## Ranks over time" in markdown(record)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [False, True], ids=["rank", "machine"])
def test_a_killed_run_ends_as_a_manual_restart_does(tmp_path: Path, machine: bool) -> None:
    found = killed_run(tmp_path, 1, machine=machine)
    assert found["same weights"]
    assert found["same losses"]
    assert found["ranks"] == (2 if machine else 3)
    assert sum(found["batches"]) == 3 * BATCH
