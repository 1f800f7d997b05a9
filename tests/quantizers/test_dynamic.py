"""Formats with scales that are computed at run time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import nn

import bitwright
from bitwright import PlanError, SiteSpec
from bitwright.core.errors import FormatError
from bitwright.core.formats import Format
from bitwright.quantizers.dynamic import Dynamic
from bitwright.quantizers.grid import Layout


def quantizer(format: str) -> Dynamic:
    parsed = Format.parse(format)
    spec = SiteSpec(format=parsed, quantizer="dynamic")
    layout = Layout(parsed.granularity, -1)
    return Dynamic(spec, site="fc:input", kind="linear", port="input", layout=layout, weight=False)


def reference(x: NDArray[np.float32], format: Format) -> NDArray[np.float32]:
    """Round each row (or the whole tensor) to its own grid, in NumPy."""
    rows = x.reshape(-1, x.shape[-1]) if format.granularity == "token" else x.reshape(1, -1)
    low, high = np.minimum(rows.min(1, keepdims=True), 0), np.maximum(rows.max(1, keepdims=True), 0)
    tiny = np.finfo(np.float32).tiny
    if format.symmetric:
        scale = np.maximum(np.maximum(high / np.float32(format.qmax), low / np.float32(format.qmin)), tiny)
        zero = np.zeros_like(scale)
    else:
        scale = np.maximum((high - low) / np.float32(format.qmax - format.qmin), tiny)
        zero = np.clip(format.qmin - np.round(low / scale), format.qmin, format.qmax)
    codes = np.clip(np.round(rows / scale) + zero, format.qmin, format.qmax)
    return ((codes - zero) * scale).astype(np.float32).reshape(x.shape)


numbers = st.floats(-1000, 1000, width=32).map(lambda value: 0.0 if abs(value) < 1e-6 else value)


@pytest.mark.parametrize(
    "format", ["int8/token", "uint8/token/asym", "int8/tensor/sym/dynamic", "uint8/tensor/asym/dynamic", "int4/token"]
)
@settings(max_examples=60, deadline=None)
@given(x=arrays(np.float32, (3, 2, 5), elements=numbers))
def test_values_are_those_of_numpy(format: str, x: NDArray[np.float32]) -> None:
    found = quantizer(format)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, reference(x, Format.parse(format)), rtol=1e-6, atol=0)


def test_tokens_do_not_influence_each_other() -> None:
    x = torch.randn(2, 3, 8)
    large = x.clone()
    large[0, 0] *= 1000
    before, after = quantizer("int8/token")(x), quantizer("int8/token")(large)
    assert torch.equal(before[0, 1:], after[0, 1:])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(quantizer("int8/tensor/dynamic")(x)[1], quantizer("int8/tensor/dynamic")(large)[1])


def test_the_gradient_is_one() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    quantizer("int8/token")(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_empty_and_zero_tensors() -> None:
    assert quantizer("int8/token")(torch.empty(0, 8)).shape == (0, 8)
    assert torch.equal(quantizer("uint8/token/asym")(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("text", ["int8/channel/dynamic", "int8/group32/dynamic", "int8/token/adasign"])
def test_formats_without_meaning_are_rejected(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        Format.parse(text)
    assert caught.value.codes == ["invalid-format"]


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("int8/token", "int8/token/sym/dynamic"),
        ("uint8/tensor/asym/dynamic", "uint8/tensor/asym/dynamic"),
        ("fp8e4m3/token", "fp8e4m3/token/dynamic"),
        ("fp8e4m3/dynamic", "fp8e4m3/tensor/dynamic"),
    ],
)
def test_spellings(text: str, full: str) -> None:
    assert str(Format.parse(text)) == full
    assert Format.parse(full) == Format.parse(text)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        result: torch.Tensor = self.fc2(torch.relu(self.fc1(x)))
        return result


def test_only_matrix_products_are_planned_and_the_rest_has_a_reason() -> None:
    graph = bitwright.capture(Small(), torch.randn(2, 5, 8))
    plan = bitwright.make_plan(graph, "onnxruntime", activations="int8/token", saturating=False)
    dynamic = [site for site, spec in plan.sites.items() if spec.format.dynamic and spec.share is None]
    assert len(dynamic) == 2
    assert not any(site.startswith("conv") for site in plan.sites)
    assert "dynamic" in plan.float["conv"]
    assert not any(site.endswith(":bias") for site in plan.sites)  # the accumulator's scale isn't known in advance


def test_a_convolution_cannot_have_a_scale_per_token() -> None:
    graph = bitwright.capture(Small(), torch.randn(2, 5, 8))
    plan = bitwright.Plan(sites={"conv:input": SiteSpec(format=Format.parse("int8/token"), quantizer="dynamic")})
    assert [problem.code for problem in plan.validate(graph)] == ["no-token-axis"]


def test_weights_cannot_be_dynamic() -> None:
    graph = bitwright.capture(Small(), torch.randn(2, 5, 8))
    plan = bitwright.Plan(
        sites={"fc1:weight": SiteSpec(format=Format.parse("int8/tensor/dynamic"), quantizer="dynamic")}
    )
    assert "dynamic-weight" in [problem.code for problem in plan.validate(graph)]


@pytest.mark.parametrize(("quantizer", "format"), [("plain", "int8/token"), ("dynamic", "int8/tensor/sym")])
def test_quantizer_and_format_must_match(quantizer: str, format: str) -> None:
    plan = bitwright.Plan(sites={"fc1:input": SiteSpec(format=Format.parse(format), quantizer=quantizer)})
    assert [problem.code for problem in plan.validate()] == ["unsupported-format"]


def test_a_backend_without_dynamic_kernels_rejects_the_format() -> None:
    graph = bitwright.capture(Small(), torch.randn(2, 5, 8))
    with pytest.raises(PlanError) as caught:
        bitwright.make_plan(graph, "tensorrt", activations="int8/token")
    assert caught.value.codes == ["unsupported-format"]


def test_training_with_dynamic_activations_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model, data = Small(), [torch.randn(4, 5, 8) for _ in range(2)]
    target = torch.randn(4, 5, 4)
    qat = bitwright.Qat(model, data, precision="w8a8-dynamic")
    optimizer = torch.optim.Adam(qat.model.parameters(), lr=0.02)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(qat.model(data[0]), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
