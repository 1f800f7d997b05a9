"""Layers of torch as ONNX: convolutions, pooling and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bitwright.deployment.graph_writer import NodeWriter, opname, register

# -- convolutions and pooling -----------------------------------------------------------------------------------


def _spatial(numbers: Any, rank: int) -> list[int]:
    found = [numbers] if isinstance(numbers, int) else list(numbers)
    return found * rank if len(found) == 1 else found


def _conv_arguments(w: NodeWriter, weight: fx.Node, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    sizes = w.shape(weight)[2:]
    rank = len(sizes)
    strides, dilations = _spatial(stride, rank), _spatial(dilation, rank)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [step * (size - 1) for step, size in zip(dilations, sizes, strict=True)]
        pads = [one // 2 for one in total] + [one - one // 2 for one in total]
    else:
        pads = _spatial(padding, rank) * 2
    if not all(isinstance(one, int) for one in (*strides, *dilations, *pads, *sizes)):
        w.refuse("dynamic sizes")
    return {"strides": strides, "pads": pads, "dilations": dilations, "group": groups, "kernel_shape": list(sizes)}


@register("conv1d", "conv2d", "conv3d")
def _conv(
    w: NodeWriter, input: fx.Node, weight: fx.Node, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    attributes = _conv_arguments(w, weight, stride, padding, dilation, groups)
    if w.rank(input) != w.rank(weight):
        w.refuse("no batch axis")
    source, added = _padded_input(w, input)
    pads = attributes["pads"]
    attributes["pads"] = [one + more for one, more in zip(pads, added or [0] * len(pads), strict=True)]
    return w("Conv", source, w.value(weight), *([] if bias is None else [w.value(bias)]), **attributes)


def _padded_input(w: NodeWriter, source: fx.Node) -> tuple[Any, list[int]]:
    """The value before a zero padding that only a convolution reads, and the padding of its spatial axes."""
    name = opname(source)
    args: dict[str, Any] = {}
    if name == "pad":
        args = dict(zip(("x", "pad", "mode", "value"), source.args, strict=False))
    if name == "constant_pad_nd":
        args = dict(zip(("x", "pad", "value"), source.args, strict=False))
    args |= source.kwargs if args else {}
    pad, rank = args.get("pad", ()), len(source.meta["val"].shape) - 2
    plain = args.get("mode", "constant") == "constant" and not args.get("value") and len(source.users) == 1
    if not args or not plain or len(pad) > 2 * rank or not all(isinstance(one, int) and one >= 0 for one in pad):
        return w.value(source), []
    pad = [*pad, *[0] * (2 * rank - len(pad))]
    made = w.value(source).producer()
    return made.inputs[0], [*pad[-2::-2], *pad[-1::-2]]


@register("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    w: NodeWriter,
    input: fx.Node,
    weight: fx.Node,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Any:
    attributes = _conv_arguments(w, weight, stride, padding, dilation, groups)
    if w.rank(input) != w.rank(weight):
        w.refuse("no batch axis")
    attributes["output_padding"] = _spatial(output_padding, w.rank(weight) - 2)
    bias = [] if bias is None else [w.value(bias)]
    return w("ConvTranspose", w.value(input), w.value(weight), *bias, **attributes)


@register("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(
    w: NodeWriter, x: fx.Node, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Any:
    rank = int(str(w.node.target).partition("pool")[2][0])
    if w.rank(x) != rank + 2:
        w.refuse("no batch axis")
    return w(
        "MaxPool",
        w.value(x),
        kernel_shape=_spatial(kernel_size, rank),
        strides=_spatial(stride or kernel_size, rank),
        pads=_spatial(padding, rank) * 2,
        dilations=_spatial(dilation, rank),
        ceil_mode=int(ceil_mode),
    )


@register("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    w: NodeWriter,
    x: fx.Node,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any = None,
) -> Any:
    rank = int(str(w.node.target).partition("pool")[2][0])
    if w.rank(x) != rank + 2 or divisor_override is not None or ceil_mode:
        w.refuse("this form")
    return w(
        "AveragePool",
        w.value(x),
        kernel_shape=_spatial(kernel_size, rank),
        strides=_spatial(stride or kernel_size, rank),
        pads=_spatial(padding, rank) * 2,
        count_include_pad=int(count_include_pad),
    )


@register("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg_pool(w: NodeWriter, x: fx.Node, output_size: Any) -> Any:
    rank = int(str(w.node.target).partition("pool")[2][0])
    sizes = w.shape(x)[-rank:]
    wanted = _spatial(output_size, rank)
    if set(wanted) == {1}:
        return w("ReduceMean", w.value(x), w.ints(*range(-rank, 0)), keepdims=1)
    if not all(isinstance(size, int) for size in (*sizes, *wanted)) or w.rank(x) != rank + 2:
        w.refuse("dynamic sizes")
    if any(size % want for size, want in zip(sizes, wanted, strict=True)):
        w.refuse("windows of different sizes")
    kernel = [size // want for size, want in zip(sizes, wanted, strict=True)]
    return w("AveragePool", w.value(x), kernel_shape=kernel, strides=kernel)


# -- norms ------------------------------------------------------------------------------------------------------


@register("batch_norm")
def _batch_norm(
    w: NodeWriter,
    input: fx.Node,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    statistics = [w.data(one) for one in (running_mean, running_var)]
    affine = [None if one is None else w.data(one) for one in (weight, bias)]
    mean, variance = statistics
    if (
        training
        or mean is None
        or variance is None
        or any((a is None) != (b is None) for a, b in zip(affine, (weight, bias), strict=True))
    ):
        w.refuse("no stored statistics")
    gamma = torch.ones_like(mean) if affine[0] is None else affine[0]
    beta = torch.zeros_like(mean) if affine[1] is None else affine[1]
    if (fused := _fused_norm(w, input, gamma, beta, mean, variance, eps)) is not None:
        return fused
    values = [w.value(one) if one is not None else None for one in (weight, bias, running_mean, running_var)]
    values[0] = values[0] or w.constant(gamma)
    values[1] = values[1] or w.constant(beta)
    return w("BatchNormalization", w.value(input), *values, epsilon=eps)


def _fused_norm(
    w: NodeWriter, source: fx.Node, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Any:
    """A convolution with a batch norm in its weights, if only the norm reads it."""
    name = opname(source)
    if name not in ("conv1d", "conv2d", "conv3d") or len(source.users) != 1:
        return None
    made = w.value(source).producer()
    weight = w.data(source.args[1])
    bias_node = source.args[2] if len(source.args) > 2 else source.kwargs.get("bias")
    bias = None if bias_node is None else w.data(bias_node)
    if made is None or weight is None or (bias_node is not None and bias is None):
        return None
    factor = gamma / torch.sqrt(variance + eps)
    shift = (-mean if bias is None else bias - mean) * factor + beta
    shape = (-1, *(1,) * (weight.dim() - 1))
    title = str(made.inputs[1].name)
    operator = title.removesuffix(".weight")
    matrix = w.lazy(title, lambda: weight * factor.reshape(shape), weight)
    vector = w.lazy(f"{operator}.bias", lambda: shift, shift)
    return w("Conv", made.inputs[0], matrix, vector, **{a.name: a.value for a in made.attributes.values()})


@register("layer_norm")
def _layer_norm(
    w: NodeWriter,
    input: fx.Node,
    normalized_shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
    cudnn_enable: Any,
) -> Any:
    scale = w.constant(torch.ones(list(normalized_shape), dtype=w.dtype)) if weight is None else w.value(weight)
    rest = [] if bias is None else [w.value(bias)]
    return w("LayerNormalization", w.value(input), scale, *rest, axis=-len(normalized_shape), epsilon=eps)
