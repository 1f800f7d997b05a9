"""Real integer products against the simulation and against float."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from int8_calls import CALLS, run
from torch import Tensor

from bitwright.kernels.int8 import Int8
from bitwright.kernels.products import missing
from bitwright.plan import ComputeSpec

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no integer products here: {missing()}")
BACKWARD = [(), ("input",), ("weight",), ("input", "weight")]


def distance(one: Tensor, other: Tensor) -> float:
    return float(((one - other).norm() / other.norm()).detach())


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_real_and_simulated_agree(name: str, positive: bool, backward: tuple[str, ...]) -> None:
    spec = ComputeSpec(format="int8", backward=backward)
    for real, simulated in zip(
        run(name, spec, positive=positive), run(name, spec, simulate=True, positive=positive), strict=True
    ):
        assert distance(real, simulated) < 1e-5


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("name", CALLS)
def test_float_is_near(name: str, backward: tuple[str, ...]) -> None:
    spec = ComputeSpec(format="int8", backward=backward)
    for low, exact in zip(run(name, spec), run(name, None), strict=True):
        assert low.shape == exact.shape
        assert torch.cosine_similarity(low.flatten(), exact.flatten(), dim=0) > 0.998


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("linear", "conv1d")])
def test_channels_last_makes_no_difference(name: str) -> None:
    spec = ComputeSpec(format="int8", backward=("input", "weight"))
    for one, other in zip(run(name, spec, last=True), run(name, spec), strict=True):
        assert distance(one, other) < 1e-6


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_memory_lies_as_after_a_float_convolution(format: torch.memory_format) -> None:
    """What follows costs what it always does: plans don't change the order of memory."""
    x, weight = torch.randn(2, 8, 6, 6).to(memory_format=format), torch.randn(4, 8, 3, 3)
    layouts = []
    for spec in (None, ComputeSpec(format="int8", backward=("input", "weight"))):
        inputs = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = F.conv2d(inputs, weight) if spec is None else Int8(spec)(F.conv2d, (inputs, weight), {})
        y.sum().backward()
        assert inputs.grad is not None
        layouts.append((y.stride(), inputs.grad.stride()))
    assert layouts[0] == layouts[1]


def test_stochastic_gradients_follow_torchs_seed() -> None:
    spec = ComputeSpec(format="int8", backward=("input", "weight"), stochastic=True)

    def seeded(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return run("linear", spec)

    assert all(torch.equal(a, b) for a, b in zip(seeded(3), seeded(3), strict=True))
    assert not torch.equal(seeded(3)[1], seeded(4)[1])


def test_batches_of_products() -> None:
    generator = torch.Generator().manual_seed(0)
    for shapes in (((2, 3, 8, 16), (2, 3, 16, 12)), ((5, 8, 16), (16, 12)), ((8, 16), (16, 12))):
        a, b = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
        exact = a @ b
        grad = torch.randn(exact.shape, generator=generator)
        wanted = torch.autograd.grad(exact, (a, b), grad)
        spec = ComputeSpec(format="int8", backward=("input", "weight"))
        real, simulated = (Int8(spec, simulate=simulate)(torch.matmul, (a, b), {}) for simulate in (False, True))
        assert distance(real, simulated) < 1e-5
        got = torch.autograd.grad(real, (a, b), grad)
        for one, other in zip((real, *got), (exact, *wanted), strict=True):
            assert one.shape == other.shape
            assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.998


def test_an_embedding_has_rows_of_codes_and_a_float_gradient() -> None:
    torch.manual_seed(0)
    table, index = torch.randn(20, 8).requires_grad_(), torch.tensor([[1, 2], [2, 5]])
    rows = Int8(ComputeSpec(format="int8"))(F.embedding, (index, table), {"padding_idx": 5})
    assert distance(rows, F.embedding(index, table)) < 0.01
    assert all(len(row.unique()) <= 8 for row in rows.reshape(-1, 8))
    grad = torch.randn(rows.shape)
    wanted = torch.autograd.grad(F.embedding(index, table, padding_idx=5), table, grad)[0]
    assert torch.equal(torch.autograd.grad(rows, table, grad)[0], wanted)


def test_extremes_do_not_saturate() -> None:
    """All codes at their ends: pairs of products that overflow int16 on CPUs without VNNI."""
    x, weight = torch.full((64, 256), 1.0), torch.full((32, 256), -1.0)
    result = Int8(ComputeSpec(format="int8"))(F.linear, (x, weight), {})
    assert torch.allclose(result, torch.full((64, 32), -256.0), rtol=1e-6)


def test_zeros_pass() -> None:
    kernel = Int8(ComputeSpec(format="int8"))
    assert torch.equal(kernel(F.linear, (torch.zeros(3, 8), torch.zeros(4, 8)), {}), torch.zeros(3, 4))


def test_half_precision_and_autocast_keep_their_types() -> None:
    kernel = Int8(ComputeSpec(format="int8"))
    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(4, 16)
    assert kernel(F.linear, (x, weight), {}).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernel(F.linear, (x.float(), weight), {}).dtype == torch.float32
