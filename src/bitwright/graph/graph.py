"""The recorded operators of a model in order, the source of each of their inputs, and the names of operators and sites.

Names are stable, so that a plan stays valid:

- `layer1.0.conv1`: the primary operator of a module (the convolution of a Conv2d). Its k-th further call in one
  forward is `layer1.0.conv1#k`.
- `layer1.0/add#0`: the first `add` that the module `layer1.0` itself calls (`layer1.0#1/add#0` in the module's second
  call).
- `/add#0`: the first `add` in the model's own forward.
- `/add_int#0`: the first `add` without floating-point inputs. Such calls are counted separately.

A site is `operator:port`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from pydantic import TypeAdapter
from torch import nn

from bitwright.core.arguments import strict
from bitwright.core.display import Summarized, Table
from bitwright.core.documents import parse_json
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.formatting import counted
from bitwright.core.schemas import validated
from bitwright.graph.operators import SELECTED, SELECTING, can_hook

# The primary operator of each torch.nn module. Subclasses have the operator of their base class.
_PRIMARY: dict[type[nn.Module], str] = {
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.Linear: "linear",
    nn.Bilinear: "bilinear",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding_bag",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm",
    nn.modules.batchnorm._BatchNorm: "batch_norm",
    nn.modules.instancenorm._InstanceNorm: "instance_norm",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNN: "rnn",
    nn.LSTMCell: "lstm_cell",
    nn.GRUCell: "gru_cell",
    nn.RNNCell: "rnn_cell",
    nn.PReLU: "prelu",
    nn.ReLU6: "hardtanh",
    nn.Hardtanh: "hardtanh",
    nn.LeakyReLU: "leaky_relu",
    nn.Upsample: "interpolate",
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
    nn.Flatten: "flatten",
    nn.Unflatten: "unflatten",
    nn.PixelShuffle: "pixel_shuffle",
    nn.PixelUnshuffle: "pixel_unshuffle",
    nn.ChannelShuffle: "channel_shuffle",
    nn.Fold: "fold",
    nn.Unfold: "unfold",
    nn.Softmax: "softmax",
    nn.Softmax2d: "softmax",
    nn.Softmin: "softmin",
    nn.LogSoftmax: "log_softmax",
    nn.LocalResponseNorm: "local_response_norm",
    nn.CosineSimilarity: "cosine_similarity",
    nn.AdaptiveAvgPool1d: "adaptive_avg_pool1d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.AdaptiveAvgPool3d: "adaptive_avg_pool3d",
    nn.AdaptiveMaxPool1d: "adaptive_max_pool1d",
    nn.AdaptiveMaxPool2d: "adaptive_max_pool2d",
    nn.AdaptiveMaxPool3d: "adaptive_max_pool3d",
    nn.AvgPool1d: "avg_pool1d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AvgPool3d: "avg_pool3d",
    nn.LPPool1d: "lp_pool1d",
    nn.LPPool2d: "lp_pool2d",
    nn.LPPool3d: "lp_pool3d",
    nn.FractionalMaxPool2d: "fractional_max_pool2d",
    nn.FractionalMaxPool3d: "fractional_max_pool3d",
    nn.MaxPool1d: "max_pool1d",
    nn.MaxPool2d: "max_pool2d",
    nn.MaxPool3d: "max_pool3d",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
    nn.Softplus: "softplus",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardshrink: "hardshrink",
    nn.LogSigmoid: "logsigmoid",
    nn.Softsign: "softsign",
    nn.Softshrink: "softshrink",
    nn.Tanhshrink: "tanhshrink",
    nn.Threshold: "threshold",
    nn.RReLU: "rrelu",
    nn.GLU: "glu",
    nn.modules.padding._ConstantPadNd: "pad",
    nn.modules.padding._ReflectionPadNd: "pad",
    nn.modules.padding._ReplicationPadNd: "pad",
    nn.modules.padding._CircularPadNd: "pad",
}


def primary_kind(module: nn.Module) -> str | None:
    """The kind of the module's primary operator; None if it has none."""
    for base in type(module).__mro__:
        if base in _PRIMARY:
            return _PRIMARY[base]
    return None


def operator_name(path: str, call: int, kind: str, index: int, primary: str | None) -> str:
    """The name of the `index`-th operator of that kind in the `call`-th call of the module at `path`."""
    scope = f"{path}#{call}" if call else path
    if kind == primary and index == 0 and path:
        return scope
    return f"{scope}/{kind}#{index}"


def site_name(operator: str, port: str) -> str:
    """`operator:port`."""
    return f"{operator}:{port}"


_SITE = re.compile(
    r"^(?P<path>[^#/:]*)(?:#(?P<call>\d+))?(?:/(?P<kind>[A-Za-z_]\w*)#(?P<index>\d+))?(?::(?P<port>\w+))?$"
)


def refuse_module_names(paths: Iterable[str]) -> None:
    """Raise an error if a module's name contains a separator of site names."""
    problems = [
        Problem(
            what="a module's name can't contain '#', '/' or ':'",
            where=path,
            fix=f"rename the module, e.g. to {re.sub('[#/:]', '_', path)!r}",
            code="module-name",
        )
        for path in dict.fromkeys(paths)
        if re.search("[#/:]", path)
    ]
    if problems:
        raise PlanError(problems, title="sites of this model can't be named")


@dataclass(frozen=True)
class SiteName:
    """The parts of a site's name. `kind` is None for the module's primary operator."""

    path: str
    call: int
    kind: str | None
    index: int
    port: str

    @staticmethod
    def parse(text: str) -> SiteName:
        """Parse a name.

        >>> SiteName.parse("layer1.0/add#0:input1")
        SiteName(path='layer1.0', call=0, kind='add', index=0, port='input1')
        """
        match = _SITE.match(text)
        if match is None or match["port"] is None or (not match["path"] and match["kind"] is None):
            raise BitwrightError(
                "not a valid site name",
                value=text,
                fix="write module.path:port or module.path/kind#n:port",
                code="invalid-site-name",
            )
        return SiteName(match["path"], int(match["call"] or 0), match["kind"], int(match["index"] or 0), match["port"])


SourceKind = Literal["op", "param", "buffer", "input", "constant", "unknown"]
Role = Literal["activation", "weight", "bias", "other"]


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: an operator's output, a parameter, a buffer, an input, a constant attribute.

    `unknown`: made by code that can't be recorded (a scripted function), or a global of the model's code.
    """

    kind: SourceKind
    name: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f"@{self.index}" if self.index else "")


@dataclass(frozen=True, kw_only=True)
class Port:
    """One tensor input of an operator. It has several sources if recordings differ."""

    name: str
    sources: tuple[Source, ...]
    shape: tuple[int, ...]
    dtype: str
    role: Role

    @property
    def is_floating(self) -> bool:
        """Whether it can be quantized."""
        return self.dtype in ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class Output:
    """One tensor output of an operator."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_floating(self) -> bool:
        """Whether it can be quantized."""
        return self.dtype in ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator call of the forward pass."""

    name: str
    kind: str
    module: str
    call: int
    ports: tuple[Port, ...]
    outputs: tuple[Output, ...]
    macs: int
    depth: int
    constant: bool
    inplace: bool
    seen: int

    def port(self, name: str) -> Port | None:
        """The port with this name, or None."""
        return next((port for port in self.ports if port.name == name), None)

    def site(self, port: str) -> str:
        """The name of the site at this port."""
        return site_name(self.name, port)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the model. `names` has several entries if the parameter is tied."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The use of selected weights."""

    product: str
    """The operator that multiplies with them, and its port."""
    port: str
    axis: int
    """The axis along which the product sums."""


@strict
@dataclass(frozen=True, kw_only=True)
class Graph(Summarized):
    """The operators of a model, recorded from one or more inputs. `bitwright.capture` returns it.

    >>> import torch
    >>> from bitwright import capture
    >>> graph = capture(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()), torch.ones(1, 8))
    >>> graph
    <Graph: 2 operators, 36 parameters, 32 MACs>
    >>> [site for site, _, _ in graph.sites()]
    ['0:input', '0:weight', '0:bias', '0:output', '1:input', '1:output']
    """

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Source], ...]
    parameters: tuple[Parameter, ...]
    runs: int

    @cached_property
    def by_name(self) -> dict[str, Op]:
        """Operators by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def consumers(self) -> dict[Source, tuple[tuple[Op, Port], ...]]:
        """The (operator, port) pairs that read each source."""
        readers: dict[Source, list[tuple[Op, Port]]] = {}
        for op in self.ops:
            for port in op.ports:
                for source in port.sources:
                    readers.setdefault(source, []).append((op, port))
        return {source: tuple(pairs) for source, pairs in readers.items()}

    @cached_property
    def output_sources(self) -> frozenset[Source]:
        """The sources of the model's outputs."""
        return frozenset(source for _, source in self.outputs)

    @cached_property
    def idle(self) -> frozenset[str]:
        """Operators whose results don't reach any output. Empty if a source is unknown."""
        if any(source.kind == "unknown" for op in self.ops for port in op.ports for source in port.sources):
            return frozenset()
        read = {source.name for source in self.output_sources if source.kind == "op"}
        for op in reversed(self.ops):
            if op.name in read:
                read.update(source.name for port in op.ports for source in port.sources if source.kind == "op")
        return frozenset(op.name for op in self.ops if op.name not in read)

    def __repr__(self) -> str:
        parameters = sum(prod(parameter.shape) for parameter in self.parameters)
        return f"<Graph: {counted(len(self.ops), 'operator')}, {parameters:,} parameters, {self.macs:,} MACs>"

    def to_dict(self) -> dict[str, Any]:
        """All operators, inputs, outputs and parameters as plain data."""
        return asdict(self)

    def summary(self) -> Iterator[Table | str]:
        """The operators with their shapes, parameters and multiply-accumulates."""
        sizes = {name: prod(parameter.shape) for parameter in self.parameters for name in parameter.names}
        heads = ["operator", "kind", "inputs", "output", "#parameters", "#MACs", "partial"]
        yield Table(heads, [self._row(op, sizes) for op in self.ops])
        total = sum(prod(parameter.shape) for parameter in self.parameters)
        yield f"{counted(len(self.ops), 'operator')}, {total:,} parameters, {self.macs:,} multiply-accumulates per call"

    def _row(self, op: Op, sizes: dict[str, int]) -> Sequence[object]:
        own = {source.name for port in op.ports for source in port.sources if source.kind == "param"}
        return (
            op.name,
            op.kind,
            " ".join(_shape_text(port.shape) for port in op.ports if port.role == "activation"),
            " ".join(_shape_text(output.shape) for output in op.outputs),
            f"{sum(sizes.get(name, 0) for name in own):,}" if own else None,
            f"{op.macs:,}" if op.macs else None,
            f"{op.seen} of {self.runs} runs" if self.partial(op) else None,
        )

    def partial(self, op: Op) -> bool:
        """Whether only some of the recordings contain the operator."""
        return op.seen < self.runs

    def sites(self) -> Iterator[tuple[str, Op, Port | Output]]:
        """All floating-point sites that can have a quantizer, as (name, operator, port or output)."""
        for op in self.ops:
            if not can_hook(op.kind) or not any(port.is_floating for port in op.ports):
                continue
            for port in op.ports:
                if port.is_floating:
                    yield op.site(port.name), op, port
            if op.outputs and op.outputs[0].is_floating:
                yield op.site("output"), op, op.outputs[0]

    @cached_property
    def weight_owner(self) -> dict[str, str]:
        """For each weight site, the site of the parameter's first use.

        Biases are excluded: their scale is the product of the input and weight scales at each use.
        """
        first: dict[Source, str] = {}
        owner: dict[str, str] = {}
        for op in self.ops:
            for port in op.ports:
                if port.role == "weight" and len(port.sources) == 1:
                    site = op.site(port.name)
                    owner[site] = first.setdefault(port.sources[0], site)
        return owner

    @cached_property
    def selections(self) -> dict[str, Selection]:
        """Operators that select some of the weights of experts for a product, by name.

        They read a stored stack of matrices and an index that depends on the input. `experts[index]` has no weights of
        its own, so the stack has the quantizer, in front of the selection.
        """
        found: dict[str, Selection] = {}
        for op in self.ops:
            if op.kind not in SELECTING or op.constant or len(op.ports) < 2:
                continue
            stack, index = op.ports[:2]
            if stack.role != "weight" or len(stack.shape) < 3 or not stack.is_floating or index.is_floating:
                continue
            if len(stack.sources) != 1 or stack.sources[0].kind != "param":
                continue
            readers = self.consumers.get(Source("op", op.name), ())
            if len(readers) == 1 and (readers[0][0].kind, readers[0][1].name) in SELECTED:
                product, port = readers[0]
                axis = SELECTED[product.kind, port.name]
                found[op.name] = Selection(product=product.name, port=port.name, axis=axis)
        return found

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of one forward."""
        return sum(op.macs for op in self.ops)

    def to_json(self) -> str:
        """A deterministic JSON text."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Graph:
        """Parse the result of `to_json`."""
        data = parse_json(text, where="graph")
        graph: Graph = validated(TypeAdapter(Graph), data, title="not a valid recorded graph")
        problems = list(_contradictions(graph))
        if problems:
            raise PlanError(problems, title="not a valid recorded graph")
        return graph


def _shape_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _contradictions(graph: Graph) -> Iterator[Problem]:
    """Problems that the schema can't find: duplicate or missing names, negative sizes, reads before writes."""
    made: dict[str, int] = {}
    for op in graph.ops:
        where = f"ops.{op.name}"
        for port in op.ports:
            for source in port.sources:
                if source.kind == "op" and not 0 <= source.index < made.get(source.name, 0):
                    yield Problem(
                        what="no earlier operator produces it", where=where, value=str(source), code="invalid-value"
                    )
        if op.name in made:
            yield Problem(what="two operators have this name", where=where, code="invalid-value")
        shapes = (*(port.shape for port in op.ports), *(output.shape for output in op.outputs))
        if any(not 0 <= size < 2**40 for shape in shapes for size in shape):
            yield Problem(what="invalid shape", where=where, value=shapes, code="invalid-value")
        if not 0 <= op.macs < 2**60 or op.seen < 0 or op.call < 0 or op.depth < 0:
            yield Problem(what="a number is out of range", where=where, code="invalid-value")
        if op.ports and not op.outputs and op.macs:
            yield Problem(what="an operator has no output", where=where, code="invalid-value")
        made[op.name] = len(op.outputs)
    for index, parameter in enumerate(graph.parameters):
        if not parameter.names or any(not 0 <= size < 2**40 for size in parameter.shape):
            what = "a parameter needs a name and a shape"
            yield Problem(what=what, where=f"parameters.{index}", value=parameter, code="invalid-value")
    for path, source in graph.outputs:
        if source.kind == "op" and source.name not in made:
            yield Problem(what="no operator produces this output", where=path, value=str(source), code="invalid-value")


def merged(first: Graph, second: Graph) -> Graph:
    """The union of two recordings. Operators keep the order in which they were first recorded."""
    ops: dict[str, Op] = dict(first.by_name)
    order: list[str] = [op.name for op in first.ops]
    at = 0
    for op in second.ops:
        known = ops.get(op.name)
        if known is None:
            ops[op.name] = op
            order.insert(at, op.name)
            at += 1
            continue
        ops[op.name] = _merged_op(known, op)
        at = max(at, order.index(op.name) + 1)
    outputs = dict.fromkeys([*first.outputs, *second.outputs])
    return Graph(
        ops=tuple(ops[name] for name in order),
        inputs=tuple(dict.fromkeys([*first.inputs, *second.inputs])),
        outputs=tuple(outputs),
        parameters=first.parameters,
        runs=first.runs + second.runs,
    )


def _merged_op(a: Op, b: Op) -> Op:
    other = {port.name: port for port in b.ports}
    ports: Sequence[Port] = [
        replace(port, sources=tuple(dict.fromkeys([*port.sources, *other[port.name].sources])))
        if port.name in other
        else port
        for port in a.ports
    ]
    extra = [port for port in b.ports if a.port(port.name) is None]
    return replace(
        a,
        ports=(*ports, *extra),
        seen=a.seen + b.seen,
        macs=max(a.macs, b.macs),
        depth=max(a.depth, b.depth),
        constant=a.constant and b.constant,
    )
