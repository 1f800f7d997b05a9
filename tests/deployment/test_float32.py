"""Models in half and double precision, and parts of them, become artefacts that runtimes load and agree with."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.deployment import export_float


class Net(nn.Module):
    """A folded norm, a residual and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.next = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        x = torch.relu(x + self.next(x))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


class Mixed(nn.Module):
    """One submodule has another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(8, 4, 1).to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).to(self.dtype))
        return y.float()


@pytest.mark.parametrize("mixed", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_are_exported_as_float32(dtype: torch.dtype, mixed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed(dtype) if mixed else Net().to(dtype)
    given = torch.float32 if mixed else dtype
    batches = [torch.randn(8, 3, 8, 8).to(given) for _ in range(4)]
    quantized = bw.quantize(model.eval(), batches, artefact=True)
    artefact = quantized.export(tmp_path / "model.onnx")
    assert [problem.code for problem in artefact.warnings] == ["exported-as-float32"]
    onnx.checker.check_model(onnx.load(artefact.path), full_check=True)
    for runtime in ("onnxruntime", "openvino"):
        check = quantized.check(artefact.path, batches, runtime=runtime)
        assert check.passed
        assert check.outputs[0].sqnr_db > 35
        assert bw.open_runtime(runtime, artefact.path).executed() == {"int8": 2 if mixed else 3, "float": 0}
    export_float(bw.strip(model), tmp_path / "float.onnx", batches[0])
    assert bw.open_runtime("onnxruntime", tmp_path / "float.onnx")(batches[0]).dtype == torch.float32


def test_a_float32_model_stays_as_it_is(tmp_path: Path) -> None:
    quantized = bw.quantize(Net().eval(), [torch.randn(8, 3, 8, 8)])
    assert not quantized.export(tmp_path / "model.onnx").warnings
