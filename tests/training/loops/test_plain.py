"""A plain PyTorch loop, and what Qat refuses in any loop."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import raises_problem
from tests.training.loops import common
from torch import nn

from bitwright import BitwrightError, quantizers_of, strip
from bitwright.core.errors import RangeDiverged, TrainDiverged
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


def trained(optimizer_of: Callable[[Qat, list[nn.Parameter]], Any], count: int = 3, **options: Any) -> Qat:
    """A loop that knows nothing of `check_optimizer`; the weights of the model before Qat are the second argument."""
    work = common.workload()
    assert work.calibration is not None
    early = list(work.model.parameters())
    qat = Qat(work.model, work.calibration(), **options)
    optimizer = optimizer_of(qat, early)
    x, y = common.samples()
    for _ in range(count):
        qat.model.zero_grad()
        F.cross_entropy(qat.model(x[:25]), y[:25]).backward()
        optimizer.step()
        qat.after_step()
    return qat


def warned(qat: Qat) -> set[str | None]:
    return {problem.code for problem in qat.quantized.warnings}


def test_a_plain_loop_warns_of_an_optimizer_without_scales() -> None:
    qat = trained(lambda _, early: torch.optim.SGD(early, lr=0.1))
    assert warned(qat) == {"not-in-optimizer"}
    qat.finish()
    assert warned(qat) == {"not-in-optimizer"}  # one fault, one warning


def test_a_plain_loop_warns_of_weight_decay_on_scales() -> None:
    assert warned(trained(lambda qat, _: torch.optim.AdamW(qat.model.parameters()))) == {"scales-decay"}


def test_a_plain_loop_with_parameter_groups_has_no_warning() -> None:
    qat = trained(lambda qat, _: torch.optim.AdamW(qat.parameter_groups(weight_decay=0.1), lr=1e-3))
    qat.finish()
    assert warned(qat) == set()


class Manual:
    """An optimizer that isn't torch's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad


def test_scales_that_an_unknown_optimizer_leaves_out_are_found_at_the_end() -> None:
    qat = trained(lambda _, early: Manual(early))
    assert warned(qat) == set()
    assert {p.code for p in qat.finish().warnings} == {"scales-unchanged"}
    complete = trained(lambda qat, _: Manual(list(qat.model.parameters())))
    assert warned(complete) | {p.code for p in complete.finish().warnings} == set()


def test_the_hook_on_optimizers_is_removed() -> None:
    from torch.optim import optimizer as hooks

    gc.collect()  # other tests leave models in cycles
    before = len(hooks._global_optimizer_post_hooks)
    qat = trained(lambda qat, _: torch.optim.SGD(qat.parameter_groups(weight_decay=0.1), lr=0.1), 1)
    assert len(hooks._global_optimizer_post_hooks) == before
    other = make()[0]
    assert len(hooks._global_optimizer_post_hooks) == before + 1
    del qat, other
    gc.collect()
    assert len(hooks._global_optimizer_post_hooks) == before


@pytest.mark.parametrize("options", [{}, {"quantizer": "plain", "observer": "ema-minmax"}])
def test_nan_weights_end_a_plain_loop(options: dict[str, Any]) -> None:
    """A learning rate that is much too high; without the error, only `export` would find the NaN."""
    with pytest.raises((TrainDiverged, RangeDiverged)) as error:
        trained(lambda qat, _: torch.optim.SGD(qat.model.parameters(), lr=1e30), 6, **options).finish()
    assert set(error.value.codes) <= {"training-diverged", "not-finite"}
    assert error.value.problems[0].where
    assert "step" in str(error.value)


def test_nan_in_weights_alone_is_found_at_the_end_of_an_epoch() -> None:
    qat = trained(lambda qat, _: torch.optim.SGD(qat.parameter_groups(weight_decay=0.1), lr=0.1), 1)
    with torch.no_grad():
        next(p for name, p in qat.model.named_parameters() if name.endswith("norm.weight")).fill_(torch.nan)
    with raises_problem("training-diverged", where="norm.weight", mentions="step 1"):
        qat.after_epoch()


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
