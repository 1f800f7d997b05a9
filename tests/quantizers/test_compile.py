"""torch.compile(fullgraph=True) in training, and non-strict torch.export."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from bitwright.quantizers import quantizers_of, set_mode

# torch 2.13's own tracer of autograd functions makes one in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
)
FINE = {"weights": "int16/channel/sym", "activations": "uint16/tensor/asym"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    out = model(x)
    out.square().sum().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def agree(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], tolerance: float) -> None:
    assert torch.allclose(ours[0], theirs[0], rtol=tolerance, atol=tolerance)
    assert len(ours[1]) == len(theirs[1]) > 0
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * (1 + b.abs().max().item()))


@pytest.mark.parametrize("quantizer", ["plain", "lsq"])
def test_compiled_training_equals_eager(any_model: nn.Module, quantizer: str, zoo: SimpleNamespace) -> None:
    # fine grids: the compiled norm's last bits differ, and a code that flips must not look like an error
    model = zoo.quantized(any_model, quantizer=quantizer, **FINE).train()
    eager = copy.deepcopy(model)
    x = zoo.example(any_model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second step runs what the first one compiled
        agree(step(compiled, x), step(eager, x), 2e-3)
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4), name


def test_compiled_model_is_quantized(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    x = zoo.example(any_model)
    plain = any_model(x)
    model = zoo.quantized(any_model, weights="int4/channel/sym")
    eager = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert (compiled - eager).norm() < 0.1 * (eager - plain).norm()


def test_no_graph_break(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    model = zoo.quantized(any_model, quantizer="lsq").train()
    explained = torch._dynamo.explain(model)(zoo.example(any_model))
    assert explained.graph_break_count == 0
    assert explained.graph_count == 1


def test_compiled_model_follows_the_mode(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Functional))
    x = zoo.example(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    quantized = compiled(x)
    set_mode(model, "float")
    assert torch.allclose(compiled(x), model(x))
    assert not torch.equal(compiled(x), quantized)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch deprecates
def test_inductor(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual), **FINE).train()
    eager = copy.deepcopy(model)
    x = zoo.example(model)
    agree(step(torch.compile(model, fullgraph=True), x), step(eager, x), 2e-3)


def test_non_strict_export(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    model = zoo.quantized(any_model)
    x = zoo.example(any_model)
    expected = model(x)
    exported = torch.export.export(model, (x,), strict=False)
    assert torch.allclose(exported.module()(x), expected, atol=1e-6)
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    rounds = sum(node.target is torch.ops.aten.round.default for graph in graphs for node in graph.nodes)
    assert rounds >= len(quantizers_of(model))


def test_export_with_a_dynamic_batch(any_model: nn.Module, zoo: SimpleNamespace) -> None:
    model = zoo.quantized(any_model)
    x = zoo.example(any_model)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (x,), strict=False, dynamic_shapes=({0: batch},))
    longer = zoo.example(any_model, batch=9)
    assert torch.allclose(exported.module()(longer), model(longer), atol=1e-5)
