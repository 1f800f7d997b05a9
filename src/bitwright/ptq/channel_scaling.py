"""Move scaling factors of channels between operators, without changing the model's function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bitwright.graph import Op, Port, Source
from bitwright.graph.recording import Call, run_call
from bitwright.ptq.step import PtqContext

_WEIGHTED = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
# f(s·x) = s·f(x) for each s > 0
_HOMOGENEOUS = {
    *("relu", "leaky_relu", "prelu", "dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d"),
    *("adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "interpolate", "mean"),
}
_RESHAPES = ("flatten", "reshape", "view", "squeeze")


@dataclass(frozen=True, kw_only=True)
class ScalingPair:
    """Two operators: only `second` reads the output channels of `first`."""

    first: Op
    second: Op
    between: tuple[Op, ...]
    clip: Op | None = None
    ceiling: float = inf
    """The upper bound of the clip between them (6 for ReLU6)."""

    def __str__(self) -> str:
        return f"{self.first.name} → {self.second.name}"


def find_pairs(context: PtqContext, *, products: bool = False) -> list[ScalingPair]:
    """All pairs in graph order; operators that almost qualify are added to `skipped` with a reason.

    With `products`, a product with another activation may be between them, as in gated layers (SwiGLU).
    """
    found: list[ScalingPair] = []
    for op in context.graph.ops:
        if op.kind in _WEIGHTED and op.port("weight") is not None:
            pair = _follow(context, op, {call.op.name: call for call in context.tape.calls}, products)
            if isinstance(pair, ScalingPair):
                found.append(pair)
            elif pair is not None:
                context.skipped[op.name] = pair
    return found


def _follow(context: PtqContext, first: Op, calls: dict[str, Call], products: bool) -> ScalingPair | str | None:
    """The pair that starts at `first`, the reason why it can't be scaled, or None if it isn't a candidate."""
    graph = context.graph
    channels = _outputs(first)
    source = Source("op", first.name)
    between: list[Op] = []
    clip: Op | None = None
    ceiling = inf
    while True:
        readers = graph.consumers.get(source, ())
        if len(readers) != 1 or source in graph.output_sources:
            return None  # a residual, a concatenation or an output
        op, port = readers[0]
        if len(port.sources) != 1 or graph.partial(op) or graph.partial(first):
            return "only some inputs take this path"
        if op.kind in _WEIGHTED and port.name == "input":
            break
        if op.kind == "batch_norm":
            if context.plan.folds.get(op.name) is None or context.plan.folds[op.name].into != first.name:
                return f"the norm {op.name} after it isn't folded"
        elif op.kind in ("relu6", "hardtanh"):
            bounds = _bounds(op, calls)
            if bounds is None or bounds[0] != 0 or clip is not None:
                return f"{op.name} has a lower bound other than 0, or is the second clip"
            clip, ceiling = op, bounds[1]
        elif op.kind == "pad":
            if not _pads_zeros(op, calls):
                return f"{op.name} doesn't pad with zeros"
        elif op.kind not in (*_RESHAPES, *_HOMOGENEOUS) and not (products and _is_gated(op)):
            return f"{op.kind} doesn't preserve factors"
        if not _keeps_channels(op, port, channels, calls, last=first.kind == "linear"):
            return f"{op.name} mixes channels with positions"
        between.append(op)
        source = Source("op", op.name)
    same = (first.kind == "linear") == (op.kind == "linear") or (op.kind == "linear" and len(port.shape) == 2)
    if channels != _inputs(op) or not same:
        return f"{op.name} reads another axis"
    problem = _shared(context, first, op)
    return problem or ScalingPair(first=first, second=op, between=tuple(between), clip=clip, ceiling=ceiling)


def _is_gated(op: Op) -> bool:
    """Whether an operator multiplies two activations of equal shape. Both are different, or `first` has two readers."""
    shapes = [port.shape for port in op.ports if port.role == "activation"]
    return op.kind == "mul" and len(shapes) == len(op.ports) == 2 and shapes[0] == shapes[1]


def _shared(context: PtqContext, first: Op, second: Op) -> str | None:
    for op, ports in ((first, ("weight", "bias")), (second, ("weight",))):
        for name in ports:
            port = op.port(name)
            if port is None:
                continue
            if context.weight_of(op, name) is None:
                return f"{op.site(name)} isn't stored as a parameter"
            if context.readers[port.sources[0]] > 1:
                return f"{op.site(name)} is shared with other operators"
    norm = norm_of(context, first)
    if norm is not None and (norm.weight is None or norm.bias is None):
        return "its norm has no weight to hold the factor"
    if first.kind.startswith("conv_transpose") and _outputs(first) != first.port("weight").shape[1]:  # type: ignore[union-attr]
        return "it is a grouped transposed convolution"
    return None


def _keeps_channels(op: Op, port: Port, channels: int, calls: dict[str, Call], *, last: bool) -> bool:
    """Whether channels keep their axis: the last one after a linear operator, otherwise the second."""
    shape = op.outputs[0].shape
    if len(shape) < 2 or shape[-1 if last else 1] != channels:
        return False
    if op.kind == "mean":  # a mean over channels may leave another axis with the same number of elements
        dims = calls[op.name].argument(1, "dim") if op.name in calls else None
        averaged = [dims] if isinstance(dims, int) else list(dims or range(len(port.shape)))
        return (len(port.shape) - 1 if last else 1) not in [dim % len(port.shape) for dim in averaged]
    return last or op.kind not in _RESHAPES or shape[0] == port.shape[0]


def _bounds(op: Op, calls: dict[str, Call]) -> tuple[float, float] | None:
    if op.kind == "relu6":
        return 0.0, 6.0
    call = calls.get(op.name)
    return None if call is None else (call.argument(1, "min_val", -1.0), call.argument(2, "max_val", 1.0))


def _pads_zeros(op: Op, calls: dict[str, Call]) -> bool:
    call = calls.get(op.name)
    if call is None or call.argument(2, "mode", "constant") != "constant":
        return False
    return not call.argument(3, "value", None)


def _outputs(op: Op) -> int:
    return int(op.outputs[0].shape[-1 if op.kind == "linear" else 1])


def _inputs(op: Op) -> int:
    port = op.port("input")
    assert port is not None
    return int(port.shape[-1 if op.kind == "linear" else 1])


def norm_of(context: PtqContext, op: Op) -> Any:
    """The norm folded into an operator."""
    for norm, fold in context.plan.folds.items():
        if fold.into == op.name:
            return context.model.get_submodule(context.graph.by_name[norm].module)
    return None


def factor_of(context: PtqContext, op: Op) -> Tensor | None:
    """γ/σ per output channel of the norm folded into an operator."""
    fold = context.attachment.folds.get(op.site("bias"))
    return None if fold is None else fold.unit()


def _grouped(op: Op, weight: Tensor) -> Tensor:
    """A view of the weight as (groups, outputs per group, inputs per group, positions)."""
    inputs, outputs = _inputs(op), _outputs(op)
    if op.kind.startswith("conv_transpose"):
        groups = outputs // weight.shape[1]
        return weight.reshape(groups, inputs // groups, weight.shape[1], -1).transpose(1, 2)
    groups = inputs // weight.shape[1]
    return weight.reshape(groups, outputs // groups, weight.shape[1], -1)


def output_ranges(context: PtqContext, op: Op) -> Tensor:
    """The largest |w| of each output channel, including the folded norm."""
    weight = _require(context, op)
    ranges = _grouped(op, weight.detach().float()).abs().amax(dim=(2, 3)).flatten()
    factor = factor_of(context, op)
    return ranges if factor is None else ranges * factor.abs()


def input_ranges(context: PtqContext, op: Op) -> Tensor:
    """The largest |w| that multiplies each input channel, including the folded norm."""
    grouped = _grouped(op, _require(context, op).detach().float())
    factor = factor_of(context, op)
    if factor is not None:
        grouped = grouped * factor.abs().reshape(grouped.shape[0], grouped.shape[1], 1, 1)
    return grouped.abs().amax(dim=(1, 3)).flatten()


def input_norms(context: PtqContext, op: Op) -> Tensor:
    """Σ w² over all weights that multiply each input channel, including the folded norm."""
    grouped = _grouped(op, _require(context, op).detach().double())  # squares of large numbers exceed float32
    factor = factor_of(context, op)
    if factor is not None:
        grouped = grouped * factor.reshape(grouped.shape[0], grouped.shape[1], 1, 1)
    return grouped.square().sum(dim=(1, 3)).flatten()


def numbers_per_input(context: PtqContext, op: Op) -> int:
    """The number of weights that multiply one input channel."""
    return _require(context, op).numel() // _inputs(op)


@torch.no_grad()
def divide_outputs(context: PtqContext, op: Op, by: Tensor) -> None:
    """Divide each output channel by its factor: in the norm if there is one, otherwise in weight and bias."""
    norm = norm_of(context, op)
    if norm is not None:
        norm.weight.div_(by.to(norm.weight.dtype))
        norm.bias.div_(by.to(norm.bias.dtype))
        return
    weight = _require(context, op)
    shape = [1] * weight.dim()
    shape[1 if op.kind.startswith("conv_transpose") else 0] = -1
    weight.div_(by.reshape(shape).to(weight.dtype))
    bias = context.weight_of(op, "bias")
    if bias is not None:
        bias.div_(by.to(bias.dtype))


@torch.no_grad()
def multiply_inputs(context: PtqContext, op: Op, by: Tensor) -> None:
    """Multiply the weights of each input channel by its factor."""
    weight = _require(context, op)
    grouped = _grouped(op, weight.float())
    scaled = grouped * by.reshape(grouped.shape[0], 1, grouped.shape[2], 1)
    if op.kind.startswith("conv_transpose"):
        scaled = scaled.transpose(1, 2)
    weight.copy_(scaled.reshape(weight.shape).to(weight.dtype))


def _require(context: PtqContext, op: Op) -> nn.Parameter:
    weight = context.weight_of(op)
    assert weight is not None  # checked by `find_pairs`
    return weight


_NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True, kw_only=True)
class ScalingGroup:
    """Linear operators that read the same channels, and the operator that computes them."""

    maker: Op
    readers: tuple[Op, ...]

    def divide(self, context: PtqContext, by: Tensor) -> None:
        """Divide activations by the factors and multiply weights by them."""
        if ports := _norm_ports(self.maker):
            for port in ports:
                parameter = context.weight_of(self.maker, port)
                if parameter is not None:
                    with torch.no_grad():
                        parameter.div_(by.to(parameter.dtype))
        else:
            divide_outputs(context, self.maker, by)
        for reader in self.readers:
            multiply_inputs(context, reader, by)


def find_groups(context: PtqContext) -> list[ScalingGroup]:
    """All groups with quantized readers, in graph order; operators that almost qualify are added to `skipped`."""
    groups = []
    quantized = {weight.op.name for weight in context.weights()}
    for op in context.graph.ops:
        if not _norm_ports(op):
            continue
        readers = [pair[0] for pair in context.graph.consumers.get(Source("op", op.name), ())]
        if not any(reader.name in quantized for reader in readers):
            continue
        problem = _problem(context, op, readers)
        if problem is not None:
            context.skipped[op.name] = problem
        else:
            groups.append(ScalingGroup(maker=op, readers=tuple(readers)))
    left = dict(context.skipped)
    for pair in find_pairs(context, products=True):
        if pair.second.kind == "linear" and pair.clip is None and pair.second.name in quantized:
            groups.append(ScalingGroup(maker=pair.first, readers=(pair.second,)))
    context.skipped = left  # convolutions without a partner aren't relevant here
    return groups


def _norm_ports(op: Op) -> tuple[str, ...]:
    """The ports with the parameters of a norm: those of the operator, or of a product with one weight per channel.

    Norms of transformers are Python code that ends with such a product.
    """
    if op.kind in _NORMS:
        return ("weight", "bias")
    if op.kind != "mul" or len(op.ports) != 2:
        return ()
    width = op.outputs[0].shape[-1:]
    weights = [port.name for port in op.ports if port.role == "weight" and tuple(port.shape) == tuple(width)]
    activations = [port for port in op.ports if port.role == "activation" and port.shape == op.outputs[0].shape]
    return (weights[0],) if len(weights) == len(activations) == 1 else ()


def _problem(context: PtqContext, op: Op, readers: list[Op]) -> str | None:
    if Source("op", op.name) in context.graph.output_sources or any(reader.kind != "linear" for reader in readers):
        return "operators other than linear ones read it too"
    ports = _norm_ports(op)
    if context.weight_of(op, ports[0]) is None:
        return "the norm has no weight to hold the factor"
    owners = [*((op, port) for port in ports), *((reader, "weight") for reader in readers)]
    for owner, name in owners:
        port = owner.port(name)
        if port is None:
            continue
        if context.weight_of(owner, name) is None or context.readers[port.sources[0]] > 1:
            return f"{owner.site(name)} is shared with other operators, or computed"
    return None


def limit_scaling(by: Tensor, unit: float) -> Tensor:
    """Normalize the factors so that large activations don't grow and small ones don't shrink.

    `unit` is `unit_of` the activations.
    """
    if unit == 1.0:
        return by
    return by / (by.amin() if unit > 1.0 else by.amax())


class Statistic(Protocol):
    """A statistic of an activation's channels, accumulated over batches."""

    def see(self, rows: Tensor) -> None:
        """Add one batch of shape (positions, channels)."""


@torch.no_grad()
def collect_statistics(
    context: PtqContext, groups: list[ScalingGroup], batch: int, statistics: Mapping[str, Statistic]
) -> None:
    """Update each group's statistic (keyed by its maker) with the inputs of its readers; one pass over the data."""
    sources = {group.readers[0].name: group.maker.name for group in groups}

    def look(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = sources.get(call.op.name)
        if name is not None:
            x = args[0] if args else kwargs["input"]
            statistics[name].see(x.reshape(-1, x.shape[-1]).float())
        return run_call(call, args, kwargs)

    context.watch(batch, look)


def weight_columns(context: PtqContext, group: ScalingGroup) -> Tensor:
    """The concatenated weights of all readers: (outputs, channels)."""
    return torch.cat([_weight(context, reader).detach().float() for reader in group.readers])


def _weight(context: PtqContext, op: Op) -> nn.Parameter:
    found = context.weight_of(op)
    assert found is not None  # checked by `find_groups`
    return found
