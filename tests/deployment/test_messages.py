"""Errors of torch and of runtimes, in words that help: the real reason, the place, and a fix that works."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import ArtefactError, ExportError, PlanError
from bitwright.deployment.onnx_files import STRUCTURE


class Branching(nn.Module):
    """Its code depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y * 2 if bool(y.sum() > 0) else y


class Failing(nn.Module):
    """It refuses to be traced, for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise KeyError("no such table")
        y: Tensor = self.a(x)
        return y


def test_a_failure_of_torch_export_is_told_with_its_own_reason_and_place(tmp_path: Path) -> None:
    batches = [torch.randn(4, 8) for _ in range(4)]
    for model, reason, advice in ((Branching(), "data-dependent", "torch.where"), (Failing(), "no such table", "")):
        quantized = bw.quantize(model.eval(), batches)
        with pytest.raises(ExportError) as raised:
            quantized.export(tmp_path / "model.onnx")
        problem = raised.value.problems[0]
        assert raised.value.codes == ["torch-export-failed"]
        assert raised.value.__cause__ is not None
        assert reason in problem.what.lower()
        assert problem.fix is not None
        assert advice in problem.fix
        assert ("data-dependent" in problem.what.lower()) is ("torch.where" in problem.fix)
        assert "--debug" not in str(raised.value)
        assert problem.where is not None
        assert problem.where.startswith("test_messages.py:")


class Waves(nn.Module):
    """There is nothing to multiply."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


@pytest.mark.parametrize("keep", [(), ("*",)])
def test_a_model_with_nothing_to_quantize_is_refused_with_the_reasons(keep: tuple[str, ...]) -> None:
    model = nn.Linear(8, 8) if keep else Waves()
    with pytest.raises(PlanError) as raised:
        bw.quantize(model, [torch.randn(4, 8)], keep_float=list(keep))
    assert set(raised.value.codes) == {"nothing-to-quantize"}
    assert "prepare" not in str(raised.value)
    model(torch.randn(4, 8))  # it is as it was


def test_a_file_that_cant_be_loaded_says_whether_to_export_again(tmp_path: Path) -> None:
    path = bw.quantize(nn.Linear(8, 8), [torch.randn(4, 8)]).export(tmp_path / "model.onnx").path
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtefactError) as raised:
        bw.open_runtime("onnxruntime", path)
    assert "export" in str(raised.value.problems[0].fix)
    path.write_bytes(whole)
    file = onnx.load(path)
    next(node for node in file.graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")).domain = "else"
    kept = [(one.key, one.value) for one in file.metadata_props if one.key != STRUCTURE]  # a whole file, for us
    onnx.helper.set_model_props(file, dict(kept))
    onnx.save(file, path)
    with pytest.raises(ArtefactError) as raised:
        bw.open_runtime("onnxruntime", path)
    assert raised.value.codes == ["artefact-not-loadable"]
    assert "export it again" not in str(raised.value.problems[0].fix)
    assert "another runtime" in str(raised.value.problems[0].fix)
