"""An artefact takes any batch only if it computes what the model computes at other sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.deployment import export_float


class Net(nn.Module):
    """A linear layer with some code around it."""

    def __init__(self, code: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.a, x)


def _quadruples(a: nn.Linear, x: Tensor) -> Tensor:
    return a(x.view(-1, 4, 8)).sum(1)


FROZEN: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "split": lambda a, x: torch.cat([a(c) for c in x.split(2)], 0),
    "chunk": lambda a, x: torch.cat([a(c) * (i + 1) for i, c in enumerate(x.chunk(2))], 0),
    "larger than 6": lambda a, x: a(x) * 2 if x.shape[0] > 6 else a(x),
    "larger than 100": lambda a, x: a(x) * 2 if x.shape[0] > 100 else a(x),
    "odd": lambda a, x: a(x) * 2 if x.shape[0] % 2 else a(x),
    "one": lambda a, x: a(x) * 3 if x.shape[0] == 1 else a(x),
    "a little": lambda a, x: a(x) + 1e-3 if x.shape[0] > 6 else a(x),
    "loop": lambda a, x: torch.stack([a(x[i]) for i in range(len(x))]),
    "four at a time only": lambda a, x: a(x.view(4, 8)),
}
FREE: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "plain": lambda a, x: a(x),
    "mean over the batch": lambda a, x: a(x).mean(0),
    "size as a number": lambda a, x: a(x) * x.shape[0],
    "quadruples": _quadruples,
    "squeeze": lambda a, x: a(x).squeeze(),
    "noise that cancels": lambda a, x: a(x) - a(x).detach(),
}


@pytest.mark.parametrize("code", FROZEN.values(), ids=FROZEN)
def test_a_size_that_the_code_froze_is_exported_as_fixed(
    code: Callable[[nn.Linear, Tensor], Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Net(code).eval()
    batches = [torch.randn(4, 8) for _ in range(4)]
    quantized = bw.quantize(model, batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    assert not artefact.dynamic_batch
    assert [problem.code for problem in artefact.warnings] == ["fixed-batch"]
    assert "unseen-operator" not in [problem.code for problem in quantized.warnings]
    assert "Traceback" not in capfd.readouterr().err
    assert bw.open_runtime("onnxruntime", artefact.path).batch == 4
    assert quantized.check(artefact.path, batches).passed


@pytest.mark.parametrize("code", FREE.values(), ids=FREE)
def test_a_size_that_the_code_leaves_free_stays_so(code: Callable[[nn.Linear, Tensor], Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    quantized = bw.quantize(Net(code).eval(), [torch.randn(4, 8) for _ in range(4)])
    artefact = quantized.export(tmp_path / "model.onnx")
    assert artefact.dynamic_batch
    assert not artefact.warnings
    assert quantized.check(artefact.path, [torch.randn(12, 8)]).passed


def test_the_float_model_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="bitwright"):
        export_float(Net(FROZEN["split"]).eval(), tmp_path / "float.onnx", torch.randn(4, 8))
    assert "takes only batches of 4" in caplog.text
    assert bw.open_runtime("onnxruntime", tmp_path / "float.onnx").batch == 4


def test_one_sample_stays_one_where_the_batch_is_fixed(tmp_path: Path) -> None:
    quantized = bw.quantize(Net(FROZEN["loop"]).eval(), [torch.randn(1, 8) for _ in range(4)])
    artefact = quantized.export(tmp_path / "model.onnx")
    assert bw.open_runtime("onnxruntime", artefact.path).batch == 1


class Tabled(nn.Module):
    """A second input that has no batch axis, though it has as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) @ table, table.sum()


def test_inputs_and_outputs_without_the_batch(tmp_path: Path) -> None:
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]
    quantized = bw.quantize(Tabled().eval(), batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    assert artefact.dynamic_batch
    assert quantized.check(artefact.path, [(torch.randn(3, 8), torch.randn(8, 8))]).passed


class Pair(nn.Module):
    """The first axis of the second input is another one, and its size is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) * (self.a(y).sum() if y.shape[0] > 5 else self.a(y).mean())


def test_another_axis_that_is_frozen(tmp_path: Path) -> None:
    batches = [(torch.randn(4, 8), torch.randn(3, 8)) for _ in range(4)]
    artefact = bw.quantize(Pair().eval(), batches).export(tmp_path / "model.onnx")
    assert [problem.code for problem in artefact.warnings] == ["fixed-batch"]


def test_a_model_in_float_with_a_file_of_grids_is_verified_too(tmp_path: Path) -> None:
    batches = [torch.randn(4, 8) for _ in range(4)]
    for code, free in (("plain", True), ("split", False)):
        quantized = bw.quantize(Net({**FREE, **FROZEN}[code]).eval(), batches, backend="snpe")
        assert quantized.export(tmp_path / f"{code}.onnx").dynamic_batch is free


class _FrozenByRemainder(nn.Module):
    def __init__(self, divisor: int) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.shape[0] % self.divisor == 0 else self.b(x)


@pytest.mark.parametrize("divisor", [5, 7, 97])
def test_a_branch_that_only_rare_sizes_take(divisor: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    quantized = bw.quantize(_FrozenByRemainder(divisor).eval(), [x])
    exported = quantized.export(tmp_path / "model.onnx")
    assert not exported.dynamic_batch
    assert [warning.code for warning in exported.warnings] == ["fixed-batch"]


class _AnyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.a(inputs[0]) + self.b(inputs[1])


def test_a_model_with_a_variable_number_of_inputs_has_a_free_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    quantized = bw.quantize(_AnyInputs().eval(), [(torch.randn(4, 8), torch.randn(4, 8))])
    exported = quantized.export(tmp_path / "model.onnx")
    assert exported.dynamic_batch
    assert not exported.warnings
    assert quantized.check(exported.path, [(torch.randn(7, 8), torch.randn(7, 8))]).passed


class Particular(nn.Module):
    """Has its own error for a size that is no number, with the size in its text."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if not isinstance(other.shape[0], int):
            raise ValueError(f"{other.shape[0]} and {x.shape[0]} are no sizes")
        return self.a(x) + other.sum()


def test_a_failed_export_names_the_input_and_the_axis_of_a_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 8), torch.randn(3, 8)) for _ in range(2)]
    artefact = bw.quantize(Particular().eval(), batches).export(tmp_path / "model.onnx")
    (problem,) = artefact.warnings
    assert problem.code == "fixed-batch"
    assert "other.shape[0] and x.shape[0] are no sizes" in problem.what


def test_a_failure_at_another_size_names_the_input(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.a(x) + mask.reshape(x.shape[0], 4)

    torch.manual_seed(0)
    batches = [(torch.randn(4, 4), torch.randn(8, 2)) for _ in range(2)]
    artefact = bw.quantize(Pair().eval(), batches).export(tmp_path / "model.onnx")
    (problem,) = artefact.warnings
    assert problem.code == "fixed-batch"
    assert "mask.shape[0]" in problem.what
    assert "args" not in problem.what
