"""The weight of an operator, and what its kernel makes of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitwright.errors import BitwrightError
from bitwright.graph import Op
from bitwright.kernels.codes import FULL, encode_rows
from bitwright.kernels.int8 import second_limit
from bitwright.plan import ComputeSpec

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def weight_name(op: Op) -> str | None:
    """The parameter that it multiplies with."""
    port = op.port("weight")
    source = port.sources[0] if port is not None and port.sources else None
    return source.name if source is not None and source.kind == "param" else None


def weight_of(model: nn.Module, op: Op) -> Tensor | None:
    """The parameter itself."""
    name = weight_name(op)
    return None if name is None else model.get_parameter(name).detach()


def rounded_weight(weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor:
    """As the kernel's output sees it."""
    if spec.format in _CASTS:
        return weight.to(_CASTS[spec.format]).to(weight.dtype)
    if spec.format == "int8":
        return encode_rows(weight, FULL if kind == "embedding" else second_limit(weight)).float()
    fix = f"use output-error, which runs the kernel itself, or one of: int8, {', '.join(_CASTS)}"
    raise BitwrightError("it isn't known how this kernel rounds weights", value=spec.format, fix=fix)
