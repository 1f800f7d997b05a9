"""Which number type each operator gives: what it is told, what its kind demands, or what comes in.

Lists as autocast has them: matrix products take the low type, some kinds insist on float32, all others inherit: the
type in which all their inputs agree, the widest where they don't.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.profile.signature import FLOATS, TensorSpec
from bitwright.profile.stepgraph import StepGraph, StepOp
from bitwright.profile.way import AMP_DTYPES, Amp, Way

_CONVOLUTIONS = [f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)]
_PRODUCTS = ["linear", "matmul", "addmm", "baddbmm", "addbmm", "addmv", "mv", "scaled_dot_product_attention", "prelu"]
_CELLS = ["lstm_cell", "gru_cell", "rnn_cell"]
ALLOW = frozenset([*_CONVOLUTIONS, *_PRODUCTS, *_CELLS])
_LOSSES = [
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "nll_loss", "smooth_l1_loss", "kl_div"),
    *("cosine_embedding_loss", "hinge_embedding_loss", "poisson_nll_loss", "triplet_margin_loss", "ctc_loss"),
]
_EXACT = ["avg_pool3d", "max_pool3d", "grid_sample", "polar", "prod", "quantile", "cdist", "trace", "stft", "inverse"]
DENY = frozenset([*_LOSSES, *_EXACT])
_NORMS = ["batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"]
# Statistics and parameters beside the numbers don't widen them.
_FIRST = frozenset([*_NORMS, "dropout", "index_select"])
# What no integers can go through, unless a kernel says so.
_FLOAT_ONLY = ALLOW | DENY | frozenset([*_NORMS, "softmax", "log_softmax", "gelu", "silu", "tanh", "sigmoid", "loss"])
# These say themselves what they give.
_SAYS = frozenset(["to", "float", "half", "bfloat16", "double", "type", "type_as"])
_WIDTH = {"int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def given(op: StepOp, way: Way, amp: Amp | None, before: Mapping[str, str]) -> str:
    """The type of an operator's first output; `before` has those of the operators before it."""
    recorded = op.outputs[0].dtype if op.outputs else "float32"
    if way.gives is not None:
        return way.gives
    if not op.outputs or not op.outputs[0].is_float or op.call.kind in _SAYS:
        return recorded
    if amp is not None and op.call.kind in ALLOW:
        return AMP_DTYPES[amp]
    if op.call.kind in DENY:
        return "float32"
    coming = [type for spec, type in incoming(op, before) if spec.is_float and spec.shape != ()]
    if op.call.kind in _FLOAT_ONLY:
        coming = [type if type in FLOATS else "float32" for type in coming]
    if not coming:
        return recorded
    if op.call.kind in _FIRST:
        return coming[0]
    return max(coming, key=lambda name: _WIDTH.get(name, 4))


def must_be_float(op: StepOp, way: Way) -> bool:
    """Whether what comes in another format must be cast back: no kernel takes it, and the kind doesn't inherit."""
    return way.takes is None and op.call.kind in _FLOAT_ONLY


def incoming(op: StepOp, before: Mapping[str, str]) -> list[tuple[TensorSpec, str]]:
    """For each port the tensor that was recorded, and the type that comes now."""
    return [
        (
            spec,
            before.get(source.removeprefix("op:"), spec.dtype)
            if source.startswith("op:") and spec.is_float
            else spec.dtype,
        )
        for (_, spec), source in zip(op.call.ports, op.sources, strict=True)
    ]


def flow(graph: StepGraph, ways: Mapping[str, Way], amp: Amp | None) -> dict[str, str]:
    """What each operator gives."""
    found: dict[str, str] = {}
    for op in graph.ops:
        found[op.name] = given(op, ways[op.name], amp, found)
    return found
