"""Half and double precision → float32 in an ONNX model: CPU runtimes have hardly any kernels for the others.

Quantizers compute in float32 anyway, and integer kernels take float32 scales. A model in float16 or bfloat16, or one
with parts in them (autocast, a half submodule), is therefore exported with every such tensor in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from bitwright.errors import Problem
from bitwright.graph.tree import tensors_in

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NAMES = {
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.float64: ir.DataType.DOUBLE,
}


def to_float32(model: ir.Model, source: nn.Module, inputs: Any) -> tuple[Problem, ...]:
    """Let all tensors of other float types be float32, in place, and say which there were.

    Double precision inside a float32 model (a sum, a position) stays: only parameters and inputs say that it is meant.
    """
    others = _meant(source, inputs)
    everywhere = [value for graph in model.graphs() for value in _values(graph)]
    others |= {value.dtype for value in everywhere if value.dtype in _HALVES}
    if not others:
        return ()
    for value in everywhere:
        if value.dtype in others:
            value.dtype = ir.DataType.FLOAT
        if value.const_value is not None and value.const_value.dtype in others:
            value.const_value = _converted(value.const_value)
    for graph in model.graphs():
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in others:
                    node.attributes[name] = ir.AttrTensor(name, _converted(attribute.as_tensor()))
                elif _names_type(attribute) and attribute.as_int() in {kind.value for kind in others}:
                    node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
    names = ", ".join(sorted(kind.name.lower() for kind in others))
    return (
        Problem(
            what=f"the artefact has float32 where the model has {names}, also as inputs and outputs",
            fix="nothing, or model.float() before quantize, to simulate in float32 as well",
            code="exported-as-float32",
        ),
    )


def _names_type(attribute: ir.Attr) -> bool:
    return attribute.name in ("to", "dtype", "output_dtype") and attribute.type == ir.AttributeType.INT


def _meant(source: nn.Module, inputs: Any) -> set[ir.DataType]:
    """The other float types of the model's own parameters and of its inputs."""
    # quantizers are float32 always, so they say nothing
    found = {t.dtype for t in (*source.parameters(), *source.buffers(), *(tensor for _, tensor in tensors_in(inputs)))}
    return {_NAMES[dtype] for dtype in found if dtype in _NAMES}


def _values(graph: ir.Graph | ir.Function) -> Iterable[ir.Value]:
    yield from graph.inputs
    if isinstance(graph, ir.Graph):
        yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _converted(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    array = np.ascontiguousarray(tensor.numpy().astype(np.float32))
    return ir.Tensor(array, name=tensor.name)
