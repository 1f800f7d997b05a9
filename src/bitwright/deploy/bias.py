"""Biases as int32 on the grid of input scale × weight scale: what integer kernels add to their accumulators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_LIMIT = 2**31 - 1
_ROOM = 2**30  # a bias that would need more is met by a coarser weight scale of that channel


def quantize_biases(model: ir.Model) -> int:
    """Each float bias of a Conv, Gemm or MatMul + Add with quantized input and weight becomes DQ(int32)."""
    count = 0
    for node in list(model.graph):
        if node.op_type in ("Conv", "Gemm") and len(node.inputs) == 3:
            count += _replace(model, node, node, 2)
        elif node.op_type == "Add":
            for index in (0, 1):
                other = node.inputs[1 - index]
                producer = other.producer() if other is not None else None
                if producer is not None and producer.op_type == "MatMul" and len(producer.outputs[0].uses()) == 1:
                    count += _replace(model, producer, node, index)
                    break
    return count


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None


def _constant(value: ir.Value | None) -> NDArray[np.generic] | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _replace(model: ir.Model, operator: ir.Node, user: ir.Node, index: int) -> int:
    """`operator` multiplies, `user` adds the bias at its input `index`. Returns how many were replaced (0 or 1)."""
    inputs, weights = _dequantize(operator.inputs[0]), _dequantize(operator.inputs[1])
    bias_value = user.inputs[index]
    bias = _constant(bias_value)
    if inputs is None or weights is None or bias is None or bias_value is None or bias.ndim != 1:
        return 0
    if bias.dtype != np.float32 or any(
        operator.attributes[name].as_float() != 1.0 for name in ("alpha", "beta") if name in operator.attributes
    ):
        return 0
    codes = _constant(weights.inputs[0])
    input_scale, weight_scale = _constant(inputs.inputs[1]), _constant(weights.inputs[1])
    if codes is None or input_scale is None or weight_scale is None or input_scale.size != 1:
        return 0
    if weight_scale.ndim > 1 or weight_scale.size not in (1, bias.size):
        return 0  # blocked weights have no scale per output
    scale = (input_scale.reshape(()) * weight_scale.reshape(-1)).astype(np.float32)
    if np.any(np.abs(bias.astype(np.float64)) > _ROOM * scale.astype(np.float64)):
        if len(weights.outputs[0].uses()) > 1:
            return 0  # a tied weight's scale isn't ours to change: this bias stays float
        weight_scale = _coarser(weights, bias, input_scale, weight_scale)
        scale = (input_scale.reshape(()) * weight_scale.reshape(-1)).astype(np.float32)
    rounded = np.rint(bias.astype(np.float64) / scale.astype(np.float64))
    integers = np.clip(rounded, -_LIMIT, _LIMIT).astype(np.int32)
    per_channel = scale.size > 1
    name = f"{user.outputs[0].name}.bias"
    values = [_new(model, f"{name}.codes", integers), _new(model, f"{name}.scale", scale if per_channel else scale[0])]
    attributes = [ir.AttrInt64("axis", 0)] if per_channel else []
    node = ir.Node("", "DequantizeLinear", values, attributes=attributes, name=f"DequantizeLinear:{name}")
    node.outputs[0].name = name
    node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(bias.shape), ir.DataType.FLOAT
    model.graph.insert_before(operator if user is operator else user, node)
    user.replace_input_with(index, node.outputs[0])
    return 1


def _coarser(
    weights: ir.Node, bias: NDArray[np.generic], input_scale: NDArray[np.generic], scale: NDArray[np.generic]
) -> NDArray[np.generic]:
    """Raise the weight scale of channels whose bias doesn't fit into 32 bits; their weights count for nothing beside it."""
    codes_value, scale_value = weights.inputs[0], weights.inputs[1]
    assert codes_value is not None and scale_value is not None and codes_value.const_value is not None
    codes = codes_value.const_value.numpy()
    needed = np.abs(bias.astype(np.float64)) / (_ROOM * float(input_scale.reshape(())))
    if scale.size == 1:
        needed = needed.max(keepdims=True)
    raised = np.maximum(scale.reshape(-1), needed).astype(np.float32)
    ratio = scale.reshape(-1) / raised
    if scale.size > 1:
        axis = weights.attributes["axis"].as_int() % codes.ndim
        shape = [1] * codes.ndim
        shape[axis] = -1
        ratio = ratio.reshape(shape)
    smaller = np.rint(codes.astype(np.float64) * ratio).astype(codes.dtype)
    codes_value.const_value = ir.tensor(smaller, name=codes_value.name, dtype=codes_value.dtype)
    scale_value.const_value = ir.tensor(raised.reshape(scale.shape), name=scale_value.name)
    return raised


def _new(model: ir.Model, name: str, array: NDArray[np.generic]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.asarray(array), name=name))
    assert value.const_value is not None
    value.shape, value.dtype = ir.Shape(np.shape(array)), value.const_value.dtype
    model.graph.register_initializer(value)
    return value
