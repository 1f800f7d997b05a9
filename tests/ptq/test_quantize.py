"""quantize(): the whole road in one call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import PlanError
from bitwright.deployment import measure_distance


class Fork(nn.Module):
    """Takes the other path for negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if x.sum() > 0 else self.down(x)


def test_paths_that_only_later_batches_take_are_quantized() -> None:
    model = Fork().eval()
    bw.quantize(model, [torch.ones(2, 4), -torch.ones(2, 4)])
    assert {"up:weight", "down:weight"} <= set(bw.quantizers_of(model))


def test_a_quantized_model_is_shown_in_one_line() -> None:
    """A notebook showed the graph, the plan and all numbers of the example."""
    quantized = bw.quantize(nn.Sequential(nn.Linear(4, 4)).eval(), [torch.ones(2, 4)])
    assert repr(quantized) == "<Quantized Sequential for onnxruntime: 3 quantized sites>"


class Shared(nn.Module):
    """One ReLU, called twice; only the first result goes to a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.first, self.second = nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.first(x))))


def test_a_float_call_is_listed_in_the_plan() -> None:
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(8, 4)
    plan = bw.quantize(model, [x]).plan
    assert plan.sites["relu:output"].quantizes
    assert not plan.sites["relu#1:output"].quantizes
    expected = model(x)
    state = model.state_dict()
    bw.strip(model)
    bw.prepare(model, plan)  # without a graph: the plan must say it all
    model.load_state_dict(state)
    assert torch.equal(model(x), expected)


def test_a_failure_leaves_the_model_float() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    before = set(model.state_dict())
    with raises_problem("calibration-failed", where="calibration batch 5"):
        bw.quantize(model, [*[torch.ones(1, 4)] * 5, torch.ones(1, 3)])
    with raises_problem("not-finite", where="0:input"):
        bw.quantize(model, [torch.ones(1, 4), torch.full((1, 4), torch.nan)])
    assert set(model.state_dict()) == before
    bw.quantize(model, [torch.ones(1, 4)])


def test_no_batches() -> None:
    with raises_problem("no-batches"):
        bw.quantize(nn.Linear(2, 2), [])


def test_a_plan_must_fit_the_backend() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    plan = bw.Plan.from_yaml("bitwright: 1\nsites:\n  0:input: uint8/channel/asym\n  0:weight: int8/channel/asym\n")
    with pytest.raises(PlanError) as error:
        bw.quantize(model, [torch.ones(1, 4)], plan=plan)
    assert {problem.where for problem in error.value.problems} == {"0:input", "0:weight"}


def test_levels_that_no_artefact_has_can_be_simulated() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(8, 4)
    choices = {"quantizer": "nnie", "activations": "int8/tensor/sym"}
    with raises_problem("unsupported-levels", where="0:input, 0:weight", mentions="nnie"):
        bw.quantize(model, [x], artefact=True, **choices)
    assert "forward" not in model.__dict__, "the model must be float again"
    quantized = bw.quantize(model, [x], **choices)
    assert not torch.equal(model(x), bw.strip(quantized.model)(x))


class Switching(nn.Module):
    """Takes one of three paths, by the first number of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.paths[int(x[0, 0])](x)


def at(path: int) -> Tensor:
    x = torch.rand(4, 3)
    x[0, 0] = path
    return x


def test_recording_continues_while_there_are_new_paths() -> None:
    made = bw.quantize(Switching(), iter([at(0), at(1), at(2), at(2), at(0)]), backend="academic")
    assert {site.partition(":")[0] for site, _ in made.plan.quantized} == {"paths.0", "paths.1", "paths.2"}


def test_one_path_is_recorded_twice_and_every_batch_is_calibrated_with(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    forward = Switching.forward

    def counted(self: Switching, x: Tensor) -> Tensor:
        rows.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(Switching, "forward", counted)
    seen: list[int] = []
    bw.quantize(
        Switching(),
        (at(1) for _ in range(5)),
        backend="academic",
        progress=lambda done, total, description: seen.append(done),
        measure=False,
    )
    assert rows.count(4) == 2 + 5  # others have a few samples, to find out what whole batches are needed for
    assert seen[-1] == 5


def test_fixed_paths_are_recorded_from_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    forward = nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        if not x.is_meta:  # shapes alone are cheap
            rows.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    bw.quantize(nn.Sequential(nn.Linear(3, 3)), [torch.rand(64, 3)] * 2, backend="academic")
    assert rows[:2] == [2, 1]
    assert rows.count(64) == 2


class Unrolled(nn.Module):
    """One operator for each row of its input: how many there are shows only in a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(row) for layer, row in zip(self.layers, x, strict=False)])


def test_paths_that_depend_on_the_batch_size_are_recorded_with_whole_batches() -> None:
    made = bw.quantize(Unrolled(), [torch.rand(4, 3)] * 2, backend="academic")
    assert {site.partition(":")[0] for site, _ in made.plan.quantized} >= {f"layers.{n}" for n in range(4)}


def test_a_name_is_kept_with_a_plan() -> None:
    model, data = nn.Sequential(nn.Linear(4, 2)), torch.randn(8, 4)
    plan = bw.make_plan(bw.capture(model, data))
    assert bw.quantize(model, [data], plan=plan, name="mine").plan.model == "mine"
    assert plan.model is None


def test_a_plan_may_be_a_path(tmp_path: Path) -> None:
    model, data = nn.Sequential(nn.Linear(4, 2)), torch.randn(8, 4)
    plan = bw.make_plan(bw.capture(model, data))
    assert bw.quantize(model, [data], plan=plan.save(tmp_path / "plan.yaml")).plan == plan


def test_an_empty_batch_is_called_so() -> None:
    with raises_problem("empty-batch", mentions="(0, 4)"):
        bw.quantize(nn.Sequential(nn.Linear(4, 2)), [torch.randn(0, 4)])


def test_a_wrong_shape_is_one_error_in_capture_too() -> None:
    with raises_problem("model-failed", mentions="(2, 3)"):
        bw.capture(nn.Sequential(nn.Linear(4, 2)), torch.randn(2, 3))


def test_a_precision_that_the_target_lacks_names_others() -> None:
    with raises_problem("unsupported-precision", where="precision", mentions="w4a8") as error:
        bw.quantize(nn.Sequential(nn.Linear(4, 2)), [torch.randn(8, 4)], "int9")
    assert "*" not in str(error.value)


def test_an_unknown_site_has_no_second_problem() -> None:
    plan = bw.Plan.from_yaml("{bitwright: 1, sites: {'1:weight': int4/channel/sym}}")
    with raises_problem("unknown-site", where="1:weight") as error:
        bw.quantize(nn.Sequential(nn.Linear(4, 2)), [torch.randn(8, 4)], plan=plan, backend="tensorrt")
    assert error.value.codes == ["unknown-site"]


def test_check_uses_calibration_samples_or_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = torch.randn(16, 4)
    quantized = bw.quantize(nn.Sequential(nn.Linear(4, 2)), [data], example=data[:1])
    path = quantized.export(tmp_path / "model.onnx").path
    assert quantized.check(path).samples == 16
    caplog.clear()
    loaded = bw.load(quantized.save(tmp_path / "out"), model=nn.Sequential(nn.Linear(4, 2)), inputs=(data[:1],))
    assert loaded.check(path).samples == 1
    assert [record.levelname for record in caplog.records if record.name == "bitwright"] == ["WARNING"]  # one sample


def test_learned_scales_far_from_float_are_not_blamed_on_data() -> None:
    data = torch.randn(16, 4)
    qat = bw.Qat(nn.Sequential(nn.Linear(4, 2)), [data])
    with torch.no_grad():
        for quantizer in bw.quantizers_of(qat.model).values():
            for parameter in quantizer.parameters():
                parameter.mul_(100.0)
    distance = measure_distance(qat.model, data)
    [warning] = [problem for problem in distance.warnings if problem.code == "far-from-float"]
    assert "quantizer_lr" in str(warning.fix)
    assert "calibration" not in str(warning.fix)
