"""`benchmark`: measurements on all runtimes, the fastest one, and skipped runtimes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import BitwrightError
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import Runtime
from bitwright.deployment.runtimes.onnxruntime import OnnxRuntime
from bitwright.reports import Comparison

BOTH = ["onnxruntime", "openvino"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture
def workload() -> bw.Workload:
    torch.manual_seed(0)
    model, images = Net().eval(), torch.randn(32, 2, 6, 6)
    with torch.no_grad():
        target = model(images).argmax(1)
    return bw.Workload(
        name="tiny",
        model=model,
        inputs=(images[:2],),
        calibration=lambda: images.split(8),
        evaluation=lambda: zip(images.split(16), target.split(16), strict=True),
    )


def test_each_runtime_is_measured_with_its_float_model(workload: bw.Workload) -> None:
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    phases: list[str] = []
    result = bw.benchmark(
        workload, BOTH, batch_sizes=(1, 4), runs=5, progress=lambda done, total, description: phases.append(description)
    )
    assert [row.runtime for row in result.runtimes] == BOTH
    for row in result.runtimes:
        assert row.backend == row.runtime
        assert row.parity.passed
        assert row.executed == {"int8": 2, "float": 0}
        assert {a.where: a.value for a in row.accuracies}["float"] == 100.0
        assert all(t.median_ms <= t.p90_ms <= (t.p99_ms or 0) for t in row.timings)
        assert [(t.batch, t.variant, t.runs, t.threads) for t in row.timings] == [
            (batch, variant, 5, 1) for batch in (1, 4) for variant in ("float", "quantized")
        ]
    medians = {(t.batch, t.runtime, t.variant): t.median_ms for row in result.runtimes for t in row.timings}
    for pick in result.fastest:
        assert pick.median_ms == min(ms for (batch, _, _), ms in medians.items() if batch == pick.batch)
        assert medians[pick.batch, pick.runtime, pick.variant] == pick.median_ms
    assert Comparison.model_validate_json(result.model_dump_json()) == result
    assert "timing batch 4: 5 of 5" in phases
    after = workload.model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(before[key], after[key]) for key in before)


NAMING = [*BOTH, pytest.param("ncnn", marks=pytest.mark.skipif(find_spec("ncnn") is None, reason="no ncnn"))]


@pytest.mark.parametrize("runtime", NAMING)
def test_operators_that_a_runtime_leaves_in_float_are_named(
    workload: bw.Workload, runtime: str, tmp_path: Path
) -> None:
    kind: type[Runtime] = RUNTIMES.get(runtime)
    quantized = bw.quantize(workload.model, workload.calibration(), backend=runtime, keep_float=["head"])
    path = tmp_path / f"model{kind.suffix}"
    kind.write(quantized.model, path, workload.inputs)
    opened = bw.open_runtime(runtime, path)
    assert opened.executed() == {"int8": 1, "float": 1}
    assert opened.left_in_float() == ("head",)
    kind.write_float(Net().eval(), path, workload.inputs)
    assert set(bw.open_runtime(runtime, path).left_in_float() or ()) == {"conv", "head"}


def test_unknown_execution_types_are_reported_as_unknown(workload: bw.Workload) -> None:
    row = bw.benchmark(workload, ["onnxruntime"], runs=1).runtimes[0]

    def said(executed: dict[str, int] | None, names: tuple[str, ...] | None) -> str:
        return row.model_copy(update={"executed": executed, "left_in_float": names}).executed_text

    assert said(None, None) == "onnxruntime doesn't report it"
    assert said({"int8": 2, "float": 0}, None) == "2 int8"
    assert said({"int8": 2, "float": 1}, None) == "2 int8, 1 float (onnxruntime doesn't name them)"
    assert said({"int8": 2, "float": 1}, ("head",)) == "2 int8, 1 float (head)"
    assert said({"int8": 0, "float": 8}, tuple("abcdefgh")) == "8 float (a, b, c, d, e, f and 2 more)"


class Absent(OnnxRuntime):
    name = "absent"

    @staticmethod
    def missing() -> str | None:
        return "the package absent is not installed"


class Wrong(OnnxRuntime):
    """Fast and wrong."""

    name = "wrong"

    def run(self, feed):
        return [array * 3 - 1 for array in super().run(feed)]


@pytest.fixture
def others() -> Iterator[None]:
    kinds = {"absent": Absent, "wrong": Wrong}
    for name, kind in kinds.items():
        RUNTIMES.register(name, kind)
    yield
    for name in kinds:
        RUNTIMES.unregister(name)


@pytest.mark.usefixtures("others")
def test_missing_runtimes_are_skipped_and_wrong_ones_are_not_chosen(workload: bw.Workload) -> None:
    result = bw.benchmark(workload, ["absent", "wrong"], runs=2, evaluate=False)
    assert [(skip.runtime, skip.why) for skip in result.skipped] == [("absent", "the package absent is not installed")]
    assert [row.parity.passed for row in result.runtimes] == [False]
    assert [pick.variant for pick in result.fastest] == ["float"]
    assert result.runtimes[0].accuracies == ()


def test_unknown_runtimes_are_an_error(workload: bw.Workload) -> None:
    with pytest.raises(BitwrightError) as caught:
        bw.benchmark(workload, ["onnxruntim"])
    assert caught.value.codes == ["unknown-name"]


def test_accuracies_have_all_metrics_with_the_main_metric_first(workload: bw.Workload) -> None:
    several = replace(workload, evaluate=lambda predict: {"loss": 0.5, "f1": 80.0, "n": 3.0}, metric="f1")
    result = bw.benchmark(several, ["onnxruntime"], time=False)
    (row,) = result.runtimes
    assert [(one.where, one.metric, one.value, one.samples) for one in row.accuracies] == [
        (variant, metric, value, 3)
        for variant in ("float", "quantized")
        for metric, value in (("f1", 80.0), ("loss", 0.5))
    ]
    assert (row.timings, result.fastest, result.together) == ((), (), ())
    with pytest.raises(BitwrightError) as caught:
        bw.benchmark(workload, time=False, evaluate=False)
    assert caught.value.codes == ["nothing-to-measure"]
    with pytest.raises(BitwrightError) as caught:
        bw.benchmark(replace(workload, evaluation=None), time=False)
    assert caught.value.codes == ["no-evaluation"]


def test_a_saved_model_is_measured_unchanged(workload: bw.Workload, tmp_path: Path) -> None:
    """Its own file, its own ranges; beside the float model, whose weights the checkpoint doesn't have to have."""
    other = copy.deepcopy(workload.model)
    with torch.no_grad():
        for weights in other.head.parameters():
            weights.neg_()  # as if it had been trained on
    quantized = bw.quantize(other, workload.calibration(), example=workload.inputs)
    quantized.plan.save(tmp_path / "plan.yaml")
    bw.save_checkpoint(other, tmp_path / "checkpoint.safetensors")
    artefact = quantized.export(tmp_path / "model.onnx").path
    before = {key: value.clone() for key, value in workload.model.state_dict().items()}
    result = bw.benchmark(workload, saved=tmp_path, time=False)
    (row,) = result.runtimes  # the one that the plan is for
    assert (row.runtime, row.parity.passed) == ("onnxruntime", True)
    scores = {one.where: one.value for one in row.accuracies}
    assert scores["float"] == 100.0 > scores["quantized"]
    assert {size.name: size.bytes for size in row.sizes}["quantized"] == artefact.stat().st_size
    after = workload.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)

    bw.quantize(workload.model, workload.calibration(), example=workload.inputs).export(artefact)
    bw.strip(workload.model)
    (row,) = bw.benchmark(workload, saved=tmp_path, time=False).runtimes
    assert not row.parity.passed  # the file isn't that of the checkpoint any more
    (tmp_path / "plan.yaml").unlink()
    with raises_problem("no-saved-model", mentions="plan.yaml"):
        bw.benchmark(workload, saved=tmp_path)
