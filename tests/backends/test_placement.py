"""Where each backend puts quantizers: exact lists of sites."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import raises_problem
from torch import Tensor, nn

from bitwright.backends import backend, check_plan, place
from bitwright.core.errors import PlanError
from bitwright.graph import Graph, capture
from bitwright.plan import FoldSpec, Plan

torch.set_num_threads(1)

BACKENDS = ["academic", "tensorrt", "onnxruntime", "openvino"]


class Residual(nn.Module):
    """A stem, then a block whose shortcut is the stem's output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.head(F.relu(y + x))


class Downsampled(nn.Module):
    """A block whose shortcut has a convolution of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return F.relu(self.bn(self.conv(x)) + self.down(x)).mean((2, 3))


class Separable(nn.Module):
    """Convolution, norm, activation; depthwise; pooling; classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1, self.act1 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        self.depth, self.bn2, self.act2 = (
            nn.Conv2d(8, 8, 3, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
        )
        self.point = nn.Conv2d(8, 8, 1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv(x)))
        x = self.act2(self.bn2(self.depth(x)))
        return self.fc(self.pool(self.point(x)).flatten(1))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.end = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.cat([self.a(x).relu(), self.b(x).relu()], 1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        s = (self.q(h) @ self.k(h).transpose(-1, -2)).softmax(-1)
        x = x + self.o(s @ self.v(h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(F.relu(self.stem(x)), (0, 1, 0, 1)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.body(self.embed(ids))))


INPUTS: dict[type[nn.Module], Any] = {
    Residual: torch.randn(1, 3, 8, 8),
    Downsampled: torch.randn(1, 3, 8, 8),
    Separable: torch.randn(1, 3, 8, 8),
    Concat: torch.randn(1, 3, 8, 8),
    Transformer: torch.randn(2, 5, 8),
    Padded: torch.randn(1, 3, 8, 8),
    Tied: torch.tensor([[1, 2]]),
}


@cache
def graph_of(model: type[nn.Module]) -> Graph:
    return capture(model(), INPUTS[model])


def text(plan: Plan) -> list[str]:
    """The sites, `site=owner` where the quantizer is another site's; biases apart."""
    return [
        f"{site}={spec.share}" if spec.share else site
        for site, spec in plan.sites.items()
        if not site.endswith(":bias")
    ]


def biases(plan: Plan) -> list[str]:
    return [site.removesuffix(":bias") for site in plan.sites if site.endswith(":bias")]


EXPECTED: dict[tuple[type[nn.Module], str], str] = {
    # inputs and weights of convolutions; both operands of the add are float
    (Residual, "academic"): """
        stem:input stem:weight conv1:input conv1:weight /relu#1:output conv2:weight /relu#2:output head:weight
    """,
    # the add is fused into conv2, whose own output stays float; the shortcut is quantized
    (Residual, "tensorrt"): """
        stem:input stem:weight /relu#0:output conv1:weight /relu#1:output conv2:weight
        /relu#2:output head:weight
    """,
    # both operands; a convolution needs an integer output, also the last
    (Residual, "onnxruntime"): """
        stem:input stem:weight /relu#0:output conv1:weight /relu#1:output conv2:weight bn2:output
        /relu#2:output head:weight head:output
    """,
    (Residual, "openvino"): """
        stem:input stem:weight /relu#0:output conv1:weight /relu#1:output conv2:weight bn2:output
        /relu#2:output head:weight
    """,
    (Downsampled, "academic"): """
        stem:input stem:weight /relu#0:output conv:weight down:weight
    """,
    # one of the two convolutions' outputs is float
    (Downsampled, "tensorrt"): """
        stem:input stem:weight /relu#0:output conv:weight down:weight down:output
    """,
    (Downsampled, "onnxruntime"): """
        stem:input stem:weight /relu#0:output conv:weight bn:output down:weight down:output /relu#1:output
    """,
    (Downsampled, "openvino"): """
        stem:input stem:weight /relu#0:output conv:weight bn:output down:weight down:output /relu#1:output
    """,
    (Separable, "academic"): """
        conv:input conv:weight act1:output depth:weight act2:output point:weight /flatten#0:output fc:weight
    """,
    (Separable, "tensorrt"): """
        conv:input conv:weight act1:output depth:weight act2:output point:weight point:output
        /flatten#0:output fc:weight
    """,
    # the grid passes through flatten
    (Separable, "onnxruntime"): """
        conv:input conv:weight act1:output depth:weight act2:output point:weight point:output pool:output
        /flatten#0:output=pool:output fc:weight
    """,
    (Separable, "openvino"): """
        conv:input conv:weight act1:output depth:weight act2:output point:weight point:output pool:output
        /flatten#0:output=pool:output fc:weight
    """,
    (Concat, "academic"): "a:input a:weight b:input=a:input b:weight /cat#0:output end:weight",
    (Concat, "tensorrt"): "a:input a:weight b:input=a:input b:weight /cat#0:output end:weight",
    (Concat, "onnxruntime"): """
        a:input a:weight /relu#0:output b:input=a:input b:weight /relu#1:output /cat#0:output
        end:weight end:output
    """,
    (Concat, "openvino"): """
        a:input a:weight /relu#0:output b:input=a:input b:weight /relu#1:output /cat#0:output end:weight
    """,
    # linears only: the products of attention are float
    (Transformer, "academic"): """
        norm1:output q:weight k:weight v:weight /matmul#1:output o:weight norm2:output up:weight
        /gelu#0:output down:weight
    """,
    (Transformer, "tensorrt"): """
        norm1:output q:weight q:output k:weight /transpose#0:output /softmax#0:output v:weight v:output
        /matmul#1:output o:weight norm2:output up:weight /gelu#0:output down:weight
    """,
    (Transformer, "onnxruntime"): """
        norm1:output q:weight q:output k:weight k:output /transpose#0:output=k:output /softmax#0:output
        v:weight v:output /matmul#1:output o:weight norm2:output up:weight /gelu#0:output down:weight
    """,
    (Transformer, "openvino"): """
        norm1:output q:weight q:output k:weight k:output /transpose#0:output=k:output /softmax#0:output
        v:weight v:output /matmul#1:output o:weight norm2:output up:weight /gelu#0:output down:weight
    """,
    (Padded, "academic"): "stem:input stem:weight /pad#0:output conv:weight",
    (Padded, "tensorrt"): "stem:input stem:weight /pad#0:output conv:weight",
    # the target merges the pad into the convolution: no quantizer between them
    (Padded, "onnxruntime"): "stem:input stem:weight /relu#0:output conv:weight conv:output",
    (Padded, "openvino"): "stem:input stem:weight /relu#0:output conv:weight",
}


@pytest.mark.parametrize(("model", "name"), EXPECTED)
def test_sites(model: type[nn.Module], name: str) -> None:
    assert text(place(graph_of(model), name)) == EXPECTED[model, name].split()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("model", INPUTS)
def test_every_placement_is_a_good_plan(model: type[nn.Module], name: str) -> None:
    graph = graph_of(model)
    plan = place(graph, name, model="tested")
    assert plan.validate(graph) == []
    assert check_plan(plan, backend(name)) == []
    assert plan.resolve(graph) == plan
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert (plan.backend, plan.model) == (name, "tested")
    # nothing is without a reason
    assert all(spec.why for spec in plan.sites.values())
    # what multiplies is quantized, or says why not
    for op in graph.ops:
        sites = [site for site in plan.sites if site.startswith(f"{op.name}:")]
        assert not op.macs or sites or op.name in plan.float or op.kind == "matmul", op.name


@pytest.mark.parametrize("name", BACKENDS)
def test_placement_is_deterministic(name: str) -> None:
    graph = capture(Transformer(), INPUTS[Transformer])
    assert place(graph, name).to_yaml() == place(graph_of(Transformer), name).to_yaml()


def test_what_stays_float_says_why() -> None:
    plan = place(graph_of(Transformer), "academic")
    operators = {name: why for name, why in plan.float.items() if not name.endswith(".bias")}
    assert list(operators) == ["norm1", "/matmul#0", "/matmul#1", "norm2"]
    kinds = ("layer_norm", "matmul", "matmul", "layer_norm")
    assert list(operators.values()) == [f"academic has no integer rule for {kind}" for kind in kinds]
    assert {why for name, why in plan.float.items() if name not in operators} == {"academic adds biases in float"}


# -- norms and biases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fold"),
    [
        ("academic", {}),
        ("tensorrt", {"bn1": "conv1", "bn2": "conv2"}),
        ("onnxruntime", {"bn1": "conv1", "bn2": "conv2"}),
        ("openvino", {"bn1": "conv1", "bn2": "conv2"}),
    ],
)
def test_norms_are_folded(name: str, fold: dict[str, str]) -> None:
    assert place(graph_of(Residual), name).fold == fold


def test_a_strategy_of_folding_may_be_chosen() -> None:
    graph = graph_of(Residual)
    usual = place(graph, "onnxruntime")
    assert place(graph, "onnxruntime", fold=4) == place(graph, "onnxruntime", fold=None) == usual
    for strategy in range(4):
        plan = place(graph, "onnxruntime", fold=strategy)
        assert plan.fold == {f"bn{i}": FoldSpec(into=f"conv{i}", strategy=strategy) for i in (1, 2)}
        assert plan.sites == usual.sites
    assert place(graph, "onnxruntime", fold=-1).fold == {}
    assert place(graph, "academic", fold=-1) == place(graph, "academic")
    with raises_problem("unknown-folding-strategy", where="fold", mentions=-1):
        place(graph, "onnxruntime", fold=5)
    with raises_problem("fold-not-supported", where="fold"):
        place(graph, "academic", fold=2)


def test_a_norm_over_another_axis_is_not_folded() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert place(capture(model, torch.randn(5, 3)), "onnxruntime").fold == {"1": "0"}
    assert place(capture(model, torch.randn(5, 4, 3)), "onnxruntime").fold == {}


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (lambda y: m[1](y) + y)(m[0](x)),  # the convolution's own output is read, too
        lambda m, x: m[1](m[0](m[0](x))),  # its weight is used twice
        lambda m, x: (m[0](x), m[1](m[0](x))),
    ],
)
def test_a_norm_that_cannot_be_folded(forward: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)])

        def forward(self, x: Tensor) -> Any:
            return forward(self.parts, x)

    assert place(capture(Net(), torch.randn(1, 3, 4, 4)), "onnxruntime").fold == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("academic", []),
        ("tensorrt", []),
        # also where the bias comes from the folded norm
        ("onnxruntime", ["stem", "conv1", "conv2", "head"]),
        ("openvino", ["stem", "conv1", "conv2", "head"]),
    ],
)
def test_biases(name: str, expected: list[str]) -> None:
    plan = place(graph_of(Residual), name)
    assert biases(plan) == expected
    for operator in expected:
        spec = plan.sites[f"{operator}:bias"]
        assert str(spec.format) == "int32/channel/sym"
        feeding, weight = spec.quantizer_options["of"]
        assert weight == f"{operator}:weight"
        assert feeding in plan.sites


# -- formats and options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "activations"),
    [
        ("academic", "int8/tensor/sym", "int8/tensor/sym/adasign"),
        ("tensorrt", "int8/channel/sym/narrow", "int8/tensor/sym/narrow"),
        ("onnxruntime", "int8/channel/sym", "uint8/tensor/asym"),
        ("openvino", "int8/channel/sym", "uint8/tensor/asym"),
    ],
)
def test_default_formats(name: str, weights: str, activations: str) -> None:
    plan = place(graph_of(Separable), name)
    assert str(plan.sites["conv:weight"].format) == weights
    assert str(plan.sites["conv:input"].format) == activations


def test_formats_and_observers_can_be_chosen() -> None:
    plan = place(
        graph_of(Separable),
        "onnxruntime",
        weights="int4/channel/sym",
        activations="uint8/tensor/sym",
        observer="percentile",
        weight_observer="mse",
        quantizer="lsq",
    )
    weight, data = plan.sites["point:weight"], plan.sites["act2:output"]
    assert (str(weight.format), weight.observer, weight.quantizer) == ("int4/channel/sym", "mse", "lsq")
    assert (str(data.format), data.observer, data.quantizer) == ("uint8/tensor/sym", "percentile", "lsq")


def test_all_wrong_choices_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        place(
            graph_of(Separable),
            "tensorrt",
            weights="int4",
            activations="uint8",
            keep_float=["conw*", "point"],
        )
    assert [problem.value for problem in caught.value.problems] == [
        "int4/tensor/sym",
        "uint8/tensor/sym",
        "conw*",
    ]
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("name", BACKENDS)
def test_keep_float(name: str) -> None:
    plan = place(graph_of(Separable), name, keep_float=["poin?"])
    norms = {"bn1", "bn2"} if name == "academic" else set()  # the others fold them
    assert {name for name in plan.float if not name.endswith(".bias")} == {"point"} | norms
    assert plan.float["point"] == "kept in float by request"
    assert not {"point:input", "point:weight", "point:bias"} & set(plan.sites)
    assert "act2:output" not in plan.sites or name == "onnxruntime"
    assert plan.validate(graph_of(Separable)) == []


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_guard_stands_only_where_it_is_needed(name: str) -> None:
    graph = graph_of(Separable)
    guards = {site: spec.guard for site, spec in place(graph, name, saturating=True).sites.items() if spec.guard}
    # a depthwise convolution adds no pairs
    assert guards == dict.fromkeys(["conv:weight", "point:weight", "fc:weight"], "int16-pairs")
    for plan in (
        place(graph, name),
        place(graph, name, saturating=True, weights="int4/channel/sym"),
        place(graph, name, saturating=True, weights="uint8/channel/asym"),
    ):
        assert not any(spec.guard for spec in plan.sites.values())


def test_the_guard_says_why() -> None:
    plan = place(graph_of(Separable), "onnxruntime", saturating=True)
    assert "int16" in plan.sites["conv:weight"].why
    assert "int16" not in plan.sites["depth:weight"].why


@pytest.mark.parametrize("name", ["academic", "tensorrt"])
def test_targets_without_the_limit_have_no_guard(name: str) -> None:
    plan = place(graph_of(Separable), name, saturating=True)
    assert not any(spec.guard for spec in plan.sites.values())


# -- tied weights, repeated modules, branches ----------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_a_tied_weight_has_one_quantizer(name: str) -> None:
    plan = place(graph_of(Tied), name)
    assert plan.sites["body#1:weight"].share == "body:weight"
    # no backend here multiplies in the embedding: the head has the quantizer
    assert "embed:weight" not in plan.sites
    assert plan.sites["head:weight"].share is None


@pytest.mark.parametrize("name", BACKENDS)
def test_a_producer_that_varies_gives_a_quantizer_at_the_reader(name: str) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.a(x) if x.sum() > 0 else self.b(x))

    graph = capture(Branch(), torch.ones(1, 4), -torch.ones(1, 4))
    plan = place(graph, name)
    assert "varies" in plan.sites["end:input"].why
    assert "a:output" not in plan.sites
    assert plan.validate(graph) == []


class Products(nn.Module):
    """Operators that multiply, beside those that models usually call."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 16, 16))
        self.w = nn.Parameter(torch.randn(16, 16))
        self.v = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 4], dtype=torch.int32)
        x = torch._grouped_mm(x, self.experts, offs=ends)
        x = torch.tensordot(x, self.w, dims=1)
        x = torch.linalg.multi_dot([x, self.w, self.w])
        x = torch.cdist(x, self.w)
        return x + torch.vdot(self.v, x[0])


def test_every_operator_that_multiplies_has_macs_and_is_listed() -> None:
    graph = capture(Products(), torch.randn(4, 16))
    plan = place(graph, "onnxruntime")
    macs = {op.kind: op.macs for op in graph.ops}
    assert macs["_grouped_mm"] == 4 * 16 * 16
    assert macs["tensordot"] == 4 * 16 * 16
    assert macs["linalg_multi_dot"] == 2 * 4 * 16 * 16
    assert "/_grouped_mm#0:input1" in plan.sites
    for kind in ("tensordot", "linalg_multi_dot", "cdist", "vdot"):
        assert f"/{kind}#0" in plan.float, kind
