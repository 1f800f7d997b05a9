"""Rules for models that predict tokens: their head, attention products, norms and routers, and formats that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bitwright.core.errors import Problem
from bitwright.graph import Graph, Op, Source
from bitwright.graph.operators import is_product
from bitwright.plan import Plan

__all__ = ["TokenModel", "default_steps", "plan_warnings", "token_model"]

HEAD_BITS = 8
"""Bits of the head's weights if a named precision has fewer."""
_HEADS = ("linear", "matmul", "addmm")
# operators between the head and the output, or between a router and its choice of experts
_PASSING = ("to", "float", "type", "type_as", "mul", "div", "truediv", "tanh", "view", "reshape", "add", "getitem")
_CHOOSING = (*_PASSING, "softmax", "sigmoid", "masked_fill", "sum", "squeeze", "unsqueeze")
_NORMS = ("layer_norm", "rms_norm")
_LONGEST = 12  # maximum number of operators that are followed backwards


@dataclass(frozen=True, kw_only=True)
class TokenModel:
    """The operators of a model that predicts tokens, with roles that decide their formats."""

    head: str
    """The operator that computes a score for every token of the vocabulary."""
    routers: frozenset[str]
    """Operators that choose experts."""

    def float_reason(self, op: Op) -> str | None:
        """Why an operator stays in float, or None if the general rules explain it."""
        if op.kind == "scaled_dot_product_attention" or (is_product(op.kind) and _only_activations(op)):
            return "attention: a product of two activations, which are not quantized here"
        if op.kind == "embedding":
            return "embedding: a lookup that doesn't multiply; its weight is read one row per token"
        if op.kind in _NORMS or (op.kind == "mul" and any(p.role == "weight" and len(p.shape) == 1 for p in op.ports)):
            return "norm: one weight per channel, too few to save memory or time"
        return None


ROUTER = "router: small errors would choose other experts"
HEAD = "errors of the head change the predicted token directly"


def token_model(graph: Graph) -> TokenModel | None:
    """The roles of operators, or None if the model doesn't return scores for the rows of an embedding."""
    rows = {
        parameter.shape[0]
        for op in graph.ops
        if op.kind == "embedding" and (parameter := op.port("weight")) is not None and len(parameter.shape) == 2
    }
    for source in graph.output_sources:
        head = _before(graph, source, _HEADS, _PASSING)
        if head is not None and len(head.outputs[0].shape) == 3 and head.outputs[0].shape[-1] in rows:
            return TokenModel(head=head.name, routers=frozenset(_routers(graph)))
    return None


def _routers(graph: Graph) -> Iterator[str]:
    for op in graph.ops:
        port = op.port("input") or op.port("input0")
        if op.kind == "topk" and port is not None and len(port.sources) == 1:
            found = _before(graph, port.sources[0], _HEADS, _CHOOSING)
            if found is not None:
                yield found.name


def _before(graph: Graph, source: Source, wanted: tuple[str, ...], passing: tuple[str, ...]) -> Op | None:
    """The nearest operator of a wanted kind with a weight, before operators that keep the meaning of its result."""
    for _ in range(_LONGEST):
        op = graph.by_name.get(source.name) if source.kind == "op" else None
        if op is None:
            return None
        if op.kind in wanted:
            return op if any(port.role == "weight" for port in op.ports) else None
        moving = [port for port in op.ports if port.role == "activation" and len(port.sources) == 1]
        if op.kind not in passing or not moving:
            return None
        source = moving[0].sources[0]
    return None


def _only_activations(op: Op) -> bool:
    return len(op.ports) > 1 and all(port.role == "activation" for port in op.ports)


def default_steps(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """The PTQ steps that a plan gets unless others are given: those that keep the function and need one pass.

    A few channels of a decoder's activations are much larger than the others, so one scale per token loses the others.
    Scaling channels by factors that move into norms and weights avoids most of this error.
    """
    rounded = (
        spec.format.dynamic and spec.format.minifloat is None and spec.format.bits <= 8 for _, spec in plan.quantized
    )
    return ("smoothquant:alpha=auto",) if any(rounded) and token_model(graph) is not None else ()


def plan_warnings(graph: Graph, plan: Plan) -> tuple[Problem, ...]:
    """Problems of a plan that are known before calibration."""
    if token_model(graph) is None:
        return ()
    static = [
        site
        for site, spec in plan.quantized
        if spec.share is None
        and spec.quantizer != "product"
        and not spec.format.is_float
        and not spec.format.dynamic
        and spec.format.granularity == "tensor"
        and spec.format.bits <= 8
        and not _is_weight(graph, site)
    ]
    if not static:
        return ()
    what = "a few channels of language models are much larger than the others, so one static scale for an activation "
    return (
        Problem(
            what=f"{what}loses most values: expect a much worse perplexity (39 became 63 for SmolLM2-135M)",
            where=", ".join(static[:3]) + (f" and {len(static) - 3} more" if len(static) > 3 else ""),
            fix='use a scale per token: precision="w8a8-dynamic" (--precision w8a8-dynamic), or weights only: "w8a16"',
            code="static-activations",
        ),
    )


def _is_weight(graph: Graph, site: str) -> bool:
    operator, _, port = site.rpartition(":")
    op = graph.by_name.get(operator)
    found = None if op is None else op.port(port)
    return port in ("weight", "bias") or (found is not None and found.role != "activation")
