"""calibrate(): every range from real data, or a clear message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

from bitwright.backends import make_plan
from bitwright.core.errors import CalibrationError, PlanError
from bitwright.core.formats import Format
from bitwright.graph import capture
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare, quantizers_of, set_mode


class Branches(nn.Module):
    """Takes one of two ways, and has a norm whose mode matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mirror: bool = False, bias: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        x = self.right(x) if mirror else self.left(x)
        return x if bias is None else x + bias


def prepared(*sites: str, format: str = "int8/tensor/sym", **options: Any) -> Branches:
    spec = SiteSpec(format=Format.parse(format), **options)
    return prepare(Branches(), Plan(sites=dict.fromkeys(sites, spec)))


def test_empty_loader() -> None:
    with pytest.raises(CalibrationError) as caught:
        calibrate(prepared("left:input"), [])
    assert "no-calibration-data" in caught.value.codes


def test_unprepared_model() -> None:
    with raises_problem("not-prepared"):
        calibrate(Branches(), [torch.ones(2, 4)])


def test_all_sites_that_were_never_reached_are_listed() -> None:
    model = prepared("left:input", "right:input", "right:weight")
    with pytest.raises(PlanError) as caught:
        calibrate(model, [torch.randn(3, 4)])
    assert [problem.where for problem in caught.value.problems] == ["right:input", "right:weight"]
    assert calibrate(model, [torch.randn(3, 4), {"x": torch.randn(3, 4), "mirror": True}]) == 2
    assert all(q.calibrated for q in quantizers_of(model).values())


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}])
def test_batches_as_tensor_tuple_list_or_dict(wrap: Any) -> None:
    model = prepared("left:input")
    model.norm.eps = 0.0
    assert calibrate(model, [wrap(torch.full((2, 4), 127.0))]) == 1
    assert quantizers_of(model)["left:input"].scale == 1.0


def test_extra_arguments_reach_the_model() -> None:
    model = prepared("/add#0:input1")
    calibrate(model, [{"x": torch.ones(2, 4), "bias": torch.full((4,), -12.8)}])
    assert torch.isclose(quantizers_of(model)["/add#0:input1"].scale, torch.tensor(0.1))


def test_batches_stream() -> None:
    alive = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    most = 0

    def stream() -> Iterator[Tensor]:
        nonlocal alive, most
        for _ in range(8):
            alive += 1
            most = max(most, alive)
            yield torch.randn(2, 4).as_subclass(Counted)

    for observer in ("minmax", "percentile"):
        calibrate(prepared("left:output", observer=observer), stream())
    assert most <= 4


@pytest.mark.parametrize("fails", [False, True])
def test_mode_and_statistics_are_as_before(fails: bool) -> None:
    model = prepared("left:input")
    model.train()
    model.left.eval()
    modes = [module.training for module in model.modules()]
    mean = model.norm.running_mean.clone()
    batches = [torch.randn(5, 4), torch.randn(5, 3 if fails else 4)]
    if fails:
        with raises_problem("calibration-failed", where="calibration batch 1"):
            calibrate(model, batches)
    else:
        calibrate(model, batches)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.norm.running_mean, mean)
    assert all(q.enabled and not q.observing for q in quantizers_of(model).values())


def test_switched_off_model_stays_off() -> None:
    model = prepared("left:weight", format="int2/tensor/sym").eval()
    x = torch.randn(5, 4)
    set_mode(model, "float")
    expected = model(x)
    calibrate(model, [x])
    assert torch.equal(model(x), expected)
    set_mode(model, "quantize")
    assert not torch.equal(model(x), expected)


def test_progress_is_reported_for_each_batch() -> None:
    steps: list[int] = []
    calibrate(
        prepared("left:input"), [torch.ones(2, 4)] * 3, progress=lambda done, total, description: steps.append(done)
    )
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
@pytest.mark.parametrize("observer", ["minmax", "ema-minmax", "percentile", "mse", "kl"])
def test_nonfinite_inputs_name_the_site(value: float, name: str, observer: str) -> None:
    model = prepared("left:output", "left:input", observer=observer)
    bad = torch.zeros(2, 4)
    bad[1, 2] = value
    with raises_problem("not-finite", where="left:input", mentions=name):
        calibrate(model, [torch.zeros(2, 4), bad])


def test_nonfinite_weights_name_the_site() -> None:
    model = prepared("left:weight")
    with torch.no_grad():
        model.left.weight[0, 0] = float("nan")
    with raises_problem("not-finite", where="left:weight"):
        calibrate(model, [torch.zeros(2, 4)])


def test_all_unusable_ranges_are_listed() -> None:
    model = prepared("left:weight", "left:output", "right:weight", format="uint8/tensor/sym")
    with pytest.raises(PlanError) as caught:
        calibrate(model, [torch.randn(6, 4)])
    assert [problem.where for problem in caught.value.problems] == [
        "left:weight",
        "left:output",
        "right:weight",
    ]


def test_an_empty_batch_does_not_change_ranges() -> None:
    model = prepared("left:input", "left:weight")
    calibrate(model, [torch.zeros(0, 4), torch.ones(2, 4), torch.zeros(0, 4)])
    assert model(torch.zeros(0, 4)).shape == (0, 4)
    with raises_problem("uncalibrated", where="left:input"):
        calibrate(model, [torch.zeros(0, 4)])


def test_recalibration_discards_earlier_ranges() -> None:
    model = prepared("left:input").eval()
    calibrate(model, [torch.full((2, 4), 100.0)])
    wide = quantizers_of(model)["left:input"].scale.clone()
    calibrate(model, [torch.full((2, 4), 1.0)])
    assert torch.isclose(quantizers_of(model)["left:input"].scale * 100, wide)


def test_data_is_not_run_for_weights_alone() -> None:
    class Counted(nn.Sequential):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.rows += len(x)
            result: Tensor = super().forward(x)
            return result

    batches = [torch.randn(6, 8) for _ in range(5)]
    ran = {}
    for activations in ("float", "int8/token/dynamic", "int8"):
        model = Counted(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        plan = make_plan(capture(model, batches[0]), activations=activations, saturating=False)
        prepare(model, plan)
        Counted.rows = 0
        assert calibrate(model, batches) == 5
        ran[activations] = Counted.rows
        model(batches[0])
    assert ran["float"] == ran["int8/token/dynamic"] == 1
    assert ran["int8"] >= 30
