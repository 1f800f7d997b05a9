"""int8: products of 8-bit codes, forward and backward. Weights, their gradients and sums stay float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitwright.graph import Op
from bitwright.graph.operators import kind_of
from bitwright.kernels import products
from bitwright.kernels.codes import FULL, TINY, Codes, Signed, encode, encode_columns, encode_rows
from bitwright.kernels.kernel import Convolution, Kernel, arguments, embedding_arguments, matmul_operands
from bitwright.kernels.products import second_limit, turn
from bitwright.kernels.triton import launch
from bitwright.plan import ComputeSpec

Run = TypeVar("Run", bound=Callable[..., Any])


def _uncompiled(run: Run) -> Run:
    """Exclude a function from torch.compile, which would decompose the packing of weights and fail."""
    disable: Any = torch.compiler.disable
    wrapped: Run = disable(run, reason="integer products are already compiled")
    return wrapped


def _seed(spec: ComputeSpec) -> int | None:
    """A seed from torch's generator, so that seeded runs are reproducible."""
    return int(torch.randint(0, 2**31 - 1, ())) if spec.stochastic else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: ComputeSpec, simulate: bool) -> Tensor:
        codes = encode(x.reshape(-1, x.shape[-1]), whole=spec.per_tensor)
        rows = encode_rows(weight, second_limit(x.device), whole=spec.per_tensor)
        ctx.save_for_backward(codes.values, codes.scales, weight)
        ctx.zero, ctx.spec, ctx.simulate = codes.zero, spec, simulate
        ctx.dtype, ctx.has_bias, ctx.shape = x.dtype, bias is not None, x.shape
        plain = None if bias is None else bias.detach().to(torch.float32)
        out = products.linear(codes, rows, plain, simulate=simulate)
        return out.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        values, scales, weight = ctx.saved_tensors
        x = Codes(values, scales, ctx.zero)
        spec, simulate = ctx.spec, ctx.simulate
        flat = grad.reshape(-1, grad.shape[-1]).to(torch.float32)
        left = right = below = None
        turns = ctx.needs_input_grad[0] and "input" in spec.backward
        seed = _seed(spec) if turns else None
        # the weight's gradient first: this frees the decoded input before the equally large input gradient is allocated
        if ctx.needs_input_grad[1]:
            if "weight" in spec.backward:
                right = products.transposed(_for_weight(flat, x, spec), x, simulate=simulate)
            else:
                right = flat.t() @ x.float()
            right = right.to(weight.dtype)
        if ctx.needs_input_grad[0]:
            if turns:
                codes = encode(flat, seed, signed=True, whole=spec.per_tensor)
                turned = encode_columns(weight, second_limit(flat.device), whole=spec.per_tensor)
                left = products.linear(codes, turned, None, simulate=simulate)
            else:
                left = flat @ weight.to(torch.float32)
            left = left.view(ctx.shape).to(ctx.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            below = flat.sum(0)
        return left, right, below, None, None


def _for_weight(grad: Tensor, x: Codes, spec: ComputeSpec) -> Codes:
    """Encode the gradient for the weight's product. It sums over rows, so the scales of x are multiplied in first."""
    return encode(grad * steps_of(x), _seed(spec), signed=True, limit=second_limit(grad.device), whole=True)


def steps_of(x: Codes) -> Tensor:
    """The scales of the rows, 0 for rows of zeros: such rows, for example padding, don't affect a common scale."""
    return torch.where(x.steps <= TINY, 0.0, x.steps)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: tuple[Any, ...],
        spec: ComputeSpec,
        simulate: bool,
    ) -> Tensor:
        ctx.last = _channels_last(x) or _channels_last(weight)
        codes = encode(x.contiguous(memory_format=torch.channels_last), whole=spec.per_tensor)
        rows = encode_rows(weight, second_limit(x.device), whole=spec.per_tensor)
        ctx.save_for_backward(codes.values, codes.scales, weight)
        ctx.zero, ctx.spec, ctx.simulate, ctx.shape = codes.zero, spec, simulate, shape
        ctx.dtype, ctx.has_bias = x.dtype, bias is not None
        plain = None if bias is None else bias.detach().to(torch.float32)
        return _laid(products.conv2d(codes, rows, plain, *shape, simulate=simulate).to(x.dtype), ctx.last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        values, scales, weight = ctx.saved_tensors
        x = Codes(values, scales, ctx.zero)
        stride, padding, dilation, groups = ctx.shape
        spec, simulate = ctx.spec, ctx.simulate
        grad = grad.to(torch.float32).contiguous(memory_format=torch.channels_last)
        wants = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        left = right = below = None
        in_float = gradients_in_float(weight, *ctx.shape)
        turns = wants[0] and "input" in spec.backward and "input" not in in_float
        weighs = wants[1] and "weight" in spec.backward and "weight" not in in_float
        seed = _seed(spec) if turns else None
        # the input's gradient last: the decoded input, which is equally large, is freed by then
        if weighs:
            shape = (weight.shape[2:], *ctx.shape)
            codes = _for_weight(grad, x, spec)
            right = products.conv2d_weight(codes, x, *shape, simulate=simulate).to(weight.dtype)
            del codes
        asked = [wants[0] and not turns, wants[1] and not weighs, wants[2]]
        if any(asked):
            found = torch.ops.aten.convolution_backward(
                grad,
                # without the weight's gradient, only the input's shape is used
                x.float() if asked[1] else grad.new_empty(()).expand(values.shape),
                weight.to(torch.float32),
                [weight.shape[0]] if asked[2] else None,
                list(stride),
                list(padding),
                list(dilation),
                False,
                [0, 0],
                groups,
                asked,
            )
            left = found[0] if asked[0] else None
            right = found[1].to(weight.dtype) if asked[1] else right
            below = found[2] if asked[2] else None
        if turns:
            codes = encode(grad, seed, signed=True, whole=spec.per_tensor)
            turned = encode_rotated(weight, groups, second_limit(grad.device), whole=spec.per_tensor)
            left = products.conv2d_input(codes, turned, values.shape[2:], *ctx.shape, simulate=simulate)
        return (None if left is None else _laid(left.to(ctx.dtype), ctx.last)), right, below, None, None, None


def _channels_last(x: Tensor) -> bool:
    """Whether a tensor is channels-last and not contiguous: with one channel or one pixel it is both."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _laid(x: Tensor, last: bool) -> Tensor:
    """Convert to the memory format that a float convolution would return."""
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def gradients_in_float(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> dict[str, str]:
    """The gradients of a convolution that the device can't compute with codes, with the reason."""
    if products.gradients_of_all_convolutions(weight.device):
        return {}
    plain = all(s == 1 for s in stride) and all(
        p <= d * (k - 1) for p, d, k in zip(padding, dilation, weight.shape[2:], strict=True)
    )  # the input's gradient is a plain convolution of the output's gradient
    found = {} if plain else {"input": "strided, or with wide padding"}
    return found if groups == 1 else {**found, "weight": "in groups"}


def encode_rotated(weight: Tensor, groups: int, limit: int, *, whole: bool = False) -> Signed:
    """Encode the rotated weight. Rotates bytes instead of floats if channels are contiguous in memory."""
    if groups > 1 or not _channels_last(weight):
        return encode_rows(turn(weight, groups), limit, whole=whole)
    matrix = weight.detach().permute(0, 2, 3, 1)  # in memory order
    found = encode_columns(matrix.reshape(-1, weight.shape[1]), limit, whole=whole)
    return Signed(turn(found.values.t().view(matrix.shape).permute(0, 3, 1, 2), 1), found.scales)


class _MatMul(torch.autograd.Function):
    """Batched products, computed one after another."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, spec: ComputeSpec, simulate: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.spec, ctx.simulate = spec, simulate
        return _products(a, b, None, spec, simulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        spec, simulate = ctx.spec, ctx.simulate
        left = right = None
        if ctx.needs_input_grad[0]:
            turned = b.transpose(-1, -2)
            left = _products(grad, turned, _seed(spec), spec, simulate) if "input" in spec.backward else grad @ turned
        if ctx.needs_input_grad[1]:
            if "weight" in spec.backward:  # the transpose: the gradient is the first operand, and rounded as such
                right = _products(grad.transpose(-1, -2), a, _seed(spec), spec, simulate).transpose(-1, -2)
            else:
                right = a.transpose(-1, -2) @ grad
        return left, right, None, None


def _products(a: Tensor, b: Tensor, seed: int | None, spec: ComputeSpec, simulate: bool) -> Tensor:
    """a · b over equal leading axes."""
    codes = encode(a.reshape(-1, a.shape[-1]), seed, whole=spec.per_tensor)
    columns = b.transpose(-1, -2)
    others = encode_rows(columns.reshape(-1, b.shape[-2]), second_limit(a.device), whole=spec.per_tensor)
    found = [
        products.linear(Codes(one, step, codes.zero), Signed(other, scales), None, simulate=simulate)
        for one, step, other, scales in zip(
            codes.values.view(-1, *a.shape[-2:]),
            codes.scales.expand(a.shape[:-1].numel()).view(-1, a.shape[-2]),
            others.values.view(-1, *columns.shape[-2:]),
            others.scales.view(-1, b.shape[-1]),
            strict=True,
        )
    ]
    return torch.stack(found).view(*a.shape[:-1], b.shape[-1]).to(a.dtype)


class _Embedding(torch.autograd.Function):
    """Look up rows of 8-bit codes. The gradient goes to the float table."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding_idx: int, spec: ComputeSpec) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.padding, ctx.dtype = weight.shape[0], padding_idx, weight.dtype
        if spec.per_tensor:
            return encode_rows(weight, FULL, whole=True).float()[index].to(weight.dtype)
        picked, places = torch.unique(index, return_inverse=True)
        return encode_rows(weight.detach()[picked], FULL).float()[places].to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        wide = grad.to(torch.float32).contiguous()
        table = torch.ops.aten.embedding_dense_backward(wide, index, ctx.rows, ctx.padding, False)
        return None, table.to(ctx.dtype), None, None


class Int8(Kernel):
    """8-bit codes with dynamic scales: per sample or token (per output of a weight), or per tensor."""

    name = "int8"
    has_compiled_arithmetic = True
    kinds: ClassVar[tuple[str, ...]] = ("linear", "conv2d", "conv1d", "matmul", "embedding")
    compiles = False

    @classmethod
    def refuses(cls, op: Op, spec: ComputeSpec) -> str | None:
        """Reject inputs that aren't floating-point or have unusual dimensions."""
        known = super().refuses(op, spec)
        if known is not None or op.kind == "embedding":
            return known
        if not all(port.is_floating for port in op.ports):
            return "its inputs are not floating-point numbers"
        if op.kind == "matmul":
            vectors = any(len(port.shape) < 2 for port in op.ports)
            return "a product with a vector stays float" if vectors else None
        weight = op.port("weight")
        odd = op.kind == "linear" and weight is not None and len(weight.shape) != 2
        return "its weight is not a matrix" if odd else None

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Integer products use oneDNN on CPUs, Triton and cuBLAS on CUDA."""
        if products.engine(device) is not None:
            return None
        return products.missing() if device.type == "cpu" else f"integer products are not available on {device.type}"

    @classmethod
    def missing_for(cls, kind: str, device: torch.device) -> str | None:
        """cuBLAS alone multiplies few convolutions."""
        if products.engine(device) == "cuBLAS" and kind.startswith("conv"):
            reason = launch.missing(device)
            return f"convolutions with groups, or with sizes that aren't multiples of 8, need Triton: {reason}"
        return cls.missing(device)

    @classmethod
    def engine(cls, device: torch.device) -> str | None:
        """The library of the products."""
        return products.engine(device)

    @classmethod
    def rounded(cls, weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor:
        """Round with the codes of the forward product."""
        limit = FULL if kind == "embedding" else second_limit(weight.device)
        return encode_rows(weight, limit, whole=spec.per_tensor).float()

    @_uncompiled
    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call. Unusual or empty calls run in float."""
        found = arguments(func, args, kwargs)
        if found is None or not all(value.numel() for value in found.values() if isinstance(value, Tensor)):
            return func(*args, **kwargs)
        run: dict[str | None, Callable[..., Tensor | None]] = {
            "linear": self._linear,
            "matmul": self._matmul,
            "embedding": self._embedding,
            "conv1d": self._conv,
            "conv2d": self._conv,
        }
        with torch.autocast(device_type=found["input"].device.type, enabled=False):
            result = run[kind_of(func)](**found)
        return func(*args, **kwargs) if result is None else result

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return None if weight.dim() != 2 else _apply(_Linear, input, weight, bias, self.spec, self.simulate)

    def _conv(self, input: Tensor, weight: Tensor, *args: Any, **named: Any) -> Tensor:
        if input.dim() < weight.dim():
            return self._conv(input[None], weight, *args, **named)[0]
        found = Convolution.of(input, weight, *args, **named)
        for product, reason in gradients_in_float(weight, *found.shape).items():
            self._stays(product, reason)
        if weight.dim() == 3:  # treated as an image with one row
            shape = ((1, *found.stride), (0, *found.padding), (1, *found.dilation), found.groups)
            wide = (found.input[:, :, None], weight[:, :, None])
            return _apply(_Conv2d, *wide, found.bias, shape, self.spec, self.simulate)[:, :, 0]
        return _apply(_Conv2d, found.input, weight, found.bias, found.shape, self.spec, self.simulate)

    def _matmul(self, input: Tensor, other: Tensor) -> Tensor | None:
        found = matmul_operands(input, other)
        return None if found is None else _apply(_MatMul, *found, self.spec, self.simulate)

    def _embedding(self, **named: Any) -> Tensor | None:
        found = embedding_arguments(**named)
        if found is None:
            return None
        self._stays("weight", "a sum of rows")
        return _apply(_Embedding, *found, self.spec)

    def _stays(self, product: str, reason: str) -> None:
        """Record that a gradient's product can't be computed with codes."""
        if product in self.spec.backward:
            self.floats[product] = reason


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result
