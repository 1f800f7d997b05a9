"""A quantized model that is far from float is told as such, and so is data that ranges don't fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import ArtefactError
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import Runtime, measure_distance


def net(classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes)
    ).eval()


def data(factor: float = 1.0, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(32, 16, generator=generator) * factor for _ in range(4)]


def codes(problems: tuple[bw.Problem, ...]) -> list[str | None]:
    return [problem.code for problem in problems]


def test_an_ordinary_model_is_close_and_has_no_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="bitwright"):
        quantized = bw.quantize(net(), data())
        check = quantized.check(quantized.export(tmp_path / "model.onnx").path, data(seed=2))
    assert quantized.warnings == check.warnings == ()
    assert quantized.distance is not None
    assert check.distance is not None
    assert check.distance.samples == 128
    for distance in (quantized.distance, check.distance):
        assert distance.sqnr_db > 25
        assert not distance.far
        assert distance.top1_agreement is not None
        assert distance.top1_agreement > 0.9
        assert not distance.warnings
    assert not [line for line in caplog.records if line.name == "bitwright"]


def test_a_model_that_lost_its_accuracy_is_told_with_its_worst_sites(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[0, 0] = 300.0  # per tensor, all other weights of it become 0
        model[4].weight[:, 0] = 0.0  # and nobody needs the large one
    with caplog.at_level(logging.WARNING, logger="bitwright"):
        quantized = bw.quantize(model, data(), weights="int4/tensor/sym")
    assert codes(quantized.warnings) == ["far-from-float"]
    warning = quantized.warnings[0]
    assert warning.where is not None
    assert "2:weight" in warning.where
    assert warning.fix is not None
    assert "int8/channel/sym" in warning.fix
    assert "keep_float" in warning.fix
    assert "far from the float model" in caplog.text
    check = quantized.check(quantized.export(tmp_path / "model.onnx").path, data(seed=2))
    assert check.passed  # the runtime computes what the simulation computes: another question
    assert check.distance is not None
    assert check.distance.far
    assert codes(check.warnings) == ["far-from-float"]


@pytest.mark.parametrize(
    ("batches", "code"),
    [
        ([torch.zeros(8, 16)] * 4, "constant-calibration"),
        ([torch.full((8, 16), 0.5)] * 4, "constant-calibration"),
        ([torch.randn(1, 16).expand(8, 16).clone()] * 2, "constant-calibration"),
        ([torch.randn(8, 16), torch.zeros(0, 16)], "empty-calibration"),
    ],
    ids=["zeros", "one number", "one sample", "empty"],
)
def test_calibration_data_without_variety(batches: list[Tensor], code: str) -> None:
    quantized = bw.quantize(net(), batches)
    assert code in codes(quantized.warnings)


def test_one_sample_and_constant_masks_are_no_reason_to_warn() -> None:
    assert not bw.quantize(net(), [torch.randn(1, 16)]).warnings

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.a(x) * mask

    assert not bw.quantize(Masked().eval(), [(x, torch.ones(32, 1)) for x in data()]).warnings


@pytest.mark.parametrize(
    ("calibration", "code"), [(0.01, "ranges-clip"), (255.0, "ranges-too-wide"), (0.0, "ranges-clip")]
)
def test_calibration_data_unlike_the_evaluation_data(calibration: float, code: str, tmp_path: Path) -> None:
    quantized = bw.quantize(net(), data(calibration))
    check = quantized.check(quantized.export(tmp_path / "model.onnx").path, data(seed=2))
    assert check.passed
    assert code in codes(check.warnings)
    assert "0:input" in str(next(w.where for w in check.warnings if w.code == code))


def test_measuring_changes_nothing() -> None:
    batches = data()
    torch.manual_seed(3)
    one = bw.quantize(net(), batches, measure=False)
    after = torch.rand(1)
    torch.manual_seed(3)
    two = bw.quantize(net(), batches)
    assert torch.equal(after, torch.rand(1))
    assert one.distance is None
    states = zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


def test_nan_of_the_quantized_model_is_as_far_as_can_be() -> None:
    class Ratio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y / y  # small numbers become 0 when they are quantized

    model = Ratio().eval()
    with torch.no_grad():
        model.a.weight[0] *= 1e-6
        model.a.bias.zero_()
    quantized = bw.quantize(model, [torch.randn(8, 4)], measure=False, backend="academic")
    distance = measure_distance(quantized.model, torch.zeros(8, 4) + 1e-9)
    assert distance.sqnr_db == -float("inf")
    assert distance.far


# -- the runtime of the backend ---------------------------------------------------------------------------------------


def test_a_model_is_checked_on_the_runtime_of_its_backend(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    quantized = bw.quantize(net(), data(), backend="openvino")
    artefact = quantized.export(tmp_path / "model.onnx").path
    assert quantized.check(artefact).runtime == "openvino"
    assert bw.check(quantized.model, artefact, data()).runtime == "openvino"
    assert quantized.check(artefact, runtime="onnxruntime").runtime == "onnxruntime"


def test_another_runtime_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    quantized = bw.quantize(net(), data(), backend="openvino")
    artefact = quantized.export(tmp_path / "model.onnx").path
    kind: type[Runtime] = RUNTIMES.get("openvino")
    monkeypatch.setattr(kind, "missing", staticmethod(lambda: "not installed"))
    check = quantized.check(artefact)
    assert check.runtime == "onnxruntime"
    assert codes(check.warnings) == ["other-runtime"]


# -- infinities and NaN -----------------------------------------------------------------------------------------------


class Masking(nn.Module):
    """Its output has infinities, as scores of masked tokens have."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a = nn.Linear(16, 8)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(8) % 3 == 0
        return self.a(x).masked_fill(mask, self.value)


@pytest.mark.parametrize("value", [-np.inf, np.inf])
def test_infinities_that_both_have_agree(value: float, tmp_path: Path) -> None:
    quantized = bw.quantize(Masking(value).eval(), data())
    check = quantized.check(quantized.export(tmp_path / "model.onnx").path, data(seed=2))
    assert check.passed
    assert check.outputs[0].sqnr_db > 25
    assert check.distance is not None
    assert 20 < check.distance.sqnr_db < 100


def test_infinities_that_only_one_has_diverge(tmp_path: Path) -> None:
    quantized = bw.quantize(Masking(-np.inf).eval(), data())
    artefact = bw.quantize(Masking(-3e38).eval(), data()).export(tmp_path / "model.onnx")
    check = quantized.check(artefact.path, data(seed=2))
    assert not check.passed


def test_nan_is_an_error_that_says_where(tmp_path: Path) -> None:
    quantized = bw.quantize(Masking(np.nan).eval(), data())
    artefact = quantized.export(tmp_path / "model.onnx")
    with pytest.raises(ArtefactError) as raised:
        quantized.check(artefact.path, data(seed=2))
    assert raised.value.codes == ["nan-output"]
    assert raised.value.problems[0].where == "output"


def test_distance_text() -> None:
    distance = bw.quantize(net(), data()).distance
    assert distance is not None
    assert "dB SQNR" in str(replace(distance, samples=1))


def test_data_to_check_with_must_have_samples(tmp_path: Path) -> None:
    quantized = bw.quantize(net(), data())
    path = quantized.export(tmp_path / "model.onnx").path
    with pytest.raises(bw.BitwrightError) as caught:
        quantized.check(path, [data()[0][:0]])
    assert caught.value.problems[0].code == "no-data"
    result = quantized.check(path, [data()[0][:0], data()[0]])
    assert result.samples == len(data()[0])
    assert codes(result.warnings) == ["empty-check"]
    assert "constant-check" in codes(quantized.check(path, [torch.zeros_like(data()[0])]).warnings)


def test_a_batch_with_targets_is_told_as_such(tmp_path: Path) -> None:
    quantized = bw.quantize(net(), data())
    path = quantized.export(tmp_path / "model.onnx").path
    x = data()[0]
    with raises_problem("model-failed", mentions="targets"):
        quantized.check(path, [(x, torch.zeros(len(x)))])


def test_calibrate_warns_of_constant_data(caplog: pytest.LogCaptureFixture) -> None:
    quantized = bw.quantize(net(), data())
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        bw.calibrate(quantized.model, [torch.zeros_like(data()[0])])
    assert "all values of the calibration data are the same" in caplog.text


def test_a_float_model_that_overflows_is_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.mul_(1e15)
        model[2].weight.mul_(1e18)
        model[2].weight.abs_()  # infinities of one sign: no NaN
    batch = torch.rand(8, 8) * 1e18
    assert not model(batch).isfinite().any()
    assert "non-finite-output" in codes(bw.quantize(model, [batch]).warnings)
