"""A plain PyTorch loop, and what Qat refuses in any loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.loops import common
from torch import nn

from bitwright import BitwrightError, quantizers_of, strip
from bitwright.training import Qat, parameter_groups


def steps(qat: Qat, optimizer: torch.optim.Optimizer, epochs: int, *, first: int = 0) -> list[float]:
    x, y = common.samples()
    losses = []
    for epoch in range(first, first + epochs):
        qat.model.train()
        torch.manual_seed(epoch)
        for index in torch.randperm(len(x)).split(25):
            loss = F.cross_entropy(qat.model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            qat.after_step()
            losses.append(loss.item())
        qat.after_epoch()
    return losses


def make(**options: Any) -> tuple[Qat, torch.optim.Optimizer]:
    work = common.workload()
    assert work.calibration is not None
    qat = Qat(work.model, work.calibration(), **options)
    return qat, torch.optim.SGD(qat.parameter_groups(weight_decay=1e-3), lr=0.1, momentum=0.9)


def test_a_plain_loop(tmp_path: Path) -> None:
    qat, optimizer = make()
    qat.check_optimizer(optimizer)
    common.optimizer_is_right(optimizer, qat.model)
    before = common.scales(qat.model)
    common.falls(steps(qat, optimizer, 2))
    qat.finish()
    common.trained(before, qat.model)
    common.deploys(qat, tmp_path / "model.onnx", common.samples()[0])


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"quantizer": "plain", "observer": "ema-minmax", "freeze_observers": 2}],
)
def test_resuming_from_three_states_is_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    qat, optimizer = make(**options)
    steps(qat, optimizer, 1)
    torch.save([qat.model.state_dict(), optimizer.state_dict(), qat.state_dict()], tmp_path / "state.pt")
    whole = steps(qat, optimizer, 2, first=1)
    again, other = make(**options)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    for thing, held in zip((again.model, other, again), saved, strict=True):
        thing.load_state_dict(held)
    assert steps(again, other, 2, first=1) == whole
    assert common.same(common.state(again.model), common.state(qat.model))
    assert again.epochs == 3
    assert not again.following


def test_a_state_of_another_plan_is_refused() -> None:
    saved = make(fold=1)[0].state_dict()
    with pytest.raises(BitwrightError) as error:
        make()[0].load_state_dict(saved)
    assert "resume-mismatch" in error.value.codes
    assert "fold norm" in str(error.value)


def test_an_optimizer_that_would_not_train_scales_is_refused() -> None:
    work = common.workload()
    assert work.calibration is not None
    early = torch.optim.SGD(work.model.parameters(), lr=0.1)
    qat = Qat(work.model, work.calibration())
    with pytest.raises(BitwrightError) as caught:
        qat.check_optimizer(early)
    assert "not-in-optimizer" in caught.value.codes
    with pytest.raises(BitwrightError) as caught:
        qat.check_optimizer(torch.optim.AdamW(work.model.parameters()))
    assert "scales-decay" in caught.value.codes
    # wherever the prepared model stands in a larger one
    qat.check_optimizer(torch.optim.AdamW(parameter_groups(nn.Sequential(work.model), weight_decay=0.1)))


def test_modules_that_were_replaced_afterwards_are_found() -> None:
    qat, optimizer = make()
    nn.SyncBatchNorm.convert_sync_batchnorm(qat.model)
    for check in (lambda: qat.check_optimizer(optimizer), qat.after_epoch):
        with pytest.raises(BitwrightError) as error:
            check()
        assert "modules-replaced" in error.value.codes
        assert "norm" in str(error.value)


def test_evaluation_before_training_changes_no_range() -> None:
    work = common.workload()
    assert work.calibration is not None
    work.model.eval()
    qat = Qat(work.model, work.calibration(), quantizer="plain", observer="ema-minmax")
    before = common.state(work.model)
    work.model(100 * common.samples()[0])
    qat.after_step()
    assert common.same(before, common.state(work.model))


def test_observers_and_the_example_follow_the_model_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    qat, _ = make(quantizer="plain", observer="ema-minmax")
    qat.model.to("meta")
    observer = next(q.observer for q in qat.following if q.observer is not None and not q.weight)
    kept = [value for value in vars(observer).values() if isinstance(value, torch.Tensor)]
    assert kept
    assert all(value.device.type == "meta" for value in kept)
    seen: list[Any] = []
    monkeypatch.setattr("bitwright.training.qat.settle_weights", lambda model, example: seen.append(example) or [])
    qat.settle()
    assert seen[0].device.type == "meta"


def test_frozen_norms_stay_so_in_a_copy() -> None:
    qat, _ = make(freeze_bn=0)
    twin = copy.deepcopy(qat.model).train()
    assert not twin.norm.training  # type: ignore[union-attr]
    assert twin.norm.__dict__["train"].args[0] is twin.norm
    assert twin.training
    x = common.samples()[0][:8]
    assert torch.equal(twin.eval()(x), qat.model.eval()(x))


def test_a_wrapped_forward_is_unwrapped_for_deployment(tmp_path: Path) -> None:
    qat, _ = make()
    shim, x = qat.model.forward, common.samples()[0][:8]
    quantized = qat.model.eval()(x)

    def wrapped(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return shim(*args)

    wrapped.__wrapped__ = shim  # type: ignore[attr-defined]
    qat.model.forward = wrapped  # type: ignore[method-assign]
    assert "conv:weight" in quantizers_of(qat.model)
    assert qat.model(x).dtype == torch.bfloat16
    qat.finish()
    assert torch.equal(qat.model(x), quantized)
    qat.model.forward = wrapped  # type: ignore[method-assign]
    strip(qat.model)
    assert "forward" not in qat.model.__dict__
