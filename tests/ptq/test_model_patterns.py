"""Patterns of model code that used to give wrong numbers: each works, or is refused or warned about with a reason."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwright import (
    BitwrightError,
    Qat,
    calibrate,
    capture,
    load_checkpoint,
    make_plan,
    prepare,
    quantize,
    quantizers_of,
    save_checkpoint,
    set_mode,
)
from bitwright.core.tensor_tree import copied
from bitwright.quantizers import warnings_of


def batches(count: int = 3, *, size: int = 8, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, size, generator=generator) for _ in range(count)]


def _distance(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


class Writes(nn.Module):
    """Applies `write` to its input, in place, before a linear layer."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 4)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.fc(x)


def _assign(x: Tensor) -> None:
    x[:, 0] = 0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(10),
    "relu": lambda x: F.relu(x, inplace=True),
    "setitem": _assign,
    "out": lambda x: torch.mul(x, 3.0, out=x),
    "view": lambda x: x[:, 1:3].add_(5),
    "data": lambda x: x.data.mul_(4),
}


@pytest.mark.parametrize("write", sorted(WRITES))
def test_a_model_that_writes_into_its_input_changes_no_batch_and_no_range(write: str, tmp_path: Path) -> None:
    model, data = Writes(WRITES[write]), batches()
    before = [batch.clone() for batch in data]
    expected = [model(batch.clone()) for batch in data]
    largest = max(float(_written(WRITES[write], batch).abs().max()) for batch in data)
    quantized = quantize(model, data, weights="int8/tensor/sym", activations="int8/tensor/sym", backend="academic")
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))
    scales = [q.scale for site, q in quantizers_of(model).items() if not site.endswith((":weight", ":bias"))]
    assert any(float(scale) == pytest.approx(largest / 127, rel=0.02) for scale in scales)
    for batch, output in zip(data, expected, strict=True):
        assert float((quantized.model(batch.clone()) - output).detach().abs().max()) < 0.05 * float(
            output.detach().abs().max()
        )


def _written(write: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    clone = batch.clone()
    write(clone)
    return clone


def test_export_and_check_leave_batches_as_they_were(tmp_path: Path) -> None:
    model, data = Writes(WRITES["mul_"]), batches()
    before = [batch.clone() for batch in data]
    quantized = quantize(model, data)
    artefact = quantized.export(tmp_path / "model.onnx")
    check = quantized.check(artefact.path, data)
    assert check.outputs[0].sqnr_db > 60
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))


def test_copies_keep_what_inputs_are() -> None:
    @dataclass
    class Given:
        x: Tensor
        name: str

    class Cache:
        def __init__(self) -> None:
            self.keys = [torch.ones(2)]

    x, cache = torch.ones(3), Cache()
    (first, second, given, grown), words = copied(((x, x, Given(x, "a"), cache), {"flag": True, "text": "b"}))
    assert first is second
    assert first is not x
    assert torch.equal(first, x)
    assert given.x is first
    assert (given.name, words) == ("a", {"flag": True, "text": "b"})
    grown.keys.append(torch.zeros(1))
    grown.keys[0].add_(1)
    assert len(cache.keys) == 1
    assert float(cache.keys[0].sum()) == 2


# -- operators that calibration didn't reach --------------------------------------------------------------------------


class Loop(nn.Module):
    """As many products as it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.steps = 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = torch.tanh(x @ self.w)
        return x


def test_iterations_beyond_those_of_calibration_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Loop()
    quantize(model, batches())
    assert warnings_of(model) == ()
    model.steps = 4
    with caplog.at_level(logging.WARNING, logger="bitwright"):
        model.eval()(batches()[0])
        model(batches()[0])
    assert {w.code for w in warnings_of(model)} == {"unseen-operator"}
    assert {w.where for w in warnings_of(model)} >= {"/matmul#2", "/matmul#3"}
    assert sum("/matmul#2" in record.getMessage() for record in caplog.records) == 1


class Chosen(nn.Module):
    """One of several layers, weights, or branches, by a Python value."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.at = how, 0
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.weights = nn.ParameterList(torch.randn(8, 8) * 10**i for i in range(2))
        self.bank = nn.Parameter(torch.stack([torch.randn(8, 8), torch.randn(8, 8) * 10]))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "layers":
            x = self.layers[self.at](x)
        elif self.how == "list":
            x = F.linear(x, self.weights[self.at])
        elif self.how == "bank":
            x = F.linear(x, self.bank[self.at])
        elif self.how == "transposed":
            x = x @ self.weights[self.at].t()
        elif self.at:
            x = x @ self.bank[0]
        return x


@pytest.mark.parametrize("how", ["layers", "branch"])
def test_a_layer_that_calibration_did_not_reach_is_named(how: str) -> None:
    model = Chosen(how)
    data = batches()
    prepare(model, make_plan(capture(Chosen("layers"), data[0])), graph=capture(Chosen("layers"), data[0]))
    model.how = "layers"
    calibrate(model, data)
    model.how, model.at = how, 1
    model.eval()(data[0])
    where = "layers.1" if how == "layers" else "/matmul#0"
    assert [w.code for w in warnings_of(model)] == ["unseen-operator"]
    assert str(warnings_of(model)[0].where).startswith(where)


@pytest.mark.parametrize("how", ["list", "bank", "transposed"])
def test_each_selected_weight_has_a_range_that_fits_it(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model, data = Chosen(how).eval(), batches()
    plain = copy.deepcopy(model)
    quantize(model, data, weights="int8/tensor/sym")
    for at in (0, 1, 0, 1):
        model.at = plain.at = at
        expected = plain(data[0])
        with caplog.at_level(logging.WARNING, logger="bitwright"):
            error = _distance(model(data[0]), expected)
        assert error < 0.03, at
    assert [w.code for w in warnings_of(model)] == ["unseen-weight"]


def test_calibration_observes_every_weight_that_it_selects() -> None:
    class Alternating(Chosen):
        def forward(self, x: Tensor) -> Tensor:
            self.at = int(x.shape[0] > 4)
            return super().forward(x)

    model, plain = Alternating("list").eval(), Alternating("list").eval()
    data = [*batches(), torch.randn(6, 8)]
    quantize(model, data, weights="int8/tensor/sym")
    for batch in data:
        expected = plain(batch)
        assert _distance(model(batch), expected) < 0.1
    assert warnings_of(model) == ()


# -- weights that change after calibration --------------------------------------------------------------------


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "load": lambda model: model.load_state_dict({k: 5 * v for k, v in _net(1).state_dict().items()}, strict=False),
    "assign": lambda model: model.load_state_dict(
        {k: 5 * v for k, v in _net(1).state_dict().items()}, strict=False, assign=True
    ),
    "layer": lambda model: model[0].load_state_dict(_net(1)[0].state_dict()),  # type: ignore[index]
    "in place": lambda model: model[0].weight.detach().mul_(3),  # type: ignore[index]
    "data": lambda model: model[0].weight.data.mul_(3),  # type: ignore[index]
    "swapped": lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(8, 8) * 9)),  # type: ignore[index]
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_changed_weights_after_calibration_are_detected(change: str, caplog: pytest.LogCaptureFixture) -> None:
    model, data = _net(), batches()
    quantize(model, data)
    model(data[0])
    CHANGES[change](model)
    found: list[Any] = []
    try:
        with caplog.at_level(logging.WARNING, logger="bitwright"):
            model(data[0])
    except BitwrightError as error:
        found = error.problems
    code, where = next((p.code, p.where) for p in (*found, *warnings_of(model)))
    assert (code, where) in (("weights-changed", "0:weight"), ("unseen-weight", "0:weight"))
    calibrate(model, data)
    model(data[0])


def test_load_state_dict_with_other_weights_is_refused_until_calibrated_again() -> None:
    model, data = _net(), batches()
    quantize(model, data)
    model.load_state_dict(_net(1).state_dict(), strict=False)
    with pytest.raises(BitwrightError) as caught:
        model(data[0])
    assert caught.value.codes == ["weights-changed"]
    set_mode(model, "float")
    torch.testing.assert_close(model(data[0]), _net(1)(data[0]))
    set_mode(model, "quantize")
    calibrate(model, data)
    expected = _net(1)(data[0])
    assert _distance(model(data[0]), expected) < 0.05


def test_the_same_weights_stay_accepted(tmp_path: Path) -> None:
    model, data = _net(), batches()
    quantize(model, data)
    expected = model(data[0])
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(model(data[0]), expected)
    torch.testing.assert_close(copy.deepcopy(model)(data[0]), expected)
    save_checkpoint(model, tmp_path / "state.safetensors")
    other = _net(1)
    quantize(other, data)
    load_checkpoint(other, tmp_path / "state.safetensors")
    torch.testing.assert_close(other(data[0]), expected)
    model.to(torch.bfloat16)
    assert model(data[0].to(torch.bfloat16)).isfinite().all()
    model.to(torch.float32)
    assert model(data[0]).isfinite().all()


def test_training_may_move_weights() -> None:
    model, data = _net(), batches()
    qat = Qat(model, data, fuse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        model(data[0]).square().sum().backward()
        optimizer.step()
        qat.after_step()
        model.eval()(data[0])
    qat.finish()
    model.zero_grad()
    model.eval()(data[0])
    assert warnings_of(model) == ()
    CHANGES["in place"](model)
    model(data[0])  # a scale that was learned may still fit
    assert [w.code for w in warnings_of(model)] == ["weights-changed"]


# -- gradient checkpointing ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)
        self.w = nn.Parameter(torch.randn(size, size) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)) @ self.w) + x


class Checkpointed(nn.Module):
    """Parts run under a checkpoint: modules that are called twice, functions, functions within functions."""

    def __init__(self, how: str, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.reentrant = how, reentrant
        self.first, self.block, self.last = nn.Linear(8, 8), Block(8), nn.Linear(8, 4)
        self.w = nn.Parameter(torch.randn(8, 8) * 0.3)

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        result: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return result

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(x @ self.w), 0.2, self.training) @ self.w.t() + x

    def outer(self, x: Tensor) -> Tensor:
        x = self.run(self.inner, x) if self.how == "nested" else self.inner(x)
        return self.block(self.block(x) @ self.w)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) @ self.w
        if self.how == "module":
            x = self.run(self.block, self.run(self.block, x))
        else:
            x = self.run(self.inner, self.run(self.outer, x))
        return self.last(x @ self.w)


def _trained(how: str, reentrant: bool | None, quantizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, data = Checkpointed(how, reentrant), batches()
    qat = Qat(model, data, quantizer=quantizer, fuse=False)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    torch.manual_seed(3)
    for batch in data:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        qat.after_step()
    assert warnings_of(model) == ()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, dict(model.state_dict())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, while ranges are found
@pytest.mark.parametrize("quantizer", ["lsq", "plain"])
@pytest.mark.parametrize("how", ["module", "function", "nested"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_those_without_checkpoints(how: str, reentrant: bool, quantizer: str) -> None:
    gradients, state = _trained(how, reentrant, quantizer)
    expected, states = _trained(how, None, quantizer)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)
    for name, value in states.items():  # observers saw each tensor once
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


CHUNKS: dict[str, Callable[[nn.Linear, Tensor], list[Tensor]]] = {
    "split": lambda fc, x: [torch.relu(fc(part)) for part in x.split(32)],
    "slices": lambda fc, x: [torch.relu(fc(x[start : start + 32])) for start in range(0, len(x), 32)],
    "large batches": lambda fc, x: [torch.relu(fc(x))] * 2 + ([torch.relu(fc(x * 2))] if x.shape[0] > 50 else []),
}


class Chunked(nn.Module):
    def __init__(self, code: Callable[[nn.Linear, Tensor], list[Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head, self.code = nn.Linear(8, 8), nn.Linear(8, 4), code

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(part) for part in self.code(self.fc, x)])


@pytest.mark.parametrize("code", CHUNKS.values(), ids=CHUNKS)
def test_operators_that_only_complete_batches_reach_are_quantized(
    code: Callable[[nn.Linear, Tensor], list[Tensor]],
) -> None:
    data = [torch.randn(64, 8) for _ in range(2)]
    model = Chunked(code)
    complete = capture(model, data[0])
    quantized = quantize(model, data)
    assert quantized.graph.by_name.keys() == complete.by_name.keys()
    assert not quantized.warnings
    assert not quantized.plan.float
