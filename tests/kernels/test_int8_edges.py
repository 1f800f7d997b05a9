"""INT8 kernels where numbers, shapes and calls are unusual: padding, overflow, NaN, empty batches, other spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import finalize

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitwright as bw
from bitwright.kernels import products
from bitwright.kernels.int8 import Int8
from bitwright.plan import ComputeSpec
from bitwright.quantizers import attachment_of

pytestmark = pytest.mark.skipif(products.missing() is not None, reason=f"no integer products: {products.missing()}")
BOTH = ComputeSpec(format="int8", backward=("input", "weight"))
RANDOM = ComputeSpec(format="int8", backward=("input", "weight"), stochastic=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(one: Tensor, other: Tensor) -> float:
    return float(((one - other).norm() / other.norm()).detach())


def weight_gradients(func: Callable[..., Tensor], x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Of the kernel, and in float."""
    weight = weight.clone().requires_grad_()
    exact = func(x, weight, **options)
    grad = random(*exact.shape, seed=3)
    low = Int8(BOTH)(func, (x, weight), options)
    return torch.autograd.grad(low, weight, grad)[0], torch.autograd.grad(exact, weight, grad)[0]


@pytest.mark.parametrize("empty", [0, 1, 8])
def test_rows_of_zeros_leave_the_weights_gradient_alone(empty: int) -> None:
    """Padding has no scale of its own that could outshout the numbers."""
    tokens, pictures = random(64, 32) * 0.05, random(16, 8, 8, 8).relu() * 0.05
    tokens[:empty], pictures[:empty] = 0, 0
    assert distance(*weight_gradients(F.linear, tokens, random(16, 32))) < 0.03
    assert distance(*weight_gradients(F.conv2d, pictures, random(16, 8, 3, 3))) < 0.03


def test_sums_that_int32_cant_hold() -> None:
    depth = 70_000
    x, weight = torch.ones(4, depth), torch.ones(3, depth)
    bias = torch.tensor([0.0, 1000.0, -1000.0])
    assert torch.allclose(Int8(BOTH)(F.linear, (x, weight, bias), {}), depth + bias.expand(4, 3), rtol=1e-5)
    pictures, kernel = torch.ones(68, 4, 32, 32), torch.randn(2, 4, 1, 1, requires_grad=True)
    gradient = torch.autograd.grad(Int8(BOTH)(F.conv2d, (pictures, kernel), {}).sum(), kernel)[0]
    assert torch.allclose(gradient, torch.full_like(gradient, 68 * 32 * 32), rtol=1e-5)
    # 470·12·12 products in each sum, in two groups
    wide, filters = torch.ones(1, 940, 12, 12), torch.ones(2, 470, 12, 12)
    found = Int8(BOTH)(F.conv2d, (wide, filters), {"groups": 2})
    assert torch.allclose(found, torch.full_like(found, 470 * 144), rtol=1e-5)


@pytest.mark.parametrize("limit", [127, 63])
def test_stochastic_gradients_are_unbiased_number_by_number(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """One operand is the unit matrix, so that each number of the weight's gradient is one of the output's gradient."""
    if limit > products.limit():
        pytest.skip("products saturate here")
    monkeypatch.setattr(products, "limit", lambda: limit)
    torch.manual_seed(0)
    repeats, grad = 500, torch.linspace(-1, 1, 256).view(16, 16)
    x, weight = torch.eye(16), torch.zeros(16, 16, requires_grad=True)
    other = torch.zeros(16, 16, requires_grad=True)
    for func, operand in ((F.linear, weight), (torch.matmul, other)):
        total = torch.zeros(16, 16)
        for _ in range(repeats):
            total += torch.autograd.grad(Int8(RANDOM)(func, (x, operand), {}), operand, grad)[0]
        mean = total / repeats if func is torch.matmul else total.t() / repeats
        assert float((mean - grad).abs().max()) < 5 * 0.5 / repeats**0.5 / limit


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["input", "weight", "gradient"])
@pytest.mark.parametrize("kind", ["linear", "conv", "matmul"])
def test_numbers_that_arent_finite_are_never_swallowed(kind: str, which: str, value: float) -> None:
    known: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
        "linear": (F.linear, (8, 16), (4, 16)),
        "conv": (F.conv2d, (2, 3, 6, 6), (4, 3, 3, 3)),
        "matmul": (torch.matmul, (2, 8, 16), (2, 16, 4)),
    }
    func, left, right = known[kind]
    x, weight = random(*left), random(*right)
    if which != "gradient":
        (x if which == "input" else weight).view(-1)[5] = value
    x.requires_grad_(), weight.requires_grad_()
    y = Int8(BOTH)(func, (x, weight), {})
    assert bool(y.isfinite().all()) == (which == "gradient")
    grad = torch.ones_like(y)
    if which == "gradient":
        grad.view(-1)[3] = value
    to_x, to_weight = torch.autograd.grad(y, (x, weight), grad)
    assert not (to_x.isfinite().all() and to_weight.isfinite().all())
    if kind == "linear" and which == "input":
        assert y.isfinite().all(1).tolist() == [row != 0 for row in range(8)]  # other tokens don't mind


def test_an_embeddings_nan_stays_in_its_row() -> None:
    table = random(5, 4)
    table[2, 1] = float("nan")
    rows = Int8(BOTH)(F.embedding, (torch.tensor([1, 2, 3]), table), {})
    assert rows.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("index", [-1, -9, 8, 0, None])
def test_padding_idx_counts_from_the_end(index: int | None) -> None:
    table, words = random(9, 4).requires_grad_(), torch.tensor([[8, 1], [0, 8]])
    low = Int8(BOTH)(F.embedding, (words, table), {"padding_idx": index})
    grad = random(2, 2, 4)
    wanted = torch.autograd.grad(F.embedding(words, table, padding_idx=index), table, grad)[0]
    assert torch.equal(torch.autograd.grad(low, table, grad)[0], wanted)


@pytest.mark.parametrize(
    ("func", "inputs", "weights"),
    [
        (F.linear, (0, 16), (4, 16)),
        (F.conv2d, (0, 3, 8, 8), (4, 3, 3, 3)),
        (torch.matmul, (0, 8, 16), (0, 16, 4)),
        (torch.matmul, (3, 0, 16), (3, 16, 4)),
    ],
)
def test_empty_batches(func: Callable[..., Tensor], inputs: tuple[int, ...], weights: tuple[int, ...]) -> None:
    x, weight = random(*inputs).requires_grad_(), random(*weights).requires_grad_()
    y = Int8(BOTH)(func, (x, weight), {})
    assert y.shape == func(x, weight).shape
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))  # type: ignore[arg-type]  # mypy: it has one now


def test_an_empty_lookup() -> None:
    table = random(9, 4).requires_grad_()
    Int8(BOTH)(F.embedding, (torch.zeros(0, 3, dtype=torch.long), table), {}).sum().backward()
    assert torch.equal(table.grad, torch.zeros(9, 4))  # type: ignore[arg-type]  # mypy: it has one now


def spellings() -> dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]]:
    a, b, words, table = random(2, 8, 16), random(2, 16, 4, seed=1), torch.tensor([[1, 2]]), random(9, 8)
    return {
        "bmm": (torch.bmm, (a,), {"mat2": b}),
        "mm": (torch.mm, (), {"input": a[0], "mat2": b[0]}),
        "matmul": (torch.matmul, (a,), {"other": b}),
        "method": (Tensor.matmul, (a, b), {}),
        "bmm method": (Tensor.bmm, (a,), {"mat2": b}),
        "@": (Tensor.__matmul__, (a, b), {}),
        "reflected": (Tensor.__rmatmul__, (b, a), {}),
        "torch.embedding": (torch.embedding, (table, words), {}),
        "torch.embedding, names": (torch.embedding, (), {"weight": table, "indices": words}),
        "F.embedding": (F.embedding, (words,), {"weight": table}),
        "torch.conv2d": (torch.conv2d, (random(1, 3, 5, 5),), {"weight": random(2, 3, 3, 3), "padding": "same"}),
    }


@pytest.mark.parametrize("name", list(spellings()))
def test_each_spelling_has_its_own_arguments(name: str) -> None:
    func, args, kwargs = spellings()[name]
    low, exact = Int8(BOTH)(func, args, kwargs), func(*args, **kwargs)
    assert low.shape == exact.shape
    assert 0 < distance(low, exact) < 0.02


def test_what_isnt_known_runs_in_float() -> None:
    a, b, out = random(8, 16), random(16, 4), torch.empty(8, 4)
    assert torch.equal(Int8(BOTH)(torch.matmul, (a, b), {"out": out}), a @ b)
    assert torch.equal(Int8(BOTH)(torch.mv, (a, b[:, 0]), {}), a @ b[:, 0])
    assert torch.equal(Int8(BOTH)(F.linear, (a, b[:, 0]), {}), F.linear(a, b[:, 0]))  # once killed the process


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # torch's own, of the float twin
@pytest.mark.parametrize(
    ("inputs", "weights", "options"),
    [
        ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": "same"}),
        ((2, 3, 8, 9), (4, 3, 4, 2), {"padding": "same", "dilation": (1, 3)}),
        ((2, 3, 8, 8), (4, 3, 3, 3), {"padding": "valid", "stride": 2}),
        ((3, 8, 8), (4, 3, 3, 3), {"padding": 1}),
        ((2, 8, 20), (6, 8, 4), {"padding": "same"}),
        ((8, 20), (6, 8, 5), {}),
    ],
)
def test_words_for_padding_and_single_pictures_run_in_integers(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[int, ...], weights: tuple[int, ...], options: dict[str, Any]
) -> None:
    calls = []
    run = products.onednn_conv2d

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return run(*args)

    monkeypatch.setattr(products, "onednn_conv2d", counted)
    func = F.conv1d if len(weights) == 3 else F.conv2d
    x, weight = random(*inputs).requires_grad_(), random(*weights).requires_grad_()
    low, exact = Int8(BOTH)(func, (x, weight), options), func(x, weight, **options)
    assert calls
    assert low.shape == exact.shape
    grad = random(*exact.shape)
    wanted = torch.autograd.grad(exact, (x, weight), grad)
    for one, other in zip((low, *torch.autograd.grad(low, (x, weight), grad)), (exact, *wanted), strict=True):
        assert one.shape == other.shape
        assert distance(one, other) < 0.03


def test_what_stays_float_isnt_planned() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vector = nn.Parameter(torch.randn(4))
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(x * F.linear(x, self.vector)[:, None]) + (x @ self.vector)[:, None]
            return result

    model = bw.prepare(Odd(), bw.Plan(compute={"*": BOTH}), inputs=torch.randn(3, 4))
    assert list(attachment_of(model).kernels) == ["last"]
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(bw.BitwrightError) as raised:
        bw.prepare(Odd(), bw.Plan(compute={"/linear#0": BOTH}), inputs=torch.randn(3, 4))
    assert raised.value.codes == ["kernel-not-applicable"]


@pytest.mark.parametrize("limit", [127, 63])
def test_one_scale_for_the_tensor(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A small token beside a large one is rounded to the large one's grid, forward and backward."""
    if limit > products.limit():
        pytest.skip("products saturate here")
    monkeypatch.setattr(products, "limit", lambda: limit)
    x, weight = random(8, 16) * torch.logspace(-3, 0, 8)[:, None], random(4, 16)
    spec = ComputeSpec(format="int8", backward=("input", "weight"), scales="tensor")
    errors = {}
    for name, one in (("row", BOTH), ("tensor", spec)):
        for simulate in (True, False):
            y = Int8(one, simulate=simulate)(F.linear, (x, weight), {})
            errors[name, simulate] = distance(y[0], (x @ weight.t())[0])
    assert errors["tensor", False] > 10 * errors["row", False]
    assert errors["tensor", False] == pytest.approx(errors["tensor", True], rel=1e-4)
    for func, right in ((torch.matmul, random(16, 4)), (F.linear, weight)):
        a, b = random(8, 16).requires_grad_(), right.clone().requires_grad_()
        exact, low = func(a, b), Int8(spec)(func, (a, b), {})
        wanted, got = (torch.autograd.grad(y.square().sum(), (a, b)) for y in (exact, low))
        assert max(distance(one, other) for one, other in zip((low, *got), (exact, *wanted), strict=True)) < 0.05
    rows = Int8(spec)(F.embedding, (torch.tensor([0, 1]), x), {})
    assert len(rows[0].unique()) < 8


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operators have made and that are still there; the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            opaque = not isinstance(tensor, Tensor) or tensor.layout != torch.strided  # packed weights
            if not opaque and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _gone(self, name: int, bytes: int) -> None:
        self.known.discard(name)
        self.now -= bytes


@pytest.mark.parametrize("spec", [ComputeSpec(format="int8"), BOTH])
def test_backward_never_has_the_input_in_float_and_its_gradient_at_once(
    spec: ComputeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a layer is widest that decides how much memory a step takes."""
    monkeypatch.setattr(products, "_AT_ONCE", 1)  # parts as small to these tensors as they are to wide layers
    monkeypatch.setattr(products, "_ROWS_AT_ONCE", 8)
    monkeypatch.setattr(products._OWN, "space", None)  # else it is as large as other tests wanted it
    for func, x, weight, options in (
        (F.linear, random(64, 512), random(8, 512), {}),
        (F.conv2d, random(2, 64, 12, 12).to(memory_format=torch.channels_last), random(4, 64, 1, 1), {}),
    ):
        x = x.requires_grad_()
        low = Int8(spec)(func, (x, weight.requires_grad_()), options)
        grad = torch.ones_like(low)
        with Alive() as alive:
            torch.autograd.grad(low, (x, weight), grad)
        assert alive.most < 1.9 * x.numel() * x.element_size()  # both at once are 2.25, with the codes
