"""Multiply-accumulates of one operator call, from its shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

Shape = tuple[int, ...]

# Kinds of operators that multiply what they are given: none of them may go unnoticed.
PRODUCTS = frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("linear", "addmm", "matmul", "mv", "dot", "vdot", "inner", "baddbmm", "addbmm", "addmv", "einsum"),
        *("bilinear", "tensordot", "chain_matmul", "linalg_multi_dot", "conv_tbc", "cdist"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell"),
        *("_grouped_mm", "grouped_mm", "scaled_grouped_mm", "_scaled_grouped_mm", "_scaled_mm", "scaled_mm"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        *("mm", "bmm", "_sparse_mm", "smm", "hspmm", "sspaddmm", "_convolution", "cudnn_convolution"),
    )
)


def is_product(kind: str) -> bool:
    """Whether operators of this kind multiply, also if code calls them as `torch.ops.aten.mm.default`.

    >>> is_product("mm.default"), is_product("transformed_matmul"), is_product("add")
    (True, True, False)
    """
    return kind.removeprefix("transformed_").partition(".")[0] in PRODUCTS


def macs(kind: str, inputs: Mapping[str, Shape], output: Shape, equation: str = "") -> int:
    """Multiply-accumulates; 0 for operators that only move or scale numbers. `equation` is that of einsum.

    >>> macs("linear", {"input": (4, 8), "weight": (16, 8)}, (4, 16))
    512
    """
    if kind.startswith("conv_transpose"):
        weight = inputs.get("weight", ())  # (in, out / groups, *kernel): each input element meets weight[0]
        return prod(inputs["input"]) * prod(weight[1:]) if weight else 0
    if kind.startswith("conv"):
        weight = inputs.get("weight", ())  # (out, in / groups, *kernel): each output element needs weight[0]
        return prod(output) * prod(weight[1:]) if weight else 0
    if kind in ("linear", "addmm"):
        return prod(output) * inputs["input"][-1]
    if kind in ("matmul", "mv", "dot", "inner"):
        return prod(output) * inputs["input0"][-1]
    if kind in ("baddbmm", "addmv"):
        return prod(output) * inputs["input1"][-1]
    if kind == "einsum":
        return prod(output) * _summed(equation, list(inputs.values()))
    if kind in ("grouped_mm", "_grouped_mm", "_scaled_grouped_mm", "scaled_grouped_mm", "_scaled_mm", "scaled_mm"):
        # (rows, k) · (experts, k, n): each row meets one expert; (k, rows) · … sums along ragged rows alike
        first = next(iter(inputs.values()), ())
        return prod(output) * first[-1] if len(output) <= 2 else prod(output[-2:]) * first[-1]
    if kind == "addbmm":  # (b, m, k) · (b, k, n), summed over b
        return prod(inputs["input1"]) * inputs["input2"][-1]
    if kind == "conv_tbc":  # (time, batch, in) · (kernel, in, out)
        return prod(output) * prod(inputs["input1"][:2])
    if kind == "cdist":
        return prod(output) * inputs["input0"][-1]
    if kind == "tensordot":  # (m·k)(k·n)(m·n) = (m·k·n)²
        return isqrt(prod(inputs["input0"]) * prod(inputs["input1"]) * prod(output))
    if kind in ("linalg_multi_dot", "chain_matmul"):
        matrices = list(inputs.values())
        rows = prod(matrices[0][:-1])
        return sum(rows * prod(shape) for shape in matrices[1:])
    if kind == "scaled_dot_product_attention":
        query, key, value = inputs["query"], inputs["key"], inputs["value"]
        heads = prod(query[:-2])
        return heads * query[-2] * key[-2] * (query[-1] + value[-1])
    if kind in ("lstm_cell", "gru_cell", "rnn_cell"):
        states = 2 if kind == "lstm_cell" else 1  # they stand between the input and the two weights
        weights = [inputs.get(f"input{states + i}", ()) for i in (1, 2)]
        return inputs["input0"][0] * sum(prod(weight) for weight in weights)
    if kind in ("lstm", "gru", "rnn"):
        first = inputs["input0"]
        steps = prod(first[:-1])
        return steps * sum(prod(shape) for shape in inputs.values() if len(shape) == 2 and shape is not first)
    if kind == "bilinear":
        weight = inputs.get("input2", ())
        return prod(output[:-1]) * prod(weight)
    return 0


def _summed(equation: str, shapes: list[Shape]) -> int:
    """How many products einsum adds up per element of its output; 0 when it adds up none."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(left.split(","), shapes, strict=False):
        head, _, tail = term.partition("...")  # letters behind the dots count from the end
        for letter, size in [*zip(head, shape, strict=False), *zip(tail[::-1], shape[::-1], strict=False)]:
            sizes[letter] = max(size, sizes.get(letter, 1))
    summed = [letter for letter in sizes if (letter not in right if arrow else left.count(letter) > 1)]
    return prod(sizes[letter] for letter in summed) if summed and len(shapes) > 1 else 0
