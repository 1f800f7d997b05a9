"""Models with unusual code, all the way to ONNX Runtime: each reaches parity, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import quantize, quantizers_of
from bitwright.recipe import Quantized


class Odd(nn.Module):
    """Two linear layers, a free weight, and a forward that is given."""

    def __init__(self, forward: Callable[[Odd, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.w = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.code = forward

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def batches(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*(shape or (4, 8)), generator=generator) for _ in range(3)]


def deploy(model: nn.Module, data: list[Any], path: Path) -> Quantized:
    """Quantize, export, and compare with the runtime."""
    quantized = quantize(model, data)
    artefact = quantized.export(path / "model.onnx")
    check = quantized.check(artefact.path, data)
    assert check.passed, check.outputs
    return quantized


def _add_out(m: Odd, x: Tensor) -> Tensor:
    torch.add(x, 1, out=x)
    return m.last(x)


def _matmul_out(m: Odd, x: Tensor) -> Tensor:
    into = torch.empty(0)
    torch.mm(x, m.w, out=into)
    return m.last(into)


def _max_out(m: Odd, x: Tensor) -> Tensor:
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.max(m.first(x).view(-1, 8, 1), 2, out=(values, indices))
    return m.last(values)


def _turn_in_place(m: Odd, x: Tensor) -> Tensor:
    y = m.first(x)
    y.t_().t_()
    return m.last(y.unsqueeze_(1).squeeze_(1))


WRITES: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "add_out": _add_out,
    "matmul_out": _matmul_out,
    "max_out": _max_out,
    "turn_in_place": _turn_in_place,
    "relu_by_keyword": lambda m, x: m.last(F.relu(input=m.first(x), inplace=True)),
}


@pytest.mark.parametrize("name", sorted(WRITES))
def test_what_is_written_in_place_is_quantized(name: str, tmp_path: Path) -> None:
    """Quantizers change what `out=` and in-place operators write, also where these change the shape."""
    quantized = deploy(Odd(WRITES[name]), batches(), tmp_path)
    quantizers = quantizers_of(quantized.model)
    if "last:input" in quantizers:
        return
    seen: list[Tensor] = []
    hook = quantized.model.get_submodule("last").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    quantized.model(batches()[0])
    hook.remove()
    activations = [q for site, q in quantizers.items() if not site.endswith((":weight", ":bias"))]
    assert any(torch.allclose(q.quantize(seen[0]), seen[0]) for q in activations), "what it reads has no grid"


def _hyper(m: Odd, x: Tensor) -> Tensor:
    return F.linear(x, m.w, m.first(x).mean(0))


BIASES: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "addmm": lambda m, x: m.last(torch.addmm(x, x, m.w)),
    "matrix": lambda m, x: m.last(torch.addmm(m.w[:4], x, m.w)),
    "computed": _hyper,
}


@pytest.mark.parametrize("name", sorted(BIASES))
def test_only_constant_vectors_are_int32_biases(name: str, tmp_path: Path) -> None:
    deploy(Odd(BIASES[name]), batches(), tmp_path)
