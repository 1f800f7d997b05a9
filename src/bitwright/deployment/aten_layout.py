"""Operators of torch that move, select or create values, as ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from bitwright.deployment.graph_writer import NodeWriter, register

_LAST = int(np.iinfo(np.int64).max)


# -- copies and types -------------------------------------------------------------------------------------------


@register("detach", "alias", "clone", "contiguous", "lift_fresh_copy", "resolve_conj", "resolve_neg", "positive")
def _same(w: NodeWriter, x: fx.Node, memory_format: Any = None) -> Any:
    return w.value(x)


@register("dropout", "feature_dropout", "alpha_dropout")
def _dropout(w: NodeWriter, p: float, train: bool, **source: fx.Node) -> Any:
    if train and p:
        w.refuse("in training mode")
    (x,) = source.values()  # `input`, or `x` in place
    return w.value(x)


@register("to", "_to_copy", "type_as", "float", "half", "double", "bfloat16")
def _to(w: NodeWriter, x: fx.Node, **_: Any) -> Any:
    return w.tensor(x, w.dtype)


@register("copy")
def _copy(w: NodeWriter, x: fx.Node, src: fx.Node, non_blocking: bool = False) -> Any:
    if len(w.shape(x)) != len(w.shape(src)) or not all(map(w.same, w.shape(x), w.shape(src))):
        w.refuse("of another shape")
    return w.tensor(src, w.dtype)


# -- shapes -----------------------------------------------------------------------------------------------------


@register("view", "reshape", "_unsafe_view", "_reshape_copy")
def _view(w: NodeWriter, x: fx.Node, size: Any = None, shape: Any = None, dtype: Any = None) -> Any:
    if dtype is not None:
        w.refuse("as another type")
    return w.reshape(x, w.shape(w.node), size if shape is None else shape)


@register("flatten.using_ints", "unflatten.int", "view_as", "reshape_as")
def _reshaped(w: NodeWriter, x: fx.Node, **_: Any) -> Any:
    return w.reshape(x, w.shape(w.node))


@register("squeeze")
def _squeeze(w: NodeWriter, x: fx.Node, dim: Any = None) -> Any:
    shape = w.shape(x)
    dims = range(len(shape)) if dim is None else [w.axis(one, len(shape)) for one in _numbers(dim)]
    if any(not isinstance(shape[one], int) for one in dims):  # which is removed if it is 1 at run time
        if dim is not None:
            w.refuse("a dynamic size")
        return w("Squeeze", w.value(x))
    removed = [one for one in dims if shape[one] == 1]
    return w("Squeeze", w.value(x), w.ints(*removed)) if removed else w.value(x)


@register("unsqueeze")
def _unsqueeze(w: NodeWriter, x: fx.Node, dim: int) -> Any:
    return w("Unsqueeze", w.value(x), w.ints(dim % (w.rank(x) + 1)))


def _transposed(w: NodeWriter, x: fx.Node, order: list[int]) -> Any:
    return w.value(x) if order == sorted(order) else w("Transpose", w.value(x), perm=order)


@register("transpose.int", "swapaxes", "swapdims")
def _transpose(
    w: NodeWriter, x: fx.Node, dim0: Any = None, dim1: Any = None, axis0: Any = None, axis1: Any = None
) -> Any:
    rank = w.rank(x)
    one, two = (w.axis(dim, rank) for dim in ((axis0, axis1) if dim0 is None else (dim0, dim1)))
    order = list(range(rank))
    if rank:
        order[one], order[two] = order[two], order[one]
    return _transposed(w, x, order)


@register("permute")
def _permute(w: NodeWriter, x: fx.Node, dims: Sequence[int]) -> Any:
    return _transposed(w, x, [w.axis(dim, w.rank(x)) for dim in dims])


@register("t", "numpy_T", "mT", "adjoint")
def _turn(w: NodeWriter, x: fx.Node) -> Any:
    rank = w.rank(x)
    order = list(range(rank))
    if w.node.target is torch.ops.aten.mT.default or w.node.target is torch.ops.aten.adjoint.default:
        order[-2:] = order[-2:][::-1]
    else:
        order.reverse()
    return _transposed(w, x, order)


@register("expand", "expand_as", "broadcast_to")
def _expand(w: NodeWriter, x: fx.Node, size: Any = None, other: Any = None, implicit: bool = False) -> Any:
    source, target = w.shape(x), w.shape(w.node)
    given = list(size) if isinstance(size, (list, tuple)) and len(size) == len(target) else None
    padded = (1,) * (len(target) - len(source)) + tuple(source)
    sizes: list[Any] = []
    for index, (old, new) in enumerate(zip(padded, target, strict=True)):
        if w.same(old, new):
            sizes.append(1)
        elif isinstance(new, int):
            sizes.append(new)
        elif given is not None:
            sizes.append(given[index])
        elif isinstance(other, fx.Node):
            sizes.append(w.dim(other, index))
        else:
            w.refuse("unknown sizes")
    if len(source) == len(target) and all(isinstance(one, int) and one == 1 for one in sizes):
        return w.value(x)
    return w("Expand", w.value(x), w.vector(sizes))


@register("repeat")
def _repeat(w: NodeWriter, x: fx.Node, repeats: Sequence[Any]) -> Any:
    value = w.value(x)
    if len(repeats) > w.rank(x):
        value = w("Unsqueeze", value, w.ints(*range(len(repeats) - w.rank(x))))
    return w("Tile", value, w.vector(list(repeats)))


# -- parts ------------------------------------------------------------------------------------------------------


@register("cat", "concat", "concatenate")
def _cat(w: NodeWriter, tensors: Sequence[fx.Node], dim: int = 0, axis: int | None = None) -> Any:
    kept = [one for one in tensors if not (w.rank(one) == 1 and w.shape(one)[0] == 0)]  # torch ignores these
    values = [w.tensor(one, w.dtype) for one in kept]
    return values[0] if len(values) == 1 else w("Concat", *values, axis=w.axis(dim, w.rank(w.node)))


@register("stack")
def _stack(w: NodeWriter, tensors: Sequence[fx.Node], dim: int) -> Any:
    axis = dim % w.rank(w.node)
    return w("Concat", *(w("Unsqueeze", w.tensor(one, w.dtype), w.ints(axis)) for one in tensors), axis=axis)


@register("slice.Tensor")
def _slice(w: NodeWriter, x: fx.Node, dim: int, start: Any, end: Any, step: int) -> Any:
    axis, size = w.axis(dim, w.rank(x)), w.shape(x)[w.axis(dim, w.rank(x))]
    begin = 0 if start is None else start
    whole = end is None or (isinstance(end, int) and (end >= _LAST or (isinstance(size, int) and end >= size)))
    whole = whole or (isinstance(end, fx.Node) and w.same(w.meta(end), size))
    if whole and isinstance(begin, int) and begin == 0 and step == 1:
        return w.value(x)
    stop = w.ints(_LAST) if whole else w.vector([end])
    return w("Slice", w.value(x), w.vector([begin]), stop, w.ints(axis), w.ints(step))


@register("narrow")
def _narrow(w: NodeWriter, x: fx.Node, dim: int, start: Any, length: Any) -> Any:
    if not isinstance(start, int) or not isinstance(length, int):
        w.refuse("dynamic sizes")
    return _slice(w, x, dim, start, start + length if start >= 0 or start + length else None, 1)


@register("select.int")
def _select(w: NodeWriter, x: fx.Node, dim: int, index: Any) -> Any:
    axis = w.axis(dim, w.rank(x))
    position = w.constant(np.array(index, np.int64)) if isinstance(index, int) else w.scalar(index)
    return w("Gather", w.value(x), position, axis=axis)


@register("split.Tensor", "split.sizes", "split_with_sizes", "chunk", "unsafe_chunk", "tensor_split.sections")
def _split(w: NodeWriter, x: fx.Node, dim: int, **_: Any) -> Any:
    axis = w.axis(dim, w.rank(x))
    sizes = [one.shape[axis] for one in w.meta(w.node)]
    if not all(isinstance(size, int) for size in sizes):
        w.refuse("dynamic sizes")
    if len(sizes) == 1:
        return (w.value(x),)
    return w("Split", w.value(x), w.ints(*sizes), outputs=len(sizes), axis=axis)


@register("unbind.int")
def _unbind(w: NodeWriter, x: fx.Node, dim: int) -> Any:
    axis = w.axis(dim, w.rank(x))
    count = len(w.meta(w.node))
    return tuple(w("Gather", w.value(x), w.constant(np.array(index, np.int64)), axis=axis) for index in range(count))


@register("index_select")
def _index_select(w: NodeWriter, x: fx.Node, dim: int, index: fx.Node) -> Any:
    if w.rank(x) == 0 or w.rank(index) == 0:
        w.refuse("no axes")
    return w("Gather", w.value(x), w.value(index), axis=w.axis(dim, w.rank(x)))


@register("embedding")
def _embedding(w: NodeWriter, weight: fx.Node, indices: fx.Node, **_: Any) -> Any:
    return w("Gather", w.value(weight), w.value(indices), axis=0)


@register("gather")
def _gather(w: NodeWriter, x: fx.Node, dim: int, index: fx.Node, sparse_grad: bool = False) -> Any:
    if w.rank(x) == 0 or w.rank(index) == 0:
        w.refuse("no axes")
    return w("GatherElements", w.value(x), w.value(index), axis=w.axis(dim, w.rank(x)))


@register("index.Tensor")
def _index(w: NodeWriter, x: fx.Node, indices: Sequence[Any]) -> Any:
    used = [axis for axis, index in enumerate(indices) if index is not None]
    if any(w.meta(indices[axis]).dtype not in (torch.int64, torch.int32) for axis in used):
        w.refuse("by a condition")
    if len(used) == 1:
        return w("Gather", w.value(x), w.value(indices[used[0]]), axis=used[0])
    if used != list(range(len(used))) or not used:
        w.refuse("by tensors at several axes")
    # The indices are broadcast and become the last axis of one tensor.
    places = [w.tensor(indices[axis], torch.int64) for axis in used]
    rank = max(w.rank(indices[axis]) for axis in used)
    total = places[0]
    for place in places[1:]:
        total = w("Add", total, place)
    shape = w("Shape", total, dtype=ir.DataType.INT64)
    parts = [w("Unsqueeze", w("Expand", place, shape), w.ints(rank)) for place in places]
    kind = w.value(x).dtype
    return w("GatherND", w.value(x), w("Concat", *parts, axis=rank), dtype=kind)


@register("pad", "constant_pad_nd")
def _pad(w: NodeWriter, x: fx.Node, pad: Sequence[Any], mode: str = "constant", value: Any = None) -> Any:
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    if mode not in modes or not all(isinstance(one, int) for one in pad):
        w.refuse("this form")
    rank, count = w.rank(x), len(pad) // 2
    begins, ends = [0] * rank, [0] * rank
    for index in range(count):
        begins[rank - 1 - index], ends[rank - 1 - index] = pad[2 * index], pad[2 * index + 1]
    filled = [w.tensor(value or 0, w.dtype)] if mode == "constant" else []
    return w("Pad", w.value(x), w.ints(*begins, *ends), *filled, mode=modes[mode])


@register("flip")
def _flip(w: NodeWriter, x: fx.Node, dims: Sequence[int]) -> Any:
    axes = [w.axis(dim, w.rank(x)) for dim in dims]
    ends = w.ints(*[int(np.iinfo(np.int64).min)] * len(axes))
    return w("Slice", w.value(x), w.ints(*[-1] * len(axes)), ends, w.ints(*axes), w.ints(*[-1] * len(axes)))


@register("tril", "triu")
def _triangle(w: NodeWriter, x: fx.Node, diagonal: Any) -> Any:
    upper = int(w.operator.startswith("triu"))
    return w("Trilu", w.value(x), w.scalar(diagonal), upper=upper)


@register("upsample_nearest2d.vec", "upsample_bilinear2d.vec")
def _resize(
    w: NodeWriter, input: fx.Node, output_size: Any, scale_factors: Any, align_corners: bool | None = None
) -> Any:
    linear = align_corners is not None
    where = "asymmetric" if not linear else ("align_corners" if align_corners else "half_pixel")
    if scale_factors is not None:
        if w.meta(input).dtype != torch.float32 or not all(isinstance(one, (int, float)) for one in scale_factors):
            w.refuse("this form")
        scales, sizes = w.constant(np.array([1, 1, *scale_factors], np.float32)), None
    else:
        target = w.shape(w.node)
        if not all(isinstance(size, int) for size in target[1:]):
            w.refuse("dynamic sizes")
        scales, sizes = None, w.vector([w.dim(input, 0), *target[1:]])
    return w(
        "Resize",
        w.value(input),
        None,
        scales,
        *([] if sizes is None else [sizes]),
        mode="linear" if linear else "nearest",
        coordinate_transformation_mode=where,
        nearest_mode=None if linear else "floor",
    )


@register("pixel_shuffle")
def _pixel_shuffle(w: NodeWriter, x: fx.Node, upscale_factor: int) -> Any:
    if w.rank(x) != 4:
        w.refuse("no batch axis")
    return w("DepthToSpace", w.value(x), blocksize=upscale_factor, mode="CRD")


# -- new tensors ------------------------------------------------------------------------------------------------


@register("arange")
def _arange(w: NodeWriter, end: Any, start: Any = 0, step: Any = 1, **_: Any) -> Any:
    return w("Range", *(w.tensor(one, w.dtype) for one in (start, end, step)))


def _filled(w: NodeWriter, sizes: Sequence[Any], value: Any) -> Any:
    return w("Expand", w.tensor(value, w.dtype), w.vector(sizes))


@register("full", "new_full")
def _full(w: NodeWriter, size: Sequence[Any], fill_value: Any, x: Any = None, **_: Any) -> Any:
    return _filled(w, size, fill_value)


@register("zeros", "new_zeros", "ones", "new_ones")
def _zeros(w: NodeWriter, size: Sequence[Any], x: Any = None, **_: Any) -> Any:
    return _filled(w, size, int("ones" in w.operator))


@register("zeros_like", "ones_like", "full_like")
def _zeros_like(w: NodeWriter, x: fx.Node, fill_value: Any = None, **_: Any) -> Any:
    value = int("ones" in w.operator) if fill_value is None else fill_value
    return _filled(w, [w.dim(x, index) for index in range(w.rank(x))], value)


@register("fill", "zero")
def _fill(w: NodeWriter, x: fx.Node, value: Any = 0) -> Any:
    return _filled(w, [w.dim(x, index) for index in range(w.rank(x))], value)


@register("scalar_tensor")
def _scalar_tensor(w: NodeWriter, s: Any, **_: Any) -> Any:
    return w.tensor(s, w.dtype)


def _numbers(dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim)
