"""Training with operators that really run in low precision, on equal and unequal ranks."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import raises_problem
from safetensors.torch import load_file
from spirals import workload
from torch import nn

from bitwright import BitwrightError, Plan, TrainConfig, Trainer
from bitwright.plan import ComputeSpec, Device
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks
from bitwright.training.low_precision import LowPrecision
from bitwright.training.step import TrainingObjective

SPIRALS = f"{Path(__file__).parents[1] / 'support' / 'spirals.py'}:workload"
INT8 = ComputeSpec(format="int8", backward=("input", "weight"), stochastic=True)


def train(**options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    config = TrainConfig(epochs=15, batch=25, lr=0.1, schedule="constant")
    result = Trainer(workload(), config=config, **options).fit()
    return result.metrics[-1]["top1"], result.model.state_dict()


def test_int8_training_reaches_what_float_training_reaches() -> None:
    exact, _ = train()
    plan = Plan(compute={"*": INT8})
    real, state = train(compute=plan)
    simulated, _ = train(compute=plan, simulate=True)
    assert exact > 95
    assert real > exact - 3
    assert abs(real - simulated) <= 2
    assert set(state) == set(workload().model.state_dict())  # the plain float model again
    assert train(compute=plan)[1]["0.weight"].equal(state["0.weight"])  # seeded, roundings and all


def test_resumed_runs_are_bit_identical(tmp_path: Path) -> None:
    def run(out: Path, epochs: int, **options: Any) -> dict[str, torch.Tensor]:
        config = TrainConfig(epochs=4, batch=50, lr=0.1, save_steps=7, schedule="constant")
        trainer = Trainer(workload(), config=config, compute=Plan(compute={"*": INT8}), out=out, **options)
        if epochs < 4:
            trainer.callbacks.append(_StopAt(epochs))
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
            return {}
        trainer.fit()
        return load_file(out / "checkpoint.safetensors")

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "broken", 2)
    again = run(tmp_path / "broken", 4, resume=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


class _StopAt:
    """A user's Ctrl-C in the middle of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_step(self, run: Any) -> None:
        if run.epoch == self.epoch and run.step % 10 == 7:
            run.stop.asked = "SIGINT"

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def test_a_run_resumes_only_on_the_same_kind_of_device(tmp_path: Path) -> None:
    plan = Plan(devices={"low": Device(compute={"*": INT8}), "plain": Device()})

    def trainer(kind: str) -> Trainer:
        config = TrainConfig(epochs=2, batch=50, lr=0.1, save_steps=3, schedule="constant")
        return Trainer(workload(), config=config, compute=plan, kind=kind, out=tmp_path, resume=True)

    begun = trainer("low")
    begun.callbacks.append(_StopAt(1))
    with pytest.raises(KeyboardInterrupt):
        begun.fit()
    with raises_problem("resume-mismatch", where="kinds"):
        trainer("plain").fit()
    trainer("low").fit()


def test_the_notes_say_what_runs_how() -> None:
    plan = Plan(compute={"2": ComputeSpec(format="int8"), "4": ComputeSpec(format="bf16")})
    result = Trainer(workload(), config=TrainConfig(batch=50), compute=plan).fit()
    assert any("1 in int8, 1 in bf16" in note for note in result.notes)


def test_the_notes_say_which_gradients_stay_float() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, stride=2, padding="valid"), torch.nn.Conv2d(4, 4, 1, groups=4), torch.nn.Flatten()
    )
    low = LowPrecision(model, Plan(compute={"*": INT8}), None, torch.randn(3, 2, 5, 5), simulate=False)
    assert any("2 in int8" in note for note in low.notes)
    assert any(
        "of the input stay in float in 1 operators, strided" in note and note.endswith(": 0") for note in low.notes
    )
    assert any("of the weight stay in float in 1 operators, in groups: 1" in note for note in low.notes)
    assert low.uncompiled == ["int8"]


def test_a_nan_weight_stops_training_as_in_float() -> None:
    for options in ({}, {"compute": Plan(compute={"*": INT8})}):
        broken = workload()
        with torch.no_grad():
            broken.model[2].weight[3, 3] = float("nan")
        with pytest.raises(BitwrightError) as caught:
            Trainer(broken, config=TrainConfig(epochs=2, batch=50, lr=0.1, log_steps=1), **options).fit()
        assert "loss-not-finite" in caught.value.codes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports, in its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo, where it goes on
def test_compiled_models_run_without_kernels() -> None:
    """The same numbers as without; torch's compiler once failed on the packed weights."""
    states = []
    for compile in (True, False):
        config = TrainConfig(epochs=1, batch=50, lr=0.1, compile=compile)
        result = Trainer(workload(), config=config, compute=Plan(compute={"*": INT8})).fit()
        assert any("in int8 aren't compiled" in note for note in result.notes) == compile
        states.append(result.model.state_dict())
    assert all(torch.allclose(tensor, states[1][name], atol=1e-4) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    ("text", "options", "code", "where"),
    [
        ("bitwright: 1\nsites: {'0:weight': int8/channel/sym}\n", {}, "plan-quantizes-sites", "0:weight"),
        ("bitwright: 1\n", {}, "plan-all-float", "compute"),
        ("bitwright: 1\ncompute: {'*': int9}\n", {}, "unknown-kernel", "compute.*"),
        ("bitwright: 1\ncompute: {'*': int8}\n", {"kind": "small"}, "unknown-device-kind", "kind"),
        ("bitwright: 1\ncompute: {'*': int8}\n", {"precision": "int8"}, "compute-and-quantize", "compute"),
        ("bitwright: 1\ndevices: {a: {compute: {'*': int8}}, b: {}}\n", {}, "device-kind-required", "kind"),
        ("bitwright: 1\ndevices: {a: {compute: {'*': int8}}, b: {}}\n", {"kind": "c"}, "unknown-device-kind", "kind"),
        (
            "bitwright: 1\ndevices: {big: {compute: {'*': int8}}, b: {}}\n",
            {"kind": "b,bigg"},
            "unknown-device-kind",
            "kind",
        ),
        (
            "bitwright: 1\ndevices: {a: {compute: {'*': int8}}, b: {}}\n",
            {"kind": "a,b"},
            "device-kind-count",
            "kind",
        ),
        ("bitwright: 1\ncompute: {'9': int8}\n", {}, "unknown-operator", "compute.9"),
        (
            "bitwright: 1\ndevices: {a: {compute: {'*': int8}}, b: {compute: {nope: int8}}}\n",
            {"kind": "a"},
            "unknown-operator",
            "devices.b compute.nope",
        ),
    ],
)
def test_wrong_plans_are_refused(tmp_path: Path, text: str, options: dict[str, Any], code: str, where: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with raises_problem(code, where=where):
        Trainer(workload(), config=TrainConfig(batch=50), compute=path, **options).fit()


def test_each_device_has_its_section_and_batch() -> None:
    plan = Plan(
        compute={"*": ComputeSpec(format="bf16")},
        devices={"fast": Device(compute={"2": ComputeSpec()}, batch=20), "slow": Device(compute={"*": INT8})},
    )
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.for_device("slow").compute == {"*": INT8}
    assert plan.for_device("fast").compute == {"*": ComputeSpec(format="bf16"), "2": ComputeSpec()}
    result = Trainer(workload(), config=TrainConfig(batch=50), compute=plan, kind="fast").fit()
    assert result.steps == 25
    assert any("2 in bf16" in note for note in result.notes)


class _Fixed(Ranks):
    """Ranks whose others are known without a process group."""

    parts: tuple[int, ...] = (12, 20, 3)

    def gather(self, value: Any) -> list[Any]:
        return list(self.parts)


def shards(parts: tuple[int, ...], size: int, **options: Any) -> list[TrainingData]:
    """A training set of so many samples as each rank sees it."""
    given = replace(workload(), training=lambda: [(torch.zeros(2), 0)] * size)
    kind = type("Fixed", (_Fixed,), {"parts": parts})
    return [
        TrainingData(given, batch=batch, seed=5, ranks=kind(rank=rank, world=len(parts)), workers=0, **options)
        for rank, batch in enumerate(parts)
    ]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 200), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_each_sample_is_seen_once_and_counts_the_same(parts: list[int], more: int, accumulate: int) -> None:
    size = sum(parts) + more
    ranks = shards(tuple(parts), size)
    orders = [data.order(2) for data in ranks]
    assert sorted(index for order in orders for keys in order for _, _, index in keys) == list(range(size))
    assert {len(order) for order in orders} == {ranks[0].batches}
    for order, part in zip(orders, parts, strict=True):
        assert all(len(keys) == part for keys in order[:-1])
        assert len(order[-1]) >= min(2, part)  # nobody is without samples: collectives want all, norms want two
    for step in range(ranks[0].steps(accumulate)):
        numbers = ranks[0].numbers(step, accumulate)
        samples = sum(len(order[n]) for order in orders for n in numbers)
        for data, order in zip(ranks, orders, strict=True):
            for number in numbers:  # DDP divides by the number of ranks, a mean by that of samples
                each = data.weight(number, numbers) / len(parts) / len(order[number])
                assert each == pytest.approx(1 / samples)


def test_the_last_batch_can_be_dropped() -> None:
    parts = list(shards((12, 20, 3), 500, drop_last=True))
    assert len(parts) == 3
    for data in parts:
        assert data.batches == 500 // 35
        assert {len(keys) for keys in data.order(2)} == {data.batch}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_short_last_step_has_the_mean_of_its_samples(accumulate: int) -> None:
    """One full step and a short one, beside plain SGD on the same samples."""
    config = TrainConfig(
        epochs=1, batch=60, lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", accumulate=accumulate
    )
    given = workload()
    model = copy.deepcopy(given.model)
    result = Trainer(given, config=config).fit()
    assert result.steps == -(-9 // accumulate)
    data = TrainingData(workload(), batch=60, seed=0, ranks=Ranks(), workers=0)
    batches = list(data.epoch(0))
    assert given.loss is not None
    for start in range(0, len(batches), accumulate):
        inputs, targets = (torch.cat(list(part)) for part in zip(*batches[start : start + accumulate], strict=True))
        model.zero_grad()
        given.loss(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    for name, tensor in result.model.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_sums_of_losses_count_each_sample_once() -> None:
    """A sum says already how many samples there are: weights by batch would count them twice."""
    for loss in (nn.CrossEntropyLoss(reduction="sum"), partial(F.cross_entropy, reduction="sum")):
        assert TrainingObjective(replace(workload(), loss=loss), TrainConfig(), None).sums
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        assert not TrainingObjective(replace(workload(), loss=loss), TrainConfig(), None).sums


def launch(out: Path, *options: str) -> list[float]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", "-m", "bitwright", "train", SPIRALS, "--lr", "0.1", "--log-steps", "1"),
        *("--no-tensorboard", "-o", str(out), *options),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_unequal_ranks_train_as_equal_ones_do(tmp_path: Path) -> None:
    """Another split of the same global batches: the mean of gradients is exact, so losses are the same."""
    unequal = tmp_path / "plan.yaml"
    unequal.write_text("bitwright: 1\ndevices:\n  fast: {batch: 14}\n  slow: {batch: 6, compute: {'*': float}}\n")
    options = ("--plan", str(unequal), "--device-kind", "fast,slow", "--epochs", "1")
    split = launch(tmp_path / "split", *options)
    equal = launch(tmp_path / "equal", "--batch", "10", "--epochs", "1")
    assert split == pytest.approx(equal, rel=1e-4)


@pytest.mark.slow
def test_two_kinds_of_device_train_one_model(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "bitwright: 1\ndevices:\n  fast: {batch: 14}\n"
        "  slow: {batch: 6, compute: {'*': {format: int8, stochastic: true}}}\n"
    )
    losses = launch(tmp_path / "run", "--plan", str(plan), "--device-kind", "fast,slow", "--epochs", "2", "--clip", "1")
    assert losses[-1] < losses[0]
    kept = load_file(tmp_path / "run" / "checkpoint.safetensors")
    assert not any(name.startswith("bitwright") for name in kept)
    facts = json.loads((tmp_path / "run" / "result.json").read_text())
    assert facts["batches"] == [14, 6]
    assert replace(Plan.load(tmp_path / "run" / "plan.yaml"), model=None).devices["slow"].batch == 6


def test_plans_with_float_everywhere_are_accepted(tmp_path: Path) -> None:
    config = TrainConfig(epochs=1, batch=50, lr=0.1)
    trainer = Trainer(workload(), config=config, compute=Plan(devices={"big": Device(), "small": Device()}), kind="big")
    trained = trainer.fit().model.state_dict()
    plain = Trainer(workload(), config=config).fit().model.state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in plain.items())
    with pytest.raises(BitwrightError) as caught:
        Trainer(workload(), config=config, compute=Plan()).fit()
    assert "plan-all-float" in caught.value.codes


def test_a_plan_sets_the_memory_layout(tmp_path: Path) -> None:
    plan = Plan(devices={"big": Device(channels_last=True)})
    Trainer(workload(), config=TrainConfig(epochs=1, batch=50), compute=plan, kind="big", out=tmp_path).fit()
    assert json.loads((tmp_path / "result.json").read_text())["config"]["channels_last"] is True
