"""Programs that are written to ONNX without torch.onnx compute what the model and torch.onnx's file compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import open_runtime, quantize
from bitwright.core.tensor_tree import as_array, tensors_in
from bitwright.deployment.direct_onnx import write_graph
from bitwright.deployment.export import translate, translate_with_torch
from bitwright.deployment.graph_writer import Untranslated
from bitwright.deployment.onnx_files import save_onnx
from bitwright.deployment.runtimes.base import Runtime
from bitwright.deployment.torch_export import Exported, export_program

Code = Callable[["Small", Tensor], Any]


class Small(nn.Module):
    """A few layers, and a forward that is given."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.turned, self.linear = nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1), nn.Linear(8, 6)
        self.layer_norm, self.table = nn.LayerNorm(8), nn.Embedding(8, 5)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        self.code = code
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def indices(x: Tensor) -> Tensor:
    return (x.abs() * 3).long().clamp(0, 7)


# The input is (batch, 4, 6, 8).
CODE: dict[str, Code] = {
    "activations": lambda m, x: F.relu(x) + F.silu(x) * F.gelu(x) - F.hardswish(x) / (F.sigmoid(x) + F.hardsigmoid(x)),
    "more activations": lambda m, x: F.relu6(x) + F.leaky_relu(x, 0.2) + F.elu(x) + F.mish(x) + torch.tanh(x).erf(),
    "powers": lambda m, x: (x.abs() + 1).sqrt() + (x * x + 1).rsqrt() + x**2 + (-x).exp() + 1 / (2 + x.cos() + x.sin()),
    "numbers": lambda m, x: 3 - torch.add(x, 1.5, alpha=2) * 2 + torch.sub(x, x.abs(), alpha=0.5) / 4,
    "types": lambda m, x: indices(x) * 0.5 + indices(x) / 3 + (x > 0).to(torch.float32) + indices(x).float() * x,
    "comparisons": lambda m, x: torch.where((x > 0.1) & (x <= 1) | (x != x.abs()), x, 0.0).masked_fill(~(x < 1), 2.0),
    "limits": lambda m, x: x.clamp(min=-0.5).clamp(-1, 0.7).clamp_max(0.6) + torch.maximum(x, -x) + x.clamp(min=x * 2),
    "rounding": lambda m, x: x.floor() + x.ceil() + x.round() + torch.div(x, 0.3, rounding_mode="floor") + x.sign(),
    "products": lambda m, x: (m.linear(x), x @ m.w, m.linear(x[:, 0, 0]), torch.addmm(x[:, 0, 0], x[:, 1, 1], m.w)),
    "bmm": lambda m, x: torch.bmm(x.flatten(0, 1), x.flatten(0, 1).transpose(1, 2)),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x + 1, x * 2),
    "attention with masks": lambda m, x: (
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(6, 6).tril().bool(), scale=0.3)
        + F.scaled_dot_product_attention(x, x, x, attn_mask=x[:, :, :, :6])
    ),
    "convolutions": lambda m, x: (m.turned(F.relu(m.norm(m.conv(x)))), m.norm(x)),
    "padding": lambda m, x: m.conv(F.pad(x, (1, 2, 3, 0))) + F.pad(m.conv(x), (2, 1, 3, 0), mode="reflect"),
    "same padding": lambda m, x: F.conv2d(x, m.conv.weight, padding="same", dilation=2) + F.pad(x, (-1, 1), value=3.0),
    "pooling": lambda m, x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 1)),
    "windows": lambda m, x: F.adaptive_avg_pool2d(x, (3, 4)) + F.max_pool2d(x, (2, 2), ceil_mode=True).mean(),
    "norms": lambda m, x: m.layer_norm(x) + F.layer_norm(x, (6, 8)) + x.softmax(1) + F.log_softmax(x, -1),
    "reductions": lambda m, x: (x.mean((2, 3)), x.sum(-1, keepdim=True), x.amax(1), x.argmax(1), x.max(2)[0], x.min()),
    "statistics": lambda m, x: (x.var(-1), x.std((2, 3), unbiased=False), x.cumsum(1), x.norm(dim=1)),
    "shapes": lambda m, x: (x.view(x.shape[0], 4, -1), x.flatten(1), x.reshape(-1, 8), x.unflatten(3, (2, 4))),
    "sizes": lambda m, x: (
        x.reshape(x.shape[0] * 2, -1) * x.shape[0] + torch.arange(x.shape[0]).sum() / (x.shape[0] + 1)
    ),
    "axes": lambda m, x: (x.permute(0, 2, 3, 1), x.transpose(-1, 1), x[:, :1].squeeze(1), x[:, 0].unsqueeze(-1), x.mT),
    "expanded": lambda m, x: x[:, :1].expand(-1, 4, 6, 8) + x.mean(0).expand_as(x) + x[:, :, :1].repeat(1, 1, 6, 1),
    "parts": lambda m, x: (
        x[:, 1:3, ::2],
        x[..., -3:],
        x.narrow(1, 1, 2),
        x.select(2, -1),
        x[1:],
        x[:, :, 2:-1].flip(3),
    ),
    "joined": lambda m, x: (torch.cat([x, x + 1], 1), torch.stack([x, -x], 1), *x.chunk(3, 2), *x.split([1, 3], 1)),
    "unbound": lambda m, x: sum(x.unbind(1)),
    "looked up": lambda m, x: (
        m.table(indices(x)),
        x[:, [2, 0]],
        m.w[[1, 2], [3, 4]],
        x.index_select(2, indices(m.w[0]) % 6),
    ),
    "gathered": lambda m, x: torch.gather(x, 3, indices(x)),
    "triangles": lambda m, x: torch.tril(x) + torch.triu(x, 1) * 2,
    "resized": lambda m, x: F.interpolate(x, scale_factor=2.0) + F.interpolate(x, size=(12, 16), mode="bilinear"),
    "shuffled": lambda m, x: F.pixel_shuffle(x, 2),
    "new": lambda m, x: (
        x + torch.zeros_like(x) + x.new_ones(8) + torch.full((x.shape[0], 1, 1, 1), 0.5) + torch.ones(6, 1)
    ),
    "in place": lambda m, x: (x * 2).relu_().add_(1).mul_(x).clamp_(max=3),
    "folded": lambda m, x: x @ (m.w.t().abs() * 2).softmax(0) + torch.arange(8).float().cos(),
    "unchanged": lambda m, x: (x, m.w, F.dropout(x, 0.5, m.training), x.detach().contiguous(), m.w.t()),
}


def traced(model: nn.Module, *args: Any) -> Exported:
    return export_program(model, args, {}, True)


def written(model: ir.Model, path: Path) -> Path:
    save_onnx(model, path)
    onnx.checker.check_model(path, full_check=True)
    return path


def outputs(model: nn.Module, runtime: Runtime, x: Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    with torch.no_grad():
        expected = [as_array(tensor) for _, tensor in tensors_in(model(x.clone()))]
    return expected, runtime.run(runtime.feed(x))


def agree(expected: list[np.ndarray], found: list[np.ndarray]) -> None:
    assert [array.shape for array in found] == [array.shape for array in expected]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(CODE))
def test_operators_compute_what_torch_computes(name: str, tmp_path: Path) -> None:
    """Also with another number of samples than the traced one."""
    model, generator = Small(CODE[name]), torch.Generator().manual_seed(1)
    exported = traced(model, torch.randn(2, 4, 6, 8, generator=generator))
    runtime = open_runtime("onnxruntime", written(write_graph(exported.program), tmp_path / "model.onnx"))
    agree(*outputs(model, runtime, torch.randn(2, 4, 6, 8, generator=generator)))
    if exported.axes:
        agree(*outputs(model, runtime, torch.randn(5, 4, 6, 8, generator=generator)))


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", sorted(CODE))
def test_operators_compute_what_the_file_of_torch_onnx_computes(name: str, runtime: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4, 6, 8, generator=torch.Generator().manual_seed(2))
    program = traced(Small(CODE[name]), x).program
    ours, theirs = (
        open_runtime(runtime, written(write(program), tmp_path / f"{write.__name__}.onnx"))
        for write in (write_graph, translate_with_torch)
    )
    assert (ours.inputs, len(ours.outputs)) == (theirs.inputs, len(theirs.outputs))
    agree(theirs.run(theirs.feed(x)), ours.run(ours.feed(x)))


WRITES: dict[str, Code] = {
    "part": lambda m, x: _write_part(m, x),
    "view read later": lambda m, x: _write_viewed(x),
}


def _write_part(m: Small, x: Tensor) -> Tensor:
    y: Tensor = m.conv(x)
    y[:, 0] = 1
    return y


def _write_viewed(x: Tensor) -> Tensor:
    y = x * 2
    rows = y.flatten(1)
    y.relu_()
    return rows + 1


@pytest.mark.parametrize("name", sorted(WRITES))
def test_writes_that_change_other_tensors_are_left_to_torch_onnx(name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(3))
    model = Small(WRITES[name])
    exported = traced(model, x)
    with pytest.raises(Untranslated):
        write_graph(exported.program)
    runtime = open_runtime("onnxruntime", written(translate(exported.program)[0], tmp_path / "model.onnx"))
    agree([model(x.clone()).detach().numpy()], runtime.run(runtime.feed(x)))


def test_tied_weights_are_stored_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    graph = write_graph(traced(model, torch.randn(2, 8)).program).graph
    assert len(graph.initializers) == 3


def test_the_operator_that_needed_torch_onnx_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = [torch.randn(2, 4, 6, 8)]
    known = quantize(Small(lambda m, x: m.conv(x)), data).export(tmp_path / "known.onnx")
    assert known.notes == ()
    with caplog.at_level(logging.DEBUG, logger="bitwright"):
        other = quantize(Small(lambda m, x: m.conv(x).sort(-1)[0]), data).export(tmp_path / "other.onnx")
    assert len(other.notes) == 1
    assert "aten.sort" in other.notes[0]
    assert other.notes[0] in caplog.messages


def test_dropout_in_place_is_written_directly(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5, inplace=True), nn.Linear(8, 4)).eval()
    quantized = quantize(model, [torch.randn(4, 8) for _ in range(3)])
    artefact = quantized.export(tmp_path / "model.onnx")
    assert not artefact.notes
    assert quantized.check(artefact.path, [torch.randn(4, 8)]).passed
