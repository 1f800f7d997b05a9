"""Dynamic activations on real runtimes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import bitwright


class Encoder(nn.Module):
    """Attention with shared inputs, a linear without bias, and a two-dimensional head (Gemm)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + torch.softmax(self.q(h) @ self.k(h).transpose(-1, -2) / 6, -1) @ self.v(h)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        result: torch.Tensor = self.head(x.mean(1))
        return result


@pytest.fixture
def batches() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 7, 32) for _ in range(3)]


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize(
    ("format", "integers"),
    [
        ("uint8/tensor/asym/dynamic", 6),
        ("int8/tensor/sym/dynamic", 6),
        ("int8/token/sym/dynamic", 6),
        ("uint8/token/asym/dynamic", 6),
        ("int8/token/asym/dynamic", 6),
    ],
)
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_runtimes_agree_with_the_simulation(
    format: str, integers: int, runtime: str, batches: list[torch.Tensor], tmp_path: Path
) -> None:
    pytest.importorskip(runtime)
    quantized = bitwright.quantize(Encoder().eval(), batches, backend=runtime, activations=format)
    path = tmp_path / "model.onnx"
    quantized.export(path)
    check = quantized.check(path, batches[:2], per_site=runtime == "onnxruntime")
    assert check.passed, check.to_dict()
    found = operators(path)
    assert found["MatMulInteger"] == integers
    assert found["MatMul"] + found["Gemm"] == 2 + 6 - integers  # the attention products stay in float
    assert quantized.check(path, [torch.randn(5, 7, 32)]).passed  # another batch


@pytest.mark.parametrize(
    ("format", "operator"),
    [
        ("uint8/tensor/asym/dynamic", "DynamicQuantizeLinear"),
        ("int8/tensor/sym/dynamic", "QuantizeLinear"),
        ("int8/token/sym/dynamic", "QuantizeLinear"),
    ],
)
def test_onnxruntime_fuses_products(format: str, operator: str, batches: list[torch.Tensor], tmp_path: Path) -> None:
    quantized = bitwright.quantize(Encoder().eval(), batches, activations=format)
    path = tmp_path / "model.onnx"
    quantized.export(path)
    assert operators(path)[operator] == 4  # q, k and v read one tensor
    # ONNX Runtime has no fast kernel for signed activations on x86.
    codes = {node.input[0] for node in onnx.load(path).graph.node if node.op_type == "MatMulInteger"}
    made = [node for node in onnx.load(path).graph.node if node.output[0] in codes]
    assert {node.op_type for node in made} == {operator}
    assert not [node.op_type for node in onnx.load(path).graph.node if node.op_type == "Clip"]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    fused = operators(tmp_path / "optimized.onnx")
    assert fused["DynamicQuantizeMatMul"] + fused["MatMulIntegerToFloat"] == 6


def test_low_bit_weights_keep_their_codes(batches: list[torch.Tensor], tmp_path: Path) -> None:
    quantized = bitwright.quantize(Encoder().eval(), batches, precision="w4a8-dynamic")
    path = tmp_path / "model.onnx"
    artefact = quantized.export(path)
    assert (artefact.weights, artefact.dynamic_activations) == (6, 4)
    assert quantized.check(path, batches[:1]).passed


def test_weight_only_plans_have_no_false_warnings(batches: list[torch.Tensor]) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Encoder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) @ torch.ones(10, 10)
            return result

    quantized = bitwright.quantize(Nested().eval(), batches, precision="w8a16")
    quantized.model(batches[0])
    assert "unseen-operator" not in [problem.code for problem in quantized.warnings]
    assert all(spec.format.bits == 8 for _, spec in quantized.plan.quantized)
