"""Every observer and every step, at every magnitude, with odd data: correct, or an error that names the sites."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import BitwrightError, CalibrationError
from bitwright.core.formats import Format
from bitwright.core.registry import OBSERVERS, STEPS
from bitwright.ptq.gptq import _factor
from bitwright.quantizers.observers.histogram import Kl

SIZES = [1e-37, 1e-30, 1e-20, 1e-7, 1e7, 1e20, 1e30, 1e38]
EXTREMES = [1e-37, 1e-7, 1e38]
KINDS = ["plain", "one sample", "constant", "zeros", "outlier", "one element"]
ITERATED = ("adaround", "brecq", "qdrop")


class Chain(nn.Module):
    """Three linears whose outputs are as large as the inputs."""

    def __init__(self, width: int, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        with torch.no_grad():
            for layer in (self.first, self.second, self.third):
                layer.bias.mul_(size)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        return result


def batches(kind: str, size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "plain":
        return [torch.randn(8, 4, 8, generator=generator) * size for _ in range(2)]
    if kind == "one sample":
        return [torch.randn(1, 1, 8, generator=generator) * size]
    if kind == "outlier":
        x = torch.randn(8, 4, 8, generator=generator) * (size * 1e-3)
        x[0, 0, 0] = size
        return [x]
    shape = (1, 1, 1) if kind == "one element" else (4, 2, 8)
    return [torch.zeros(shape) if kind == "zeros" else torch.full(shape, size)]


def error_of(kind: str, size: float, **choices: Any) -> float | None:
    """The relative error of the quantized model; None where it is refused, with a reason and the sites."""
    data = batches(kind, size)
    model = Chain(data[0].shape[-1], size)
    exact = model(data[0]).detach().double()
    try:
        found = bw.quantize(model, data, **choices)
    except BitwrightError as error:
        refused = error
    else:
        out = found.model(data[0]).detach().double()
        assert all(bool(tensor.isfinite().all()) for tensor in found.model.state_dict().values())
        return float((out - exact).norm() / exact.norm())
    assert set(refused.codes) <= {"scale-underflow", "scale-overflow", "parameter-not-finite"}, str(refused)
    assert all(problem.where for problem in refused.problems)
    assert size in (1e-37, 1e38)
    return None


def sweep(*, whole: bool = False, **choices: Any) -> None:
    """Compare all magnitudes with 1. Unless `whole`, special kinds of data have the extremes only."""
    for kind in KINDS:
        ordinary = error_of(kind, 1.0, **choices)
        assert ordinary is not None
        assert ordinary < 0.15, (kind, ordinary)  # clip-std clips on purpose
        for size in SIZES if whole or kind == "plain" else EXTREMES:
            error = error_of(kind, size, **choices)
            assert error is None or error <= 1.5 * ordinary + 0.01, (kind, size, error, ordinary)


@pytest.mark.parametrize("observer", sorted(OBSERVERS.names()))
def test_observers_at_every_magnitude(observer: str) -> None:
    sweep(observer=observer, weight_observer=observer)


@pytest.mark.parametrize("step", sorted(STEPS.names()))
def test_steps_at_every_magnitude(step: str) -> None:
    sweep(steps=[f"{step}:iterations=5" if step in ITERATED else step])


@pytest.mark.slow
@pytest.mark.parametrize("observer", sorted(OBSERVERS.names()))
def test_observers_with_all_data_at_every_magnitude(observer: str) -> None:
    sweep(whole=True, observer=observer, weight_observer=observer)


@pytest.mark.slow
@pytest.mark.parametrize("step", sorted(STEPS.names()))
def test_steps_with_all_data_at_every_magnitude(step: str) -> None:
    sweep(whole=True, steps=[f"{step}:iterations=5" if step in ITERATED else step])


@pytest.mark.parametrize("format", ["int8/tensor/sym", "int4/tensor/sym", "uint4/tensor/asym"])
def test_kl_of_few_values_keeps_their_range(format: str) -> None:
    for seed in range(20):
        x = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed)).relu()
        observer = Kl(format=Format.parse(format))
        observer.observe(x)
        _, high = observer.range()
        assert float(high) > 0.6 * float(x.max())


def test_gptq_names_the_operator_whose_moments_have_no_factor() -> None:
    with pytest.raises(CalibrationError) as caught:
        _factor(torch.tensor([[1.0, 3.0], [3.0, 1.0]]), 0.01, "head")
    assert caught.value.codes == ["gptq-not-positive-definite"]
    assert caught.value.problems[0].where == "head"
