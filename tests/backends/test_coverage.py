"""Every parameter and every operator that multiplies is quantized, or the plan lists it with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import capture, make_plan
from bitwright.backends.placement import readers, unlisted
from bitwright.core.errors import PlanError
from bitwright.graph import Source
from bitwright.plan import Plan


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.where = nn.Embedding(16, 8), nn.Parameter(torch.randn(4, 8))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(self.tokens(x) + self.where))


class Experts(nn.Module):
    """A mixture of experts as transformers runs it: one grouped product over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 2), nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Any:
        ends = torch.tensor([2, len(x)], dtype=torch.int32)
        return torch._grouped_mm(x, self.experts, offs=ends) * self.router(x).sigmoid()[:, :1]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(Double.apply(x, self.weight))


class Combined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.a @ self.b) * self.scale


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.rnn(x)[0])


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.spectrum = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Any:
        mixed = torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=8)
        return torch.einsum("bi,kij->bkj", mixed, self.weight)


class Normed(nn.Module):
    """Norms that read the integers of a convolution, and compute in float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self.conv(x)) + self.instance(self.conv(x))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, set[str]]] = {
    "unused": (Unused, torch.randn(2, 8), {"other.weight", "other.bias"}),
    "positions": (Positions, torch.randint(16, (2, 4)), {"tokens", "norm"}),
    "experts": (Experts, torch.randn(4, 16), set()),
    "custom": (Custom, torch.randn(2, 8), set()),
    "combined": (Combined, torch.randn(2, 8), {"/mul#0"}),
    "attention": (Attention, torch.randn(2, 3, 8), set()),
    "recurrent": (Recurrent, torch.randn(2, 3, 8), {"rnn"}),
    "einsum": (Einsum, torch.randn(2, 8), {"/mul#0"}),
    "normed": (Normed, torch.randn(2, 3, 8, 8), {"group", "instance"}),
}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "academic"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_out(case: str, backend: str) -> None:
    make, x, expected = CASES[case]
    torch.manual_seed(0)
    model = make().eval()
    graph = capture(model, (x,))
    plan = make_plan(graph, backend)
    assert expected <= plan.float.keys()
    assert all(plan.float.values())
    assert plan.validate(graph) == []
    assert Plan.from_yaml(plan.to_yaml()) == plan
    # an independent, coarser rule: a listed or quantized operator in the module of each parameter, or around it
    operators = {site.rpartition(":")[0] for site, spec in plan.sites.items() if spec.quantizes} | set(plan.float)
    modules = {name.partition("/")[0].partition("#")[0] for name in operators} | {*plan.fold}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        around = {".".join(parts[:length]) for length in range(len(parts) + 1)}
        assert around & modules, name


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "ncnn", "academic"])
@pytest.mark.parametrize("weights", ["int8/channel/sym", "int4/group8/sym"])
@pytest.mark.parametrize("case", ["positions", "normed", "attention", "biased"])
def test_every_parameter_has_a_quantizer_of_its_own_or_a_reason(case: str, backend: str, weights: str) -> None:
    make, x, _ = CASES.get(case, (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8), set()))
    graph = capture(make().eval(), (x,))
    try:
        plan = make_plan(graph, backend, weights=weights)
    except PlanError:
        pytest.skip("the backend doesn't have this format")
    placed = {site for site, spec in plan.sites.items() if spec.quantizes}
    assert graph.parameters
    for parameter in graph.parameters:
        uses = readers(graph, Source("param", parameter.names[0]))
        assert parameter.names[0] in plan.float or all(
            op.site(port.name) in placed or op.name in {*plan.float, *plan.folds} for op, port in uses
        )


def test_a_plan_that_omits_something_is_found() -> None:
    graph = capture(Positions().eval(), (torch.randint(16, (2, 4)),))
    plan = make_plan(graph)
    assert [problem.where for problem in unlisted(graph, Plan(sites=plan.sites))] == [
        "where (read by /add#0)",
        "tokens.weight (read by tokens)",
        "norm.weight (read by norm)",
        "norm.bias (read by norm)",
    ]
    assert {problem.code for problem in unlisted(graph, Plan())} == {"unlisted"}


def test_no_plan_is_made_that_omits_something(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(Unused().eval(), (torch.randn(2, 8),))
    monkeypatch.setattr("bitwright.backends.placement.left_in_float", lambda decisions, sites: {})
    with pytest.raises(PlanError) as caught:
        make_plan(graph)
    assert caught.value.codes == ["unlisted", "unlisted"]
