"""What happens at operators: in-place writes, modules that are called again, tied weights, memory formats."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwright.backends import place
from bitwright.core.errors import BitwrightError
from bitwright.core.formats import Format
from bitwright.graph import capture
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare, quantizers_of


def spec(text: str, **options: Any) -> SiteSpec:
    return SiteSpec(format=Format.parse(text), **options)


COARSE = "int4/tensor/sym"


class Writes(nn.Module):
    """One way of writing into a tensor that the caller then goes on with."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.write = write
        self.gain = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x * self.gain
        whole = x
        self.write(x, y)
        return x, whole


def add_method(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def add_operator(x: Tensor, y: Tensor) -> None:
    x += y


def relu_inplace(x: Tensor, y: Tensor) -> None:
    F.relu(x, inplace=True)


def multiply(x: Tensor, y: Tensor) -> None:
    x.mul_(y)


def set_item(x: Tensor, y: Tensor) -> None:
    x[:, 1] = y[:, 0]


def item(x: Tensor, y: Tensor) -> None:
    x[1:].add_(y[1:])


CASES = [
    (add_method, "add", lambda q, x, y: q.o(q.i0(x) + q.i1(y))),
    (add_operator, "add", lambda q, x, y: q.o(q.i0(x) + q.i1(y))),
    (relu_inplace, "relu", lambda q, x, y: q.o(F.relu(q.i0(x)))),
    (multiply, "mul", lambda q, x, y: q.o(q.i0(x) * q.i1(y))),
    (
        set_item,
        "setitem",
        lambda q, x, y: q.o(torch.cat([q.i0(x)[:, :1], q.i1(y[:, 0])[:, None], q.i0(x)[:, 2:]], 1)),
    ),
    (item, "add", lambda q, x, y: torch.cat([x[:1], q.o(q.i0(x[1:]) + q.i1(y[1:]))])),
]


@pytest.mark.parametrize(("write", "kind", "by_hand"), CASES, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("ports", [("i0",), ("i1",), ("o",), ("i0", "i1", "o")], ids="-".join)
@pytest.mark.parametrize("quantizer", ["plain", "lsq"])
def test_writing_in_place(write: Any, kind: str, by_hand: Any, ports: tuple[str, ...], quantizer: str) -> None:
    torch.manual_seed(0)
    model = Writes(write)
    index = 1 if kind == "mul" else 0  # the first mul is the gain
    names = {"i0": "input" if kind == "relu" else "input0", "i1": "input1", "o": "output"}
    if kind == "relu":
        ports = tuple(port for port in ports if port != "i1")
        if not ports:
            return
    sites = {port: f"/{kind}#{index}:{names[port]}" for port in ports}
    prepare(model, Plan(sites={site: spec(COARSE, quantizer=quantizer) for site in sites.values()}))
    x, y = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    calibrate(model, [(x, y)])
    found = quantizers_of(model)
    use = SimpleNamespace(**{port: found.get(sites.get(port, ""), lambda x: x) for port in names})

    given = x.clone()
    out, whole = model(given, y)
    assert torch.equal(given, x)
    assert out is whole
    expected = by_hand(use, x * model.gain, y)
    assert torch.equal(out, expected)
    weights = torch.randn(3, 4)
    learned = [model.gain, y, *(q.scale for q in found.values() if q.scale.requires_grad)]
    ours = torch.autograd.grad((out * weights).sum(), learned, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), learned, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-6)


class Twice(nn.Module):
    """One linear and one ReLU, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.linear(x))
        return self.relu(self.linear(x * 10))


def test_a_module_called_twice_has_two_inputs_and_one_weight() -> None:
    model = Twice().eval()
    x = torch.randn(16, 4)
    weight = spec(COARSE)
    plan = Plan(
        sites={
            "linear:input": spec("int8/tensor/sym"),
            "linear#1:input": spec("int8/tensor/sym"),
            "linear:weight": weight,
        }
    )
    prepare(model, plan)
    calibrate(model, [x])
    q = quantizers_of(model)
    assert set(q) == {"linear:input", "linear#1:input", "linear:weight"}
    assert q["linear#1:input"].scale > 2 * q["linear:input"].scale
    w, b = q["linear:weight"](model.linear.weight), model.linear.bias
    hidden = F.relu(F.linear(q["linear:input"](x), w, b))
    assert torch.equal(model(x), F.relu(F.linear(q["linear#1:input"](hidden * 10), w, b)))


def test_a_call_that_the_plan_leaves_out_is_float_when_the_graph_knows_it() -> None:
    """For example a shared ReLU whose last result is the model's output."""
    model = Twice().eval()
    x = torch.randn(16, 4)
    graph = capture(model, x)
    site = {"relu:output": spec(COARSE)}
    explicit = copy.deepcopy(model)
    prepare(model, Plan(sites=site), graph=graph)
    prepare(explicit, Plan(sites={**site, "relu#1:output": SiteSpec()}))
    for prepared in (model, explicit):
        calibrate(prepared, [x])
        hidden = quantizers_of(prepared)["relu:output"](F.relu(prepared.linear(x)))
        assert torch.equal(prepared(x), F.relu(prepared.linear(hidden * 10)))


def test_a_placed_plan_keeps_the_format_of_the_second_call() -> None:
    model = Twice().eval()
    x = torch.randn(16, 4)
    graph = capture(model, x)
    plan = place(graph, "academic", activations="int4/tensor/sym")
    assert "relu#1:output" not in {site for site, _ in plan.quantized}
    prepare(model, plan, graph=graph)
    calibrate(model, [x])
    assert model(x).unique().numel() > 16


class Loop(nn.Module):
    """As many steps as asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(self.cell(x)) * 1.5
        return x


def test_more_calls_than_recorded_take_the_last_known_quantizers() -> None:
    model = Loop()
    x = torch.randn(8, 4)
    names = ["cell:input", "cell#1:input"]
    prepare(model, Plan(sites=dict.fromkeys([*names, "cell:weight"], spec(COARSE))))
    calibrate(model, [(x, 2)])
    q = quantizers_of(model)
    w = q["cell:weight"](model.cell.weight)
    out = x
    for step in range(5):
        out = torch.tanh(F.linear(q[names[min(step, 1)]](out), w, model.cell.bias)) * 1.5
    assert torch.equal(model(x, 5), out)


class Tied(nn.Module):
    """An embedding whose table is also the last linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def test_tied_weights_have_one_quantizer() -> None:
    model = Tied()
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 6]])
    prepare(model, Plan(sites={"*:weight": spec("int4/channel/sym")}), inputs=tokens)
    calibrate(model, [tokens])
    assert list(quantizers_of(model)) == ["table:weight"]
    w = quantizers_of(model)["table:weight"](model.table.weight)
    assert torch.equal(model(tokens), F.linear(F.embedding(tokens, w), w))
    tokens_loss = model(tokens).square().sum()
    tokens_loss.backward()
    assert model.table.weight.grad is not None


def test_channels_last(zoo: SimpleNamespace) -> None:
    model = zoo.quantized(zoo.seeded(zoo.Residual).eval())
    x = zoo.example(model)
    expected = model(x)
    model.to(memory_format=torch.channels_last)
    out = model(x.to(memory_format=torch.channels_last))
    # one code may fall on the other side of a half: that is a step of the output's grid, not an error
    assert torch.allclose(out, expected, atol=0.05 * expected.detach().abs().max().item())
    fine = zoo.quantized(zoo.seeded(zoo.Residual).eval(), weights="int16/channel/sym", activations="uint16/tensor/asym")
    last = copy.deepcopy(fine).to(memory_format=torch.channels_last)
    assert torch.allclose(last(x.to(memory_format=torch.channels_last)), fine(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_with_quantizers(reentrant: bool) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self.save = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant) if self.save else self.block(x)

    model = Stack()
    x = torch.randn(8, 4, requires_grad=True)
    prepare(model, Plan(sites={"block.0:weight": spec(COARSE), "block.2:input": spec(COARSE)}))
    calibrate(model, [x.detach()])
    results = []
    for save in (False, True):
        model.save = save
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        results.append((out, [p.grad.clone() for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_keyword_weights_are_found() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.w = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(input=x, weight=self.w, bias=None)

    model = Keywords()
    x = torch.randn(2, 4)
    prepare(model, Plan(sites={"/linear#0:weight": spec(COARSE), "/linear#0:input": spec(COARSE)}))
    calibrate(model, [x])
    q = quantizers_of(model)
    expected = F.linear(q["/linear#0:input"](x), q["/linear#0:weight"](model.w))
    assert torch.equal(model(x), expected)


def test_sites_of_modules_without_operator_are_rejected() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(BitwrightError) as raised:
        prepare(model, Plan(sites={"0:weight": spec(COARSE)}))
    assert raised.value.codes == ["unknown-site"]
