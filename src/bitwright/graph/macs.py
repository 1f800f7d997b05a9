"""Multiply-accumulates of one operator call, from its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

Shape = tuple[int, ...]


def macs(kind: str, inputs: Mapping[str, Shape], output: Shape) -> int:
    """Multiply-accumulates; 0 for operators that only move or scale numbers.

    >>> macs("linear", {"input": (4, 8), "weight": (16, 8)}, (4, 16))
    512
    """
    if kind.startswith("conv_transpose"):
        weight = inputs.get("weight", ())  # (in, out / groups, *kernel): each input element meets weight[0]
        return prod(inputs["input"]) * prod(weight[1:]) if weight else 0
    if kind.startswith("conv"):
        weight = inputs.get("weight", ())  # (out, in / groups, *kernel): each output element needs weight[0]
        return prod(output) * prod(weight[1:]) if weight else 0
    if kind == "linear":
        return prod(output) * inputs["input"][-1]
    if kind == "addmm":
        return prod(output) * inputs["input"][-1]
    if kind == "matmul":
        return prod(output) * inputs["input0"][-1]
    if kind == "baddbmm":
        return prod(output) * inputs["input1"][-1]
    if kind == "scaled_dot_product_attention":
        query, key, value = inputs["query"], inputs["key"], inputs["value"]
        heads = prod(query[:-2])
        return heads * query[-2] * key[-2] * (query[-1] + value[-1])
    if kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        first = inputs["input0"]
        steps = prod(first[:-1])
        return steps * sum(prod(shape) for shape in inputs.values() if len(shape) == 2 and shape is not first)
    if kind == "bilinear":
        weight = inputs.get("input2", ())
        return prod(output[:-1]) * prod(weight)
    return 0
