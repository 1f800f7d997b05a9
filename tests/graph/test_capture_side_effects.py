"""capture never changes the model, whatever the model does, and also when it fails."""

from __future__ import annotations

import copy
import pickle
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

from bitwright.core.errors import CaptureError
from bitwright.graph import capture

torch.set_num_threads(1)


class Restless(nn.Module):
    """Does to itself what a forward can do to its module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("late", None)
        self.scratch = torch.zeros(3)
        self.history: list[float] = []
        self.cache: dict[str, Tensor] = {}
        self.count = 0

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.steps += 1
        self.replaced = self.replaced + 1
        self.late = x.mean()
        self.scratch[0] = 5.0
        self.history.append(1.0)
        self.cache["x"] = x
        self.count += 1
        self.new_attribute = 3
        random.random(), np.random.rand()
        y = self.drop(self.frozen(self.norm(self.conv(x))))
        if fail:
            raise RuntimeError("boom")
        return y + torch.rand_like(y)


def everything(model: nn.Module) -> Any:
    """All that could differ: tensors by value and identity, flags, attributes, hooks, random states."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]},
        {path: module.training for path, module in model.named_modules()},
        {path: sorted(vars(module)) for path, module in model.named_modules()},
        {path: type(module) for path, module in model.named_modules()},
        {p: (list(m._forward_hooks), list(m._forward_pre_hooks)) for p, m in model.named_modules()},
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in model.named_parameters()},
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.fixture
def model() -> Restless:
    torch.manual_seed(0)
    model = Restless()
    model.conv.weight.requires_grad_(False)
    model.norm.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_capture_does_not_change_the_model(model: Restless, train: bool, fail: bool, mode: bool) -> None:
    model.train(mode)
    model.frozen.eval()
    before = everything(model)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    with suppress(CaptureError):
        capture(model, (x, fail), train=train)
        assert not fail
    assert same(before, everything(model))
    assert (model.count, model.history, model.cache, model.late) == (0, [], {}, None)
    assert model.scratch.tolist() == [0, 0, 0]
    assert not hasattr(model, "new_attribute")
    assert "forward" not in vars(model.conv)


def test_errors_of_the_model_are_not_hidden(model: Restless) -> None:
    with raises_problem("model-failed", mentions="boom") as raised:
        capture(model, (torch.randn(2, 3, 6, 6), True))
    assert isinstance(raised.value.__cause__, RuntimeError)
    # and the model still works, and can be captured
    assert "conv" in capture(model, torch.randn(2, 3, 6, 6)).by_name


def test_batch_norm_statistics_in_training(model: Restless) -> None:
    model.train()
    capture(model, torch.randn(8, 3, 6, 6) * 100, train=True)
    assert model.norm.running_mean.tolist() == [0] * 4  # type: ignore[union-attr]
    assert model.norm.num_batches_tracked == 0


def test_outputs_and_gradients_are_as_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    capture(model, torch.randn(2, 4))
    x = torch.randn(3, 4)
    a, b = model(x), twin(x)
    assert torch.equal(a, b)
    assert a.requires_grad
    a.sum().backward()
    b.sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_the_random_stream_goes_on_as_if_nothing_had_been() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    capture(model, torch.ones(1, 4), train=True)
    assert torch.equal(torch.rand(3), expected)


def shout(x: Tensor) -> Tensor:
    return x.neg()


def test_somebody_elses_forward_on_the_instance_is_seen_and_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].forward = shout  # type: ignore[method-assign]
    graph = capture(model, torch.ones(1, 4))
    assert list(graph.by_name) == ["0", "1/neg#0"]
    assert vars(model[1])["forward"] is shout
    assert "forward" not in vars(model[0])


def test_hooks_of_the_user_run_and_are_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    calls: list[int] = []

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * 2

    model[0].register_forward_hook(hook)
    graph = capture(model, torch.ones(1, 4))
    assert calls == [1]
    assert [op.kind for op in graph.ops] == ["linear", "mul"]


def test_a_captured_model_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    capture(model, torch.ones(1, 4))
    x = torch.randn(2, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))


def test_gradients_stay_off_and_inputs_as_they_are() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    before = x.detach().clone()
    capture(nn.Linear(4, 4), x)
    assert x.grad is None
    assert torch.equal(x, before)
