"""bf16 and fp16: run the operator itself in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitwright.core.tensor_tree import map_tensors
from bitwright.graph.operators import kind_of
from bitwright.kernels.kernel import Kernel
from bitwright.plan import ComputeSpec

_KINDS = ("linear", "conv1d", "conv2d", "matmul", "embedding")


class _LowFloat(Kernel):
    """Casts the inputs, runs the operator and casts the output. Autograd casts gradients in the same way."""

    dtype: ClassVar[torch.dtype]
    kinds: ClassVar[tuple[str, ...]] = _KINDS

    @classmethod
    def rounded(cls, weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor:
        """Cast to the format and back."""
        return weight.to(cls.dtype).to(weight.dtype)

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call in low precision. Weights stay float32 outside of it."""
        if kind_of(func) == "embedding":
            # cast rows, not the table: 16-bit sums of their gradients would have errors of some percent
            rows = func(*args, **kwargs)
            return rows.to(self.dtype).to(rows.dtype)
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        wide = tensors[0].dtype if tensors else torch.float32

        def narrow(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            low = tensor.to(self.dtype)
            return low.to(wide) if self.simulate else low

        new_args, new_kwargs = map_tensors((tuple(args), dict(kwargs)), narrow)
        with torch.autocast(device_type=tensors[0].device.type if tensors else "cpu", enabled=False):
            return map_tensors(func(*new_args, **new_kwargs), lambda t: t.to(wide) if t.is_floating_point() else t)


class Bf16(_LowFloat):
    """bfloat16."""

    name = "bf16"
    dtype = torch.bfloat16


class Fp16(_LowFloat):
    """float16."""

    name = "fp16"
    dtype = torch.float16
