"""bf16 and fp16: run the operator itself in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitwright.core.tensor_tree import map_tensors
from bitwright.graph.operators import kind_of
from bitwright.kernels.kernel import Kernel
from bitwright.plan import ComputeSpec

_PRODUCTS = ("linear", "conv1d", "conv2d", "matmul")
_KINDS = (*_PRODUCTS, "embedding")
_POOLS = ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
_NAMED = ("relu", *_POOLS, "gelu", "softmax", "layer_norm", "batch_norm")


@cache
def _has_float16_products() -> bool:
    """Whether this CPU has instructions for float16 products. Without them, torch is about 40 times slower."""
    known = torch.cpu.get_capabilities()
    x86 = known.get("architecture") == "x86_64"
    return not x86 or any(known.get(name, False) for name in ("avx512_fp16", "amx_fp16"))


class _LowFloat(Kernel):
    """Casts the inputs, runs the operator and casts the output. Autograd casts gradients in the same way.

    Where the device has no 16-bit products, they are simulated: operands, results and gradients are rounded to 16 bits,
    and the product is float32. A device with such products also adds in float32.
    """

    dtype: ClassVar[torch.dtype]
    kinds: ClassVar[tuple[str, ...]] = _KINDS
    named_kinds: ClassVar[tuple[str, ...]] = _NAMED

    @classmethod
    def rounded(cls, weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor:
        """Cast to the format and back."""
        return weight.to(cls.dtype).to(weight.dtype)

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call in low precision. Weights stay float32 outside of it."""
        kind = kind_of(func)
        if kind == "embedding":
            # cast rows, not the table: 16-bit sums of their gradients would have errors of some percent
            rows = func(*args, **kwargs)
            return rows.to(self.dtype).to(rows.dtype)
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        wide = tensors[0].dtype if tensors else torch.float32
        device = tensors[0].device if tensors else torch.device("cpu")
        simulate = self.simulate or self.missing_for(str(kind), device) is not None
        # a batch norm updates its statistics in place, and accepts 16-bit inputs with float32 statistics
        narrowed = tensors[:1] if kind == "batch_norm" else tensors

        def narrow(tensor: Tensor) -> Tensor:
            if not any(tensor is one for one in narrowed):
                return tensor
            low = tensor.to(self.dtype)
            return low.to(wide) if simulate else low

        def widen(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.to(self.dtype).to(wide) if simulate else tensor.to(wide)

        new_args, new_kwargs = map_tensors((tuple(args), dict(kwargs)), narrow)
        with torch.autocast(device_type=device.type, enabled=False):
            result = func(*new_args, **new_kwargs)
        if isinstance(result, Tensor) and new_args and result is new_args[0] and result is not args[0]:
            return args[0].copy_(widen(result))  # the operator writes to its input
        return map_tensors(result, widen)


class Bf16(_LowFloat):
    """bfloat16."""

    name = "bf16"
    dtype = torch.bfloat16


class Fp16(_LowFloat):
    """float16."""

    name = "fp16"
    dtype = torch.float16

    @classmethod
    def missing_for(cls, kind: str, device: torch.device) -> str | None:
        """Products need instructions that most CPUs don't have."""
        if device.type != "cpu" or kind not in _PRODUCTS or _has_float16_products():
            return None
        return "this CPU has no float16 products: operands and results are rounded to float16, products are float32"
