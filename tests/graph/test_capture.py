"""What capture records: names, producers, shapes, for every way in which models call operators."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import CaptureError
from bitwright.graph import Graph, Op, capture

torch.set_num_threads(1)


class Body(nn.Module):
    """`fc`, then whatever a test wants to see."""

    def __init__(self, after: Any, **children: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.after = after
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Any:
        return self.after(self, self.fc(x))


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


def producers(op: Op) -> dict[str, str]:
    return {port.name: "|".join(str(source) for source in port.sources) for port in op.ports}


def of_body(after: Any, **children: nn.Module) -> Graph:
    return capture(Body(after, **children), torch.randn(3, 4))


# -- what goes in and comes out ------------------------------------------------------------------------------


class Pair(nn.Module):
    def forward(self, left: Tensor, right: Tensor | None = None, *, scale: Any = None) -> Tensor:
        result = left if right is None else left - right
        return result if scale is None else result * scale["by"][0]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.ones(2), ("left",)),
        ((torch.ones(2), torch.ones(2)), ("left", "right")),
        ([torch.ones(2), torch.ones(2)], ("left", "right")),
        ({"right": torch.ones(2), "left": torch.ones(2)}, ("left", "right")),
        (
            {"left": torch.ones(2), "right": torch.ones(2), "scale": {"by": [torch.ones(2)]}},
            ("left", "right", "scale.by.0"),
        ),
    ],
)
def test_inputs_are_named_by_the_signature(inputs: Any, expected: tuple[str, ...]) -> None:
    graph = capture(Pair(), inputs)
    assert sorted(graph.inputs) == sorted(expected)
    if len(expected) > 1:
        assert producers(graph.by_name["/sub#0"]) == {"input0": "input:left", "input1": "input:right"}
    if len(expected) > 2:
        assert producers(graph.by_name["/mul#0"]) == {"input0": "op:/sub#0", "input1": "input:scale.by.0"}


def test_keyword_arguments_of_an_open_signature() -> None:
    class Open(nn.Module):
        def forward(self, **inputs: Tensor) -> Tensor:
            return inputs["a"] + inputs["b"]

    graph = capture(Open(), {"a": torch.ones(1), "b": torch.ones(1)})
    assert producers(graph.ops[0]) == {"input0": "input:inputs.a", "input1": "input:inputs.b"}


@dataclass
class Result:
    logits: Tensor
    hidden: list[Tensor]
    loss: Tensor | None = None


Named = namedtuple("Named", ["first", "second"])


@pytest.mark.parametrize(
    ("pack", "paths"),
    [
        (lambda y: y, [""]),
        (lambda y: (y, y), ["0", "1"]),
        (lambda y: [y, {"a": y}], ["0", "1.a"]),
        (lambda y: {"logits": y, "cache": [(y, y)]}, ["logits", "cache.0.0", "cache.0.1"]),
        (lambda y: OrderedDict(out=y), ["out"]),
        (lambda y: Result(logits=y, hidden=[y, y]), ["logits", "hidden.0", "hidden.1"]),
        (lambda y: Named(y, 3), ["0"]),
        (lambda y: (y, None, "text"), ["0"]),
    ],
)
def test_outputs_are_found_wherever_they_are(pack: Any, paths: list[str]) -> None:
    graph = of_body(lambda _, y: pack(y.relu()))
    assert [path for path, _ in graph.outputs] == paths
    assert {str(source) for _, source in graph.outputs} == {"op:/relu#0"}


@pytest.mark.parametrize("result", [None, "text", 3.0, [], {"loss": 1.0}])
def test_a_model_that_returns_no_tensor(result: Any) -> None:
    with raises_problem("no-output-tensor", kind=CaptureError) as caught:
        of_body(lambda _, y: result)
    assert caught.value.problems[0].fix


def test_not_a_module() -> None:
    with raises_problem("wrong-argument-type", where="model", mentions="torch.nn.Module") as caught:
        capture(torch.relu, torch.ones(1))  # type: ignore[arg-type]
    assert caught.value.problems[0].value is not None


def test_no_inputs() -> None:
    with raises_problem("no-inputs", kind=CaptureError):
        capture(nn.ReLU())


def test_wrong_arguments_are_reported_in_the_models_own_words() -> None:
    with raises_problem("model-failed", mentions="forward") as raised:
        capture(nn.Linear(2, 2), (torch.ones(1, 2), torch.ones(1, 2)))
    assert isinstance(raised.value.__cause__, TypeError)


# -- functional, in-place, views -----------------------------------------------------------------------------


def iadd(_: Any, y: Tensor) -> Tensor:
    y += 1
    return y * 2


def add_method(_: Any, y: Tensor) -> Tensor:
    y.add_(1)
    return y * 2


def relu_inplace(_: Any, y: Tensor) -> Tensor:
    F.relu(y, inplace=True)
    return y * 2


def relu_method(_: Any, y: Tensor) -> Tensor:
    y.relu_()
    return y * 2


def setitem(_: Any, y: Tensor) -> Tensor:
    y[0] = 0.0
    return y * 2


@pytest.mark.parametrize(
    ("body", "writer"),
    [
        (iadd, "/add#0"),
        (add_method, "/add#0"),
        (relu_inplace, "/relu#0"),
        (relu_method, "/relu#0"),
        (setitem, "/setitem#0"),
    ],
)
def test_in_place_operators_make_a_new_value(body: Any, writer: str) -> None:
    graph = of_body(body)
    assert names(graph) == ["fc", writer, "/mul#0"]
    assert graph.by_name[writer].inplace
    assert producers(graph.by_name[writer])["input"] == "op:fc"
    assert producers(graph.by_name["/mul#0"]) == {"input": f"op:{writer}"}


def test_relu_module_in_place() -> None:
    graph = of_body(lambda m, y: m.act(y) + 1, act=nn.ReLU(inplace=True))
    assert names(graph) == ["fc", "act", "/add#0"]
    assert graph.by_name["act"].inplace
    assert graph.outputs[0][1].name == "/add#0"


def test_assignment_of_a_part() -> None:
    def body(_: Any, y: Tensor) -> Tensor:
        z = torch.zeros(3, 4)
        z[:, 1:] = y[:, 1:]
        return z

    graph = of_body(body)
    assert producers(graph.by_name["/setitem#0"]) == {"input0": "op:/zeros#0", "input1": "op:/getitem#0"}
    assert str(graph.outputs[0][1]) == "op:/setitem#0"
    assert graph.by_name["/zeros#0"].constant
    assert not graph.by_name["/setitem#0"].constant


def test_writing_into_a_view_changes_the_whole_tensor() -> None:
    def body(_: Any, y: Tensor) -> Tensor:
        y[:, 0].add_(1)
        return y * 2

    graph = of_body(body)
    assert producers(graph.by_name["/mul#0"]) == {"input": "op:/add#0@1"}
    assert [output.shape for output in graph.by_name["/add#0"].outputs] == [(3,), (3, 4)]


def test_a_view_that_is_written_alone_has_one_output() -> None:
    graph = of_body(lambda _, y: y.view(-1).relu_() * 2)
    assert len(graph.by_name["/relu#0"].outputs) == 1


def test_out_is_written_not_read() -> None:
    def body(_: Any, y: Tensor) -> Tensor:
        z = torch.empty(3, 4)
        torch.add(y, 1, out=z)
        return z

    graph = of_body(body)
    assert producers(graph.by_name["/add#0"]) == {"input": "op:fc"}
    assert str(graph.outputs[0][1]) == "op:/add#0"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (lambda _, y: y + y, "add"),
        (lambda _, y: torch.add(y, y), "add"),
        (lambda _, y: y.add(y), "add"),
        (lambda _, y: 1 + y, "add"),
        (lambda _, y: 1 - y, "sub"),
        (lambda _, y: 1 / y, "div"),
        (lambda _, y: torch.true_divide(y, 2), "div"),
        (lambda _, y: y @ y.new_ones(4, 4), "matmul"),
        (lambda _, y: torch.mm(y, y.new_ones(4, 4)), "matmul"),
        (lambda _, y: torch.bmm(y[None], y.new_ones(1, 4, 4)), "matmul"),
        (lambda _, y: torch.concat([y, y]), "cat"),
        (lambda _, y: F.max_pool2d(y[None], 2), "max_pool2d"),
        (lambda _, y: F.max_pool2d(y[None], 2, return_indices=True)[0], "max_pool2d"),
        (lambda _, y: y.T, "attribute_T"),
    ],
)
def test_spellings_of_one_operator_are_one_kind(body: Any, kind: str) -> None:
    assert of_body(body).ops[-1].kind == kind


@pytest.mark.parametrize(
    "body",
    [
        lambda _, y: y[0] + y[1],
        lambda _, y: sum(y.unbind(0)),
        lambda _, y: sum(y.split(1)),
        lambda _, y: sum(row for row in y),  # Tensor.__iter__
        lambda _, y: (lambda a, b, c: a + b + c)(*y),
        lambda _, y: y + y.detach(),
        lambda _, y: y.max(dim=0).values * y.sort()[0],
        lambda _, y: y.data * 2,
    ],
)
def test_nothing_that_comes_from_an_input_passes_for_a_constant(body: Any) -> None:
    graph = of_body(body)
    assert len(graph.ops) > 1
    for op in graph.ops[1:]:
        assert not op.constant, op
        assert op.ports
        assert all(port.role == "activation" for port in op.ports), op
        assert all(source.kind == "op" for port in op.ports for source in port.sources), op


def test_several_outputs_are_told_apart() -> None:
    graph = of_body(lambda _, y: (lambda a, b: a - b)(*y.chunk(2, dim=1)))
    assert producers(graph.by_name["/sub#0"]) == {"input0": "op:/chunk#0", "input1": "op:/chunk#0@1"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_scripted_function_makes_is_unknown_not_constant() -> None:
    swish = torch.jit.script(_swish)
    graph = of_body(lambda _, y: swish(y) + 1)
    assert producers(graph.by_name["/add#0"]) == {"input": "unknown:unknown0"}
    assert graph.by_name["/add#0"].ports[0].role == "activation"


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def test_custom_autograd_functions_are_looked_into() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    graph = of_body(lambda _, y: Double.apply(y) + 1)
    assert producers(graph.by_name["/add#0"]) == {"input": "op:/mul#0"}


def test_plain_attributes_and_buffers_are_constants() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = [torch.ones(4)]
            self.shift = torch.ones(4)
            self.register_buffer("scale", torch.ones(4))
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shift) * self.scale - self.table[0] + self.weight

    graph = capture(Constants(), torch.ones(2, 4))
    assert [producers(op)["input1"] for op in graph.ops] == [
        "constant:shift",
        "buffer:scale",
        "constant:table.0",
        "param:weight",
    ]
    assert {op.ports[1].role for op in graph.ops} == {"weight"}


# -- modules -------------------------------------------------------------------------------------------------


def test_a_module_called_twice() -> None:
    graph = of_body(lambda m, y: m.act(m.fc(m.act(y))), act=nn.ReLU())
    assert names(graph) == ["fc", "act", "fc#1", "act#1"]
    assert producers(graph.by_name["fc#1"])["input"] == "op:act"
    assert [(op.module, op.call) for op in graph.ops] == [("fc", 0), ("act", 0), ("fc", 1), ("act", 1)]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(4, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.ih(x) + self.hh(h))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(xs.shape[1], 5)
        for t in range(xs.shape[0]):
            h = self.cell(xs[t], h)
        return h


def test_a_recurrent_loop() -> None:
    graph = capture(Loop(), torch.randn(3, 2, 4))
    assert [name for name in names(graph) if name.startswith("cell")] == [
        "cell.ih", "cell.hh", "cell/add#0", "cell/tanh#0",
        "cell.ih#1", "cell.hh#1", "cell#1/add#0", "cell#1/tanh#0",
        "cell.ih#2", "cell.hh#2", "cell#2/add#0", "cell#2/tanh#0",
    ]  # fmt: skip
    assert producers(graph.by_name["cell.hh#2"])["input"] == "op:cell#1/tanh#0"
    assert {graph.weight_owner[f"cell.hh{k}:weight"] for k in ("", "#1", "#2")} == {"cell.hh:weight"}
    # 3 steps of 2 samples
    assert graph.macs == 3 * 2 * (4 * 5 + 5 * 5)


def test_a_longer_sequence_is_merged_and_partial() -> None:
    graph = capture(Loop(), torch.randn(1, 2, 4), torch.randn(3, 2, 4))
    assert graph.runs == 2
    assert not graph.partial(graph.by_name["cell.ih"])
    assert graph.partial(graph.by_name["cell.ih#2"])
    # the longer run comes between its neighbours, in the order of calls
    calls = [name for name in names(graph) if name.startswith("cell.ih")]
    assert calls == ["cell.ih", "cell.ih#1", "cell.ih#2"]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if x.sum() > 0 else self.b(x).relu()
        return self.end(y)


def test_data_dependent_control_flow() -> None:
    graph = capture(Branch(), torch.ones(1, 4), -torch.ones(1, 4))
    assert {op.name: graph.partial(op) for op in graph.ops if op.name != "/sum#0"} == {
        "a": True,
        "b": True,
        "/relu#0": True,
        "end": False,
        "/gt#0": False,
    }
    assert producers(graph.by_name["end"])["input"] == "op:a|op:/relu#0"
    order = names(graph)
    assert order.index("b") < order.index("/relu#0") < order.index("end")
    assert graph.by_name["end"].depth == 3
    assert [op.seen for op in graph.ops if op.name in ("a", "end")] == [1, 2]


def test_one_input_sees_one_branch() -> None:
    assert "b" not in names(capture(Branch(), torch.ones(1, 4)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def test_tied_weights() -> None:
    graph = capture(Tied(), torch.tensor([[1, 2]]))
    assert graph.weight_owner == {
        "embed:weight": "embed:weight",
        "body:weight": "body:weight",
        "head:weight": "embed:weight",
    }
    assert [p.names for p in graph.parameters] == [
        ("embed.weight", "head.weight"),
        ("body.weight",),
        ("body.bias",),
    ]


def test_a_module_under_two_names_goes_by_its_first() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    graph = capture(Shared(), torch.ones(1, 4))
    assert names(graph) == ["first", "first#1"]
    assert graph.parameters[0].names == ("first.weight", "second.weight")


def test_a_forward_that_is_called_directly_is_seen() -> None:
    graph = of_body(lambda m, y: m.head.forward(y), head=nn.Linear(4, 2))
    assert names(graph) == ["fc", "head"]


def test_a_bare_operator_module() -> None:
    assert names(capture(nn.Linear(2, 2), torch.ones(1, 2))) == ["/linear#0"]


# -- attention and recurrent modules -------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, *, cross: bool, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            8, 2, kdim=6 if cross else None, vdim=6 if cross else None, batch_first=True
        )
        self.need_weights = need_weights

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        other = x if memory is None else memory
        return self.attention(x, other, other, need_weights=self.need_weights)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_multihead_attention_shows_its_operators(cross: bool, need_weights: bool, train: bool) -> None:
    model = Attention(cross=cross, need_weights=need_weights)
    inputs = (torch.randn(3, 5, 8), torch.randn(3, 7, 6)) if cross else (torch.randn(3, 5, 8),)
    graph = capture(model, inputs, train=train)
    kinds = [op.kind for op in graph.ops]
    keys = 7 if cross else 5
    assert kinds.count("linear") == (4 if cross else 2)
    if need_weights:
        assert "scaled_dot_product_attention" not in kinds
        assert kinds.count("matmul") + kinds.count("baddbmm") == 2
        assert kinds.count("softmax") == 1
    else:
        assert kinds.count("scaled_dot_product_attention") == 1
    # projections of q, k, v and of the output, then the two products per head
    width = 6 if cross else 8
    projections = 3 * (5 * 8 * 8 + 2 * keys * width * 8 + 5 * 8 * 8)
    products = 3 * 2 * (2 * 5 * keys * 4)
    assert graph.macs == projections + products
    assert all(op.module.startswith("attention") for op in graph.ops)
    assert str(graph.outputs[0][1]).startswith("op:attention")


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, batch_first=True)
    layer.eval()
    graph = capture(layer, torch.randn(2, 5, 8))
    assert {"linear1", "linear2", "norm1", "norm2"} <= set(names(graph))
    assert [op.name for op in graph.ops if op.kind == "linear"] == [
        "self_attn/linear#0", "self_attn/linear#1", "linear1", "linear2",
    ]  # fmt: skip
    attention = next(op for op in graph.ops if op.kind == "scaled_dot_product_attention")
    assert [port.name for port in attention.ports] == ["query", "key", "value"]
    assert graph.macs == 2 * 5 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 2 * (2 * 5 * 5 * 4)


def test_transformer_decoder() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    graph = capture(model, {"src": torch.randn(2, 5, 8), "tgt": torch.randn(2, 4, 8)})
    cross = graph.by_name["decoder.layers.0.multihead_attn/scaled_dot_product_attention#0"]
    assert [port.shape for port in cross.ports] == [(2, 2, 4, 4), (2, 2, 5, 4), (2, 2, 5, 4)]
    assert sum(op.kind == "scaled_dot_product_attention" for op in graph.ops) == 3


def test_a_mask_is_neither_weight_nor_activation() -> None:
    graph = of_body(lambda _, y: F.scaled_dot_product_attention(y, y, y, torch.zeros(3, 3)))
    roles = {port.name: port.role for port in graph.ops[-1].ports}
    assert roles == {"query": "activation", "key": "activation", "value": "activation", "attn_mask": "other"}


def test_scaled_dot_product_attention_by_keyword() -> None:
    graph = of_body(lambda _, y: F.scaled_dot_product_attention(query=y, key=y, value=y))
    assert producers(graph.ops[-1]) == {"query": "op:fc", "key": "op:fc", "value": "op:fc"}


@pytest.mark.parametrize(("module", "kind", "gates"), [(nn.LSTM, "lstm", 4), (nn.GRU, "gru", 3), (nn.RNN, "rnn", 1)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_modules(module: Any, kind: str, gates: int, bidirectional: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = module(4, 6, num_layers=2, bidirectional=bidirectional)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x)

    graph = capture(Net(), torch.randn(5, 3, 4))
    op = graph.by_name["rnn"]
    assert op.kind == kind
    ways = 2 if bidirectional else 1
    assert op.macs == 5 * 3 * ways * gates * 6 * ((4 + 6) + (6 * ways + 6))
    sources = {source.name for port in op.ports for source in port.sources if source.kind == "param"}
    assert sources == {name for name, _ in Net().named_parameters()}
    # (output, states): the model returns them all
    assert {source.name for _, source in graph.outputs} == {"rnn"}
    assert len(op.outputs) == (3 if kind == "lstm" else 2)


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_recurrent_cells(cell: Any, gates: int) -> None:
    graph = of_body(lambda m, y: m.cell(y), cell=cell(4, 6))
    assert graph.by_name["cell"].macs == 3 * gates * 6 * (4 + 6)


# -- numbers -------------------------------------------------------------------------------------------------

CASES: list[tuple[Any, tuple[int, ...], int]] = [
    (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 10, 10), 2 * 8 * 100 * 27),
    (nn.Conv2d(3, 8, 3, stride=2), (2, 3, 11, 11), 2 * 8 * 25 * 27),
    (nn.Conv2d(8, 8, 3, groups=8, padding=1), (1, 8, 6, 6), 8 * 36 * 9),
    (nn.Conv2d(8, 4, 3, groups=2, padding=1), (1, 8, 6, 6), 4 * 36 * 4 * 9),
    (nn.Conv1d(2, 5, 3), (1, 2, 8), 5 * 6 * 6),
    (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4), 3 * 27 * 16),
    (nn.ConvTranspose2d(4, 6, 2, stride=2), (1, 4, 5, 5), 4 * 25 * 6 * 4),
    (nn.Linear(6, 7), (4, 5, 6), 4 * 5 * 6 * 7),
    (nn.Linear(6, 7), (6,), 42),
    (nn.Bilinear(6, 6, 2), (3, 6), 3 * 2 * 36),
    (nn.BatchNorm2d(3), (2, 3, 4, 4), 0),
    (nn.ReLU(), (2, 3), 0),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shape", "expected"), CASES)
def test_macs_of_modules(module: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    x = torch.randn(shape)
    assert capture(module, (x, x) if isinstance(module, nn.Bilinear) else x).macs == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x @ x.transpose(-1, -2), 2 * 3 * 3 * 4),
        (lambda x: torch.addmm(x[0, 0, 0], x[0], x[0].T), 3 * 3 * 4),
        (lambda x: torch.baddbmm(x[0, 0, 0], x, x.transpose(1, 2)), 2 * 3 * 3 * 4),
        (lambda x: torch.einsum("bid,bjd->bij", x, x), 2 * 3 * 3 * 4),
        (lambda x: torch.einsum("...id, ...jd -> ...ij", x, x), 2 * 3 * 3 * 4),
        (lambda x: torch.einsum("bid,bid", x, x), 2 * 3 * 4),
        (lambda x: torch.einsum("bid->bdi", x), 0),
        (lambda x: torch.mv(x[0], x[0, 0]), 3 * 4),
        (lambda x: x * x, 0),
    ],
)
def test_macs_of_functions(function: Any, expected: int) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    assert capture(Net(), torch.randn(2, 3, 4)).macs == expected


def test_depth_is_the_longest_way_from_an_input() -> None:
    graph = of_body(lambda m, y: m.head(y.relu().neg()) + y, head=nn.Linear(4, 4))
    assert {op.name: op.depth for op in graph.ops} == {
        "fc": 1,
        "/relu#0": 2,
        "/neg#0": 3,
        "head": 4,
        "/add#0": 5,
    }


def test_shapes_and_dtypes() -> None:
    graph = capture(Tied().double(), torch.tensor([[1, 2, 3]]))
    embed = graph.by_name["embed"]
    assert [(p.name, p.shape, p.dtype, p.is_floating) for p in embed.ports] == [
        ("input", (1, 3), "int64", False),
        ("weight", (7, 4), "float64", True),
    ]
    assert embed.outputs[0].shape == (1, 3, 4)
    assert "embed:input" not in [name for name, _, _ in graph.sites()]
    assert "embed:output" in [name for name, _, _ in graph.sites()]


def test_every_input_of_every_operator_has_a_known_producer() -> None:
    graph = capture(nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (torch.randn(2, 5, 8), torch.randn(2, 4, 8)))
    seen: set[str] = set()
    for op in graph.ops:
        for port in op.ports:
            for source in port.sources:
                assert source.kind in ("op", "param", "input")
                assert source.kind != "op" or source.name in seen, "a producer comes before its readers"
        seen.add(op.name)
    assert len(seen) == len(graph.ops), "names are unique"


# -- the recording as a whole --------------------------------------------------------------------------------

MODELS: list[tuple[Any, Any]] = [
    (Branch, [torch.ones(1, 4), -torch.ones(1, 4)]),
    (Tied, [torch.tensor([[1, 2]])]),
    (Loop, [torch.ones(2, 2, 4)]),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16), [torch.ones(5, 2, 8)]),
    (lambda: nn.LSTM(4, 3), [torch.ones(5, 2, 4)]),
]


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_json_round_trip(make: Any, inputs: list[Tensor]) -> None:
    graph = capture(make(), *inputs)
    text = graph.to_json()
    again = Graph.from_json(text)
    assert again == graph
    assert again.to_json() == text
    assert again.weight_owner == graph.weight_owner


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_two_captures_are_equal(make: Any, inputs: list[Tensor]) -> None:
    model = make()
    first, second = capture(model, *inputs), capture(model, *inputs)
    assert first == second
    # another instance, too
    assert capture(make(), *inputs).to_json() == first.to_json()


@pytest.mark.parametrize(("make", "inputs"), MODELS)
def test_names_are_the_same_in_training(make: Any, inputs: list[Tensor]) -> None:
    assert names(capture(make(), *inputs, train=True)) == names(capture(make(), *inputs))


def test_sites_of_a_batch_norm_and_dropout_are_the_same_in_training() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(16, 2)
    )
    x = torch.randn(2, 3, 4, 4)
    still, moving = capture(model, x), capture(model, x, train=True)
    assert [name for name, _, _ in still.sites()] == [name for name, _, _ in moving.sites()]
    assert names(still) == list("012345")
    # what training has more is the norm's own count of batches
    assert [op.name for op in moving.ops if op.name not in still.by_name] == ["1/add_int#0"]


def test_consumers() -> None:
    graph = of_body(lambda _, y: y.relu() + y)
    fc = next(source for source in graph.consumers if str(source) == "op:fc")
    assert [(op.name, port.name) for op, port in graph.consumers[fc]] == [
        ("/relu#0", "input"),
        ("/add#0", "input1"),
    ]


def test_tensors_without_numbers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2), nn.BatchNorm1d(2, device="meta"))
    with pytest.raises(CaptureError) as caught:
        capture(model, torch.ones(2, 2))
    assert caught.value.codes == ["uninitialized-parameter", "meta-tensor"]
    lazy, meta = (str(problem.where) for problem in caught.value.problems)
    assert lazy == "1.weight, 1.bias"
    assert {"2.weight", "2.running_mean"} <= set(meta.split(", "))
    assert "0.weight" not in meta


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused_by_path() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(CaptureError) as caught:
        capture(nn.Sequential(nn.Linear(2, 2), scripted, traced), torch.ones(1, 2))
    assert caught.value.codes == ["scripted-module"]
    assert caught.value.problems[0].where == "1, 2"
    with pytest.raises(CaptureError) as caught:
        bw.quantize(scripted, [torch.ones(1, 2)])
    assert caught.value.codes == ["scripted-module"]


def test_a_result_without_tensors_is_refused() -> None:
    class Count(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return {"count": 3}

    with pytest.raises(CaptureError) as caught:
        capture(Count(2, 2), torch.ones(1, 2))
    assert caught.value.codes == ["no-output-tensor"]
