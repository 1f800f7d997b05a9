"""Models with unusual code, all the way to ONNX Runtime: each reaches parity, or is refused with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import BitwrightError, capture, make_plan, quantize, quantizers_of
from bitwright.ptq.quantize import Quantized
from bitwright.quantizers import in_mode, warnings_of


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


TRANSFORMS: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "vmap": lambda m, x: torch.vmap(lambda row: m.w @ row)(m.first(x)),
    "jvp": lambda m, x: m.last(torch.func.jvp(lambda y: torch.tanh(y @ m.w), (x,), (x,))[1]),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, within jvp
@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_operators_within_transforms_stay_in_float_and_are_listed(name: str) -> None:
    model = Odd(TRANSFORMS[name])
    expected = model(batches()[0]).detach()
    quantized = quantize(model, batches())
    assert any("transformed_" in operator for operator in quantized.plan.float)
    found = quantized.model(batches()[0]).detach()
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.1


def test_a_model_that_cant_be_recorded_is_refused_with_the_line() -> None:
    """torch.cond compiles its branches, which nothing can look into."""
    model = Odd(lambda m, x: torch.cond(x.sum() > 0, lambda a: m.first(a), lambda a: m.first(a) * 2, (x,)))
    with pytest.raises(BitwrightError) as caught:
        quantize(model, batches())
    assert caught.value.codes == ["recording-failed"]
    assert caught.value.problems[0].where


def test_a_weight_with_channels_along_two_axes_has_one_scale(tmp_path: Path) -> None:
    """`F.linear(x, w)` has its output channels in the rows of `w`, `x @ w` in its columns."""
    quantized = deploy(Odd(lambda m, x: m.last(m.first(x).relu() @ m.first.weight)), batches(), tmp_path)
    assert quantized.plan.sites["first:weight"].format.granularity == "tensor"
    assert quantized.plan.sites["/matmul#0:input1"].share == "first:weight"
    assert quantized.plan.sites["last:weight"].format.granularity == "channel"


class Stateful(nn.Module):
    """Subtracts a running mean that every call moves, and counts its calls."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.reads = nn.Linear(8, 4), reads
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))
        self.mean: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return self.fc(x - self.mean if self.reads else x)


@pytest.mark.parametrize("reads", [True, False])
def test_buffers_that_a_forward_changes_are_named(reads: bool, tmp_path: Path) -> None:
    quantized = quantize(Stateful(reads), batches())
    artefact = quantized.export(tmp_path / "model.onnx")
    found = [problem.where for problem in artefact.warnings if problem.code == "stateful-model"]
    assert found == (["mean"] if reads else [])


@pytest.mark.parametrize("shape", [(0, 4), (8, 0)])
def test_weights_without_elements_stay_in_float(shape: tuple[int, int], tmp_path: Path) -> None:
    model = Odd(lambda m, x: torch.cat([m.last(x), m.empty(x[:, : shape[0]])], 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is nothing to initialize
        model.empty = nn.Linear(*shape)
    quantized = deploy(model, batches(), tmp_path)
    assert quantized.plan.float["empty"] == "its weight has no elements"


@pytest.mark.parametrize("function", [torch.ops.aten.mm, torch.ops.aten.mm.default, torch.sparse.mm])
def test_products_under_other_names_are_listed(function: Any) -> None:
    graph = capture(Odd(lambda m, x: m.last(function(x, m.first(x).T @ x))), batches()[0])
    plan = make_plan(graph)
    listed = {name for name in plan.float if "mm" in name}
    quantized = {op.name for op in graph.ops if op.kind == "matmul" and op.name not in plan.float}
    assert listed or len(quantized) == 2


class Chooses(nn.Module):
    """Keeps the k largest features; zeros after a ReLU are ties."""

    def __init__(self, *, method: bool, largest: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.method, self.largest = method, largest

    def forward(self, x: Tensor) -> Tensor:
        scores = F.relu(self.scores(x))
        if self.method:
            chosen = scores.topk(6, dim=-1, largest=self.largest).indices
        else:
            chosen = torch.topk(scores, k=6, largest=self.largest)[1]
        return self.head(torch.zeros_like(x).scatter(-1, chosen, 1.0) * x)


@pytest.mark.parametrize(("method", "largest"), [(True, True), (False, False)])
def test_ties_of_topk_are_broken_as_onnx_does(method: bool, largest: bool, tmp_path: Path) -> None:
    """torch leaves the order of equal values open; ONNX takes the lowest index. The float model stays torch's."""
    model = Chooses(method=method, largest=largest).eval()
    data = batches(64, 8)
    before = model(data[0])
    deploy(model, data, tmp_path)
    with in_mode(model, "float"):
        assert torch.equal(model(data[0]), before)


class Mixed(nn.Module):
    """A quantized layer, and one that the backend has no integer rule for, beside operators of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.leaky_relu(self.down(x)))


def test_a_layer_that_the_plan_keeps_in_float_is_not_reported_as_unseen(tmp_path: Path) -> None:
    quantized = deploy(Mixed().eval(), batches(2, 3, 8, 8), tmp_path)
    assert "up" in quantized.plan.float
    assert [problem.code for problem in warnings_of(quantized.model)] == []


FAST = ("NestedDict", "SharedModule", "Tied", "Mha", "Deconv", "OptNoneKw", "NT")  # the most different ones


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, in its encoder
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # as above, with norm_first
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in odd_models.CASES]
)
def test_an_unusual_model_reaches_parity_or_is_refused(name: str, tmp_path: Path) -> None:
    """Unusual operators, inputs and outputs. A model is refused only if torch can't export its float version."""
    build, draw = odd_models.CASES[name]
    torch.manual_seed(1)
    data = [draw() for _ in range(3)]
    quantized = quantize(build().eval(), data)
    if name in odd_models.REFUSED:
        with pytest.raises(BitwrightError) as caught:
            quantized.export(tmp_path / "model.onnx")
        assert caught.value.codes == [odd_models.REFUSED[name]]
        assert caught.value.problems[0].fix
        return
    artefact = quantized.export(tmp_path / "model.onnx")
    check = quantized.check(artefact.path, data)
    assert check.passed
    assert min(output.sqnr_db for output in check.outputs) > 100  # no difference but that of float sums
    assert list(quantized.plan.quantized)
    if name == "Lin0":
        assert not artefact.dynamic_batch  # its code depends on the batch size
