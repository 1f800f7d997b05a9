"""The weight of an operator, and what its kernel makes of it."""

from __future__ import annotations

from torch import Tensor, nn

from bitwright.errors import BitwrightError
from bitwright.graph import Op
from bitwright.plan import ComputeSpec
from bitwright.registry import KERNELS


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
    found: Tensor | None = KERNELS.get(spec.format).rounded(weight, kind, spec)
    if found is None:
        fix = "use output-error, which runs the kernel itself, or give the kernel a `rounded` (docs/add-a-kernel.md)"
        raise BitwrightError("it isn't known how this kernel rounds weights", value=spec.format, fix=fix)
    return found
