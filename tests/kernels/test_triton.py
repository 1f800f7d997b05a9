"""Triton kernels in its interpreter against integers of NumPy and the CPU kernels, and compiled for three devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from int8_calls import CALLS
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from triton_process import Remote, compiled, gradients, integers, needs_triton, process, train

from bitwright.kernels import codes
from bitwright.kernels.codes import Codes, Signed
from bitwright.kernels.products import missing

pytestmark = needs_triton
needs_onednn = pytest.mark.skipif(missing() is not None, reason=f"no integer products: {missing()}")


def examples(count: int) -> settings:
    """Each example of the interpreter takes some tenths of a second."""
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Remote]:
    with process(TRITON_INTERPRET="1") as call:
        yield call


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    with process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))) as call:
        yield call


floats = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e-40, 0.5, float("nan")])
matrices = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=4, max_side=9), elements=floats)


@given(matrices, st.booleans(), st.booleans(), st.none() | st.integers(0, 2**40), st.booleans())
@examples(40)
def test_codes_are_those_of_the_cpu(
    interpreter: Remote, array: np.ndarray, signed: bool, whole: bool, seed: int | None, last: bool
) -> None:
    x = torch.from_numpy(array)
    x = x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x
    options = {"signed": signed, "whole": whole}
    wanted, found = codes.encode(x, seed, **options), interpreter(codes.encode, x, seed, **options)
    assert torch.equal(found.scales.isnan(), wanted.scales.isnan())
    valid = ~wanted.scales.isnan()
    assert torch.equal(found.scales[valid], wanted.scales[valid])
    assert int(found.zero) == wanted.zero
    assert found.values.stride() == wanted.values.stride()
    rows = valid.expand(len(x))
    assert torch.equal(found.values[rows], wanted.values[rows])


@given(matrices, st.sampled_from([127, 63]), st.booleans())
@examples(20)
def test_signed_codes_are_those_of_the_cpu(interpreter: Remote, array: np.ndarray, limit: int, whole: bool) -> None:
    x = torch.from_numpy(array).flatten(1)
    for encode in (codes.encode_rows, codes.encode_columns):
        wanted, found = encode(x, limit, whole=whole), interpreter(encode, x, limit, whole=whole)
        valid = ~wanted.scales.isnan()
        assert torch.equal(found.scales.isnan(), ~valid)
        assert torch.equal(found.scales[valid], wanted.scales[valid])
        assert torch.equal(found.values[valid], wanted.values[valid])


def test_16_bit_floats_are_encoded_as_their_values(interpreter: Remote) -> None:
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(interpreter(codes.encode, x).values, codes.encode(x.float()).values)


def drawn(seed: int, *shape: int, signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if signed:
        return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def numbers(values: Tensor, zero: int = 0) -> np.ndarray:
    return values.numpy().astype(np.int64) - zero


sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31)
zeros = st.sampled_from([0, 128])
#: Sums are split as those that int32 can't hold.
splits = st.sampled_from([None, 32])


@given(sizes, sizes, st.integers(1, 70), zeros, st.booleans(), splits, seeds)
@examples(20)
def test_products_are_exact(
    interpreter: Remote, rows: int, columns: int, depth: int, zero: int, half: bool, most: int | None, seed: int
) -> None:
    x, weight = drawn(seed, rows, depth, signed=False), drawn(seed + 1, columns, depth, signed=True)
    steps, scales, bias = (
        2.0 ** torch.arange(-3, rows - 3).remainder(5),
        torch.full((columns,), 0.5),
        torch.ones(columns),
    )
    found = interpreter(integers, "linear", Codes(x, steps, zero), Signed(weight, scales), bias, half=half, most=most)
    wanted = numbers(x, zero) @ numbers(weight).T * steps.numpy().astype(np.float64)[:, None] * 0.5 + 1
    assert np.array_equal(found.numpy(), wanted)
    grad = drawn(seed + 2, rows, columns, signed=False)
    other = interpreter(
        integers, "transposed", Codes(grad, torch.tensor([0.25]), 128), Codes(x, steps, zero), half=half, most=most
    )
    assert np.array_equal(other.numpy(), numbers(grad, 128).T @ numbers(x, zero) * 0.25)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("most", [None, 32])
def test_an_activation_follows_the_bias(interpreter: Remote, activation: str, most: int | None) -> None:
    x, weight, bias = drawn(0, 9, 70, signed=False), drawn(1, 20, 70, signed=True), torch.linspace(-3, 3, 20)
    given = (Codes(x, torch.full((1,), 0.01), 128), Signed(weight, torch.full((20,), 0.01)), bias)
    plain = interpreter(integers, "linear", *given, most=most)
    found = interpreter(integers, "linear", *given, most=most, activation=activation)
    torch.testing.assert_close(found, getattr(torch.nn.functional, activation)(plain), rtol=1e-5, atol=1e-6)


def test_rows_with_nan_have_nan_results(interpreter: Remote) -> None:
    x, weight = drawn(0, 3, 8, signed=False), drawn(1, 4, 8, signed=True)
    steps = torch.tensor([1.0, float("nan"), 1.0])
    for activation in ("none", "relu"):
        found = interpreter(
            integers, "linear", Codes(x, steps, 0), Signed(weight, torch.ones(4)), None, activation=activation
        )
        assert found.isnan().all(1).tolist() == [False, True, False]


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...], int]:
    """Input shape, weight shape, stride, padding and dilation, and groups."""
    kernel, stride, dilation = draw(pairs), draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    groups, ins, outs = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    image = [
        draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 10))
        for d, k, p in zip(dilation, kernel, padding, strict=True)
    ]
    batch = draw(st.integers(1, 3))
    return (batch, groups * ins, *image), (groups * outs, ins, *kernel), (stride, padding, dilation), groups


def windows(x: np.ndarray, kernel: tuple[int, ...], shape: tuple[tuple[int, ...], ...], groups: int) -> np.ndarray:
    """(sample, group, channel, row, column, kernel row, kernel column)"""
    stride, padding, dilation = shape
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    seen = sliding_window_view(x, reach, axis=(2, 3))
    seen = seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    return seen.reshape(len(x), groups, -1, *seen.shape[2:])


@given(convolutions(), zeros, st.booleans(), splits, st.booleans(), seeds)
@examples(20)
def test_convolutions_and_their_gradients_are_exact(
    interpreter: Remote, case: tuple, zero: int, half: bool, most: int | None, last: bool, seed: int
) -> None:
    (batch, channels, *image), (outputs, ins, *kernel), shape, groups = case
    x, weight = drawn(seed, batch, channels, *image, signed=False), drawn(seed + 1, outputs, ins, *kernel, signed=True)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    steps, scales = 2.0 ** -torch.arange(batch), torch.full((outputs,), 0.5)
    found = interpreter(
        integers, "conv2d", Codes(x, steps, zero), Signed(weight, scales), None, *shape, groups, half=half
    )
    grouped = numbers(weight).reshape(groups, -1, ins, *kernel)
    seen = windows(numbers(x, zero), tuple(kernel), shape, groups)
    wanted = np.einsum("ngcyxrs,gocrs->ngoyx", seen, grouped)
    wanted = wanted.reshape(batch, outputs, *wanted.shape[3:]) * 0.5
    assert np.array_equal(found.numpy(), wanted * steps.numpy().astype(np.float64).reshape(-1, 1, 1, 1))
    assert found.is_contiguous(memory_format=torch.channels_last)

    grad = drawn(seed + 2, *found.shape, signed=False)
    signed = numbers(grad, 128).reshape(batch, groups, -1, *found.shape[2:])
    one = Codes(grad, torch.tensor([0.25]), 128)
    found = interpreter(
        integers, "conv2d_weight", one, Codes(x, steps, zero), kernel, *shape, groups, half=half, most=most
    )
    wanted = np.einsum("ngcyxrs,ngoyx->gocrs", seen, signed).reshape(outputs, ins, *kernel) * 0.25
    assert np.array_equal(found.numpy(), wanted)

    rows = weight.view(groups, outputs // groups, ins, *kernel).transpose(1, 2).reshape(channels, -1, *kernel)
    turned = Signed(rows, torch.full((channels,), 0.5))
    found = interpreter(integers, "conv2d_input", one, turned, image, *shape, groups, half=half)
    stride, padding, dilation = shape
    wanted = np.zeros((batch, groups, ins, *(n + 2 * p for n, p in zip(image, padding, strict=True))))
    moved = np.einsum("ngoyx,gocrs->ngcyxrs", signed, grouped) * 0.125
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            ends = [d * r + s * n for d, r, s, n in zip(dilation, (row, column), stride, moved.shape[3:5], strict=True)]
            down = slice(dilation[0] * row, ends[0], stride[0])
            across = slice(dilation[1] * column, ends[1], stride[1])
            wanted[:, :, :, down, across] += moved[..., row, column]
    wanted = wanted.reshape(batch, channels, *wanted.shape[3:])
    inner = [slice(p, p + n) for p, n in zip(padding, image, strict=True)]
    assert np.array_equal(found.numpy(), wanted[:, :, *inner])


@needs_onednn
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_cpu_kernel(interpreter: Remote, name: str) -> None:
    """On CPUs without VNNI, weights have smaller codes. Strided and grouped gradients are float there."""
    found = interpreter(gradients, name, ("input", "weight"), False)
    simulated = interpreter(gradients, name, ("input", "weight"), True)
    assert len(found) == 4
    for real, same, cpu in zip(found, simulated, gradients(name, ("input", "weight"), False), strict=True):
        torch.testing.assert_close(real, same, rtol=1e-4, atol=1e-4)
        assert real.shape == cpu.shape
        assert torch.cosine_similarity(real.flatten(), cpu.flatten(), dim=0) > 0.998


def test_the_trainer_trains_with_triton(interpreter: Remote) -> None:
    losses, notes, weights = interpreter(train, 0)
    plain, others, _ = train(0)
    assert "products of int8 run in Triton" in notes
    assert not any("stay in float" in note for note in notes)
    assert any("stay in float" in note for note in others)
    assert losses == pytest.approx(plain, rel=0.1)
    assert losses[-1] < losses[0]
    again = interpreter(train, 0)[2]
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def check(found: list[dict[str, str]], capability: int) -> None:
    for kernel in found:
        assert re.search(rf"\.target sm_{capability}", kernel["ptx"])
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", kernel["log"])
        assert spills, kernel["log"]
        assert set(spills) == {"0"}, kernel["name"]
        if capability >= 80 and "codes" not in kernel["name"] and "ranges" not in kernel["name"]:
            assert re.search(r"mma\S*\.s32\.s8\.s8", kernel["ptx"]), f"{kernel['name']}: no tensor cores"


@pytest.mark.parametrize("group", ["products", "codes"])
@pytest.mark.parametrize("capability", [75, 80, 90])
def test_kernels_compile_without_spills(compiler: Remote, capability: int, group: str) -> None:
    found = compiler(compiled, capability, group)
    assert len(found) == 4
    check(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["aligned tiles", "unaligned tiles"])
@pytest.mark.parametrize("capability", [75, 80, 90])
def test_all_tiles_compile_without_spills(compiler: Remote, capability: int, group: str) -> None:
    check(compiler(compiled, capability, group), capability)


def test_every_kernel_is_compiled_by_these_tests() -> None:
    folder = Path(codes.__file__).parent / "triton"
    defined = {name for file in folder.glob("*.py") for name in re.findall(r"def (\w+_kernel)\(", file.read_text())}
    assert defined == {
        "ranges_kernel",
        "codes_kernel",
        "gemm_kernel",
        "convolution_kernel",
        "weight_gradient_kernel",
    }
