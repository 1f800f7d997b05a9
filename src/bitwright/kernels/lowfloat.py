"""Products of small floats: bf16 and fp16 run the operator itself in 16 bits, fp8 multiplies 8-bit floats.

fp8 has a scale per tensor: e4m3 forward, e5m2 for gradients, which need its range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitwright.core.tensor_tree import map_tensors
from bitwright.graph import Op
from bitwright.graph.operators import kind_of
from bitwright.kernels.kernel import Kernel, arguments, matmul_operands
from bitwright.plan import ComputeSpec
from bitwright.quantizers.grid import SMALLEST

_PRODUCTS = ("linear", "conv1d", "conv2d", "matmul")
_KINDS = (*_PRODUCTS, "embedding")
_POOLS = ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
_NAMED = ("relu", *_POOLS, "gelu", "softmax", "layer_norm", "batch_norm")
_FORWARD, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_CAPABILITY = (8, 9)
"""The first CUDA devices with 8-bit float products (Ada)."""
_ALIGNED = 16
"""`torch._scaled_mm` needs multiples of this number of columns and terms."""


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


def _encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest 8-bit floats of x / scale, and the scale. The largest value becomes the largest float."""
    x = x.detach().to(torch.float32)
    largest = torch.finfo(dtype).max
    scale = x.abs().amax() / largest
    scale = torch.where(scale < float("inf"), scale.clamp(min=SMALLEST), float("nan"))
    return (x / scale).clamp(-largest, largest).to(dtype), scale


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, simulate: bool) -> Tensor:
    """a · bᵀ in float32."""
    if simulate or a.shape[1] % _ALIGNED or len(b) % _ALIGNED:
        return F.linear(a.to(torch.float32) * scale_a, b.to(torch.float32) * scale_b)
    # both operands with a contiguous reduction axis
    first, second = a.contiguous(), b.contiguous().t()
    return torch._scaled_mm(first, second, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)


class _Product(torch.autograd.Function):
    """x · weightᵀ of matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spec: ComputeSpec, simulate: bool) -> Tensor:
        (a, scale_a), (b, scale_b) = _encode(x, _FORWARD), _encode(weight, _FORWARD)
        ctx.save_for_backward(a, b, scale_a, scale_b, *((x, weight) if len(spec.backward) < 2 else ()))
        ctx.backward_products, ctx.simulate, ctx.dtypes = spec.backward, simulate, (x.dtype, weight.dtype)
        return _multiply(a, b, scale_a, scale_b, simulate=simulate).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, scale_a, scale_b, *floats = ctx.saved_tensors
        left = right = None
        codes, scale = _encode(grad, _GRADIENT)
        wide = grad.to(torch.float32)
        if ctx.needs_input_grad[0]:
            if "input" in ctx.backward_products:
                left = _multiply(codes, b.t(), scale, scale_b, simulate=ctx.simulate)
            else:
                left = wide @ floats[1].to(torch.float32)
            left = left.to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            if "weight" in ctx.backward_products:
                right = _multiply(codes.t(), a.t(), scale, scale_a, simulate=ctx.simulate)
            else:
                right = wide.t() @ floats[0].to(torch.float32)
            right = right.to(ctx.dtypes[1])
        return left, right, None, None


class Fp8(Kernel):
    """8-bit floats with dynamic scales per tensor: e4m3 forward, e5m2 for gradients."""

    name = "fp8"
    kinds: ClassVar[tuple[str, ...]] = ("linear", "matmul")

    @classmethod
    def refuses(cls, op: Op, spec: ComputeSpec) -> str | None:
        """Reject products with vectors and inputs that aren't floating-point."""
        known = super().refuses(op, spec)
        if known is not None:
            return known
        if not all(port.is_floating for port in op.ports):
            return "its inputs are not floating-point numbers"
        vectors = any(len(port.shape) < 2 for port in op.ports if port.name != "bias")
        return "a product with a vector stays float" if vectors else None

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Products need a CUDA device of the generation Ada, Hopper or later."""
        if device.type != "cuda":
            return f"8-bit floats are multiplied on CUDA devices, not on {device.type}"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY:
            return None
        return f"compute capability {'.'.join(map(str, capability))}, but 8-bit floats need 8.9"

    @classmethod
    def engine(cls, device: torch.device) -> str | None:
        """The library of the products."""
        return "cuBLAS" if cls.missing(device) is None else None

    @classmethod
    def rounded(cls, weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor:
        """Round with the scale of the forward product."""
        values, scale = _encode(weight, _FORWARD)
        return values.to(torch.float32) * scale

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call. Unusual or empty calls run in float."""
        found = arguments(func, args, kwargs)
        if found is None or not all(value.numel() for value in found.values() if isinstance(value, Tensor)):
            return func(*args, **kwargs)
        device = found["input"].device
        simulate = self.simulate or self.missing(device) is not None
        with torch.autocast(device_type=device.type, enabled=False):
            if kind_of(func) == "linear":
                return self._linear(**found, simulate=simulate)
            operands = matmul_operands(**found)
            return func(*args, **kwargs) if operands is None else self._matmul(*operands, simulate=simulate)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *, simulate: bool) -> Tensor:
        flat = input.reshape(-1, input.shape[-1])
        result: Tensor = _Product.apply(flat, weight, self.spec, simulate)  # type: ignore[no-untyped-call]
        result = result.view(*input.shape[:-1], len(weight))
        return result if bias is None else result + bias.to(result.dtype)

    def _matmul(self, a: Tensor, b: Tensor, *, simulate: bool) -> Tensor:
        """Batched products, one after another."""
        lefts, rights = a.reshape(-1, *a.shape[-2:]), b.transpose(-1, -2).reshape(-1, b.shape[-1], b.shape[-2])
        pairs = zip(lefts, rights, strict=True)
        found = [_Product.apply(one, other, self.spec, simulate) for one, other in pairs]  # type: ignore[no-untyped-call]
        return torch.stack(found).view(*a.shape[:-1], b.shape[-1])
