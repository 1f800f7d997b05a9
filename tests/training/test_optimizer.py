"""Settings in iterations are applied exactly: an independent plain loop has the same rates, decay and losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from bitwright import Qat, TrainConfig, Trainer, Workload, capture
from bitwright.backends import backend, make_plan
from bitwright.core.errors import TrainError
from bitwright.training import Callback
from bitwright.training.optimizer import GroupSettings, OptimizerSettings, RateSchedule, Recipe, group_by_kind

ITERATIONS, BATCH, WARMUP, START, TOP, LAST = 20, 8, 6, 0.002, 0.05, 0.001
SGD = OptimizerSettings(name="SGD", momentum=0.9, nesterov=True, weight_decay=0.01)
ADAM = OptimizerSettings(name="Adam", weight_decay=0.02, betas=(0.8, 0.95))


class Recorded(Dataset[tuple[Tensor, int]]):
    """Samples that remember in which order they were read."""

    def __init__(self) -> None:
        self.pixels = torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return self.pixels[index], index % 4


class Steps(Callback):
    """The loss, and the settings of each group, at each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.groups: list[dict[str, tuple[float, float]]] = []

    def on_log(self, run: Any, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])
        self.groups.append({g["name"]: (g["lr"], g["weight_decay"]) for g in run.optimizer.param_groups})


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def recipe(optimizer: OptimizerSettings, **more: Any) -> Recipe:
    return Recipe(
        **{"iterations": ITERATIONS, "validate_every": 6, **more},
        optimizer=optimizer,
        groups={
            "bn_b": GroupSettings(weight_decay=0.0),
            "bn_w": GroupSettings(weight_decay=0.5),
            "linear_b": GroupSettings(lr=START / 2),
        },
        schedule=RateSchedule(kind="Cosine", start=START, top=TOP, last=LAST, warmup=WARMUP),
    )


def rate(iteration: int) -> float:
    """The published formula, written again: linear warm-up, then a cosine."""
    if iteration <= WARMUP:
        return START + (TOP - START) * (iteration - 1) / (WARMUP - 1)
    return LAST + 0.5 * (TOP - LAST) * (1 + math.cos(math.pi * (iteration - WARMUP) / (ITERATIONS - WARMUP)))


def smoothed_loss(output: Tensor, target: Tensor, smoothing: float) -> Tensor:
    classes = output.shape[1]
    wanted = torch.full_like(output, smoothing / classes)
    wanted[torch.arange(len(target)), target] += 1 - smoothing
    return -(wanted * output.log_softmax(1)).sum(1).mean()


def plain_loop(model: nn.Module, data: Recorded, optimizer: str, after: Callable[[], None]) -> list[float]:
    """Train on the batches that were read, with nothing of the trainer."""
    own = {
        "1.bias": (0.0, 1.0),
        "4.bias": (0.0, 1.0),
        "1.weight": (0.5, 1.0),
        "4.weight": (0.5, 1.0),
        "7.bias": (None, 0.5),
    }
    base = 0.01 if optimizer == "SGD" else 0.02
    groups = []
    for name, parameter in model.named_parameters():
        decay, share = own.get(name, (None, 1.0))
        groups.append({"params": [parameter], "weight_decay": base if decay is None else decay, "share": share})
    torch_optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=START, momentum=0.9, nesterov=True)
        if optimizer == "SGD"
        else torch.optim.Adam(groups, lr=START, betas=(0.8, 0.95))
    )
    losses = []
    model.train()
    for step in range(ITERATIONS):
        indices = data.read[step * BATCH : (step + 1) * BATCH]
        pixels, target = data.pixels[indices], torch.tensor([index % 4 for index in indices])
        for group in torch_optimizer.param_groups:
            group["lr"] = rate(step + 1) * group["share"]
        torch_optimizer.zero_grad()
        loss = smoothed_loss(model(pixels), target, 0.1)
        loss.backward()  # type: ignore[no-untyped-call]
        torch_optimizer.step()
        after()
        losses.append(float(loss.detach()))
    return losses


def workload(model: nn.Module, data: Recorded) -> Workload:
    return Workload(
        name="recorded",
        model=model,
        inputs=(data.pixels[:1],),
        calibration=lambda: [data.pixels[:BATCH]],
        training=lambda: data,
        evaluation=lambda: [(data.pixels, torch.arange(50) % 4)],
        loss=F.cross_entropy,
    )


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
@pytest.mark.parametrize("quantized", [False, True], ids=["float", "lsq"])
def test_an_independent_loop_has_the_same_rates_decay_and_losses(optimizer: OptimizerSettings, quantized: bool) -> None:
    data, steps, model = Recorded(), Steps(), network()
    twin = copy.deepcopy(model)
    plan = None
    if quantized:
        choices: Any = {"weights": "int4/tensor/sym", "activations": "int4/tensor/sym/adasign", "quantizer": "lsq"}
        plan = make_plan(capture(model, (data.pixels[:1],)), backend("academic"), **choices)
    config = TrainConfig(recipe=recipe(optimizer), batch=BATCH, label_smoothing=0.1, log_steps=1, seed=3, fuse=False)
    result = Trainer(workload(model, data), precision=plan, config=config, callbacks=[steps]).fit()
    assert (result.steps, result.epochs, len(result.metrics)) == (ITERATIONS, 4, 4)  # measured after 6, 12, 18, 20

    after: Callable[[], None] = lambda: None  # noqa: E731
    if plan is not None:
        qat = Qat(twin, [data.pixels[:BATCH]], precision=plan, backend="academic", fuse=False)
        counted = iter(range(1, ITERATIONS + 1))

        def after() -> None:
            qat.after_step()
            if next(counted) in (6, 12, 18, 20):
                qat.after_epoch()

    expected = plain_loop(twin, data, optimizer.name, after)
    assert steps.losses == pytest.approx(expected, rel=1e-5)
    for number, groups in enumerate(steps.groups, 1):
        lr, decay = rate(number), 0.01 if optimizer.name == "SGD" else 0.02
        assert groups["others"] == pytest.approx((lr, decay))
        assert groups["bn_b"] == pytest.approx((lr, 0.0))
        assert groups["bn_w"] == pytest.approx((lr, 0.5))
        assert groups["linear_b"] == pytest.approx((lr / 2, decay))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_samples_are_repeated_equally_over_the_whole_run() -> None:
    data = Recorded()
    config = TrainConfig(recipe=recipe(SGD), batch=BATCH, seed=3)
    Trainer(workload(network(), data), config=config).fit()
    counts = torch.bincount(torch.tensor(data.read[: ITERATIONS * BATCH]), minlength=50)
    assert counts.sum() == ITERATIONS * BATCH
    assert set(counts.tolist()) == {3, 4}  # 160 samples of 50
    assert len(set(data.read[:50])) < 50  # one shuffle of all repetitions, not one per pass

    again, passes = Recorded(), Recorded()
    Trainer(workload(network(), again), config=config).fit()
    assert again.read == data.read
    by_epoch = config.model_copy(update={"recipe": recipe(SGD, sampler="epochs")})
    Trainer(workload(network(), passes), config=by_epoch).fit()
    assert len(set(passes.read[:50])) == 50


def test_epochs_become_iterations_and_a_batch_may_exceed_the_data() -> None:
    data, steps = Recorded(), Steps()
    config = TrainConfig(recipe=recipe(SGD, iterations=None, epochs=2), batch=20, log_steps=1)
    assert Trainer(workload(network(), data), config=config, callbacks=[steps]).fit().steps == 4
    config = TrainConfig(recipe=recipe(SGD, iterations=2), batch=64)
    assert Trainer(workload(network(), data), config=config).fit().steps == 2


def test_a_run_resumes_within_an_epoch_to_the_bit(tmp_path: Any) -> None:
    config = TrainConfig(recipe=recipe(SGD, keep_checkpoints=True), batch=BATCH, seed=3, save_steps=4)
    whole = Trainer(workload(network(), Recorded()), config=config, out=tmp_path / "a").fit()
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").glob("step-*")) == [
        f"step-{number:08d}" for number in (4, 6, 8, 12, 16, 18, 20)
    ]

    class Stop(Callback):
        def on_step(self, run: Any) -> None:
            if run.step == 10:
                raise KeyboardInterrupt

    broken, resumed = network(), network()
    with pytest.raises(KeyboardInterrupt):
        Trainer(workload(broken, Recorded()), config=config, out=tmp_path / "b", callbacks=[Stop()]).fit()
    result = Trainer(workload(resumed, Recorded()), config=config, out=tmp_path / "b", resume=True).fit()
    assert result.metrics == whole.metrics
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, result.model.state_dict()[name]), name


def test_a_recipe_replaces_other_settings() -> None:
    with pytest.raises(TrainError) as caught:
        Trainer(workload(network(), Recorded()), config=TrainConfig(recipe=recipe(SGD), lr=0.5, epochs=2))
    assert {problem.where for problem in caught.value.problems} == {"lr", "epochs"}
    assert set(caught.value.codes) == {"ignored-argument"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": {"name": "Adam", "momentum": 0.9}},
        {"optimizer": {"name": "SGD", "nesterov": True}},
        {"optimizer": {"name": "Adam"}, "groups": {"bn_w": {"momentum": 0.1}}},
        {"epochs": 2},
        {"groups": {"bn_x": {}}},
    ],
)
def test_options_that_would_be_ignored_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has no option|nesterov|either|bn_w"):
        Recipe(iterations=3, **wrong)


def test_parameters_are_grouped_by_kind() -> None:
    layers = [nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Linear(8, 2)]
    model = nn.Sequential(*layers)
    found = group_by_kind(model, ("conv_dw_w", "conv_dw_b", "conv_dense_w", "linear_w"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {kind: [names[id(one)] for one in own] for kind, own in found.items() if own} == {
        "others": ["2.weight"],
        "conv_b": ["1.bias", "2.bias"],
        "linear_b": ["3.bias"],
        "conv_dw_w": ["0.weight"],
        "conv_dw_b": ["0.bias"],
        "conv_dense_w": ["1.weight"],
        "linear_w": ["3.weight"],
    }
