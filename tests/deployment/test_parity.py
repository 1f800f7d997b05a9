"""Models in which rounding grows: a correct artefact passes with a warning, and a wrong one fails at its site."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.display import Table
from bitwright.core.errors import ArtefactError
from bitwright.deployment.runtimes.base import OnnxReader


class Chaos(nn.Module):
    """Each layer amplifies differences and spreads them over all values."""

    def __init__(self, depth: int = 10, width: int = 64, gain: float = 8.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.sin(self.gain * norm(layer(x))).transpose(1, 2)
        return x


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, 64, generator=generator) for _ in range(2)]


@pytest.fixture(scope="module")
def quantized(batches: list[Tensor]) -> bw.Quantized:
    return bw.quantize(Chaos().eval(), batches)


@pytest.fixture(scope="module")
def exported(quantized: bw.Quantized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized.export(tmp_path_factory.mktemp("growth") / "model.onnx").path


@pytest.fixture
def file(exported: Path, tmp_path: Path) -> Path:
    """A copy without digests, so that only the computed values can reveal a change."""
    path = Path(shutil.copy(exported, tmp_path / "model.onnx"))
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    return path


def test_growth_of_rounding_is_a_warning(quantized: bw.Quantized, exported: Path, batches: list[Tensor]) -> None:
    check = quantized.check(exported, batches)
    assert not any(output.passed for output in check.outputs)  # the reason for the second run
    assert check.passed
    assert check.first_divergence is None
    assert check.failures() == []
    assert check.rounding is not None
    assert check.rounding.wrong is None
    assert check.rounding.sqnr_db > 100
    assert 0 < check.rounding.begins_share < 0.001
    assert check.rounding.largest_db < 10
    problem = next(problem for problem in check.warnings if problem.code == "rounding-grows")
    assert problem.where == check.rounding.begins
    assert str(check.rounding.largest) in problem.what
    assert check.to_dict()["rounding"]["explains"]
    table = next(part for part in check.summary() if isinstance(part, Table))
    assert [row[1] for row in table.rows] == ["rounding differs"]


def test_sites_of_grown_rounding_dont_diverge(quantized: bw.Quantized, exported: Path, batches: list[Tensor]) -> None:
    check = quantized.check(exported, batches, per_site=True)
    assert any(site.diverges for site in check.sites)
    assert check.passed
    assert check.first_divergence is None


def test_the_simulation_is_unchanged_by_a_check(quantized: bw.Quantized, exported: Path, batches: list[Tensor]) -> None:
    with torch.no_grad():
        before = quantized.model(batches[0])
        quantized.check(exported, batches)
        assert torch.equal(quantized.model(batches[0]), before)


def _change_weight(model: onnx.ModelProto) -> None:
    _set(model, "layers.4:weight.codes", lambda array: array + (np.arange(array.size).reshape(array.shape) == 70))


def _change_weight_scale(model: onnx.ModelProto) -> None:
    _set(model, "layers.4:weight.scale", lambda array: array * 1.01)


def _change_scale(model: onnx.ModelProto) -> None:
    _set(model, "/sin#3:output.scale", lambda array: array * 1.02)


def _change_operator(model: onnx.ModelProto) -> None:
    [node for node in model.graph.node if node.op_type == "Sin"][4].op_type = "Tanh"


def _change_epsilon(model: onnx.ModelProto) -> None:
    norm = [node for node in model.graph.node if node.op_type == "LayerNormalization"][4]
    next(attribute for attribute in norm.attribute if attribute.name == "epsilon").f = 0.05


def _set(model: onnx.ModelProto, name: str, change: object) -> None:
    constant = next(one for one in model.graph.initializer if one.name == name)
    array = numpy_helper.to_array(constant)
    constant.CopyFrom(numpy_helper.from_array(change(array).astype(array.dtype), name))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_change_weight, "layers.4:weight"),
        (_change_weight_scale, "layers.4:weight"),
        (_change_scale, "/sin#3:output"),
        (_change_operator, "/sin#4:output"),
        (_change_epsilon, "/sin#4:output"),
    ],
)
def test_a_wrong_artefact_fails_at_its_site(
    change: object, named: str, quantized: bw.Quantized, file: Path, batches: list[Tensor]
) -> None:
    assert quantized.check(file, batches).passed
    model = onnx.load(file)
    change(model)  # type: ignore[operator]
    onnx.save(model, file)
    check = quantized.check(file, batches)
    assert not check.passed
    assert check.first_divergence == named
    assert check.rounding is not None
    assert not check.rounding.explains
    assert "rounding-grows" not in [problem.code for problem in check.warnings]
    # the computed values alone reveal it, in the layer of the change
    assert str(check.rounding.wrong).startswith(("/sin#3", "/sin#4", "layers.4", "norms.4", "layers.5:input"))


def test_a_runtime_that_hides_its_sites_fails(
    quantized: bw.Quantized, exported: Path, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(*args: object) -> None:
        raise ArtefactError("hidden", fix="none", code="contents-not-accessible")

    monkeypatch.setattr(OnnxReader, "probing", hidden)
    check = quantized.check(exported, batches)
    assert not check.passed
    assert check.rounding is None
