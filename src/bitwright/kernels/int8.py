"""int8: products of 8-bit codes, forward and backward. Weights, their gradients and the sums stay float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitwright.graph import Op
from bitwright.kernels import products
from bitwright.kernels.codes import FULL, Codes, as_second, encode, encode_rows
from bitwright.kernels.kernel import Kernel
from bitwright.plan import ComputeSpec


def _seed() -> int:
    """Drawn from torch's own generator, so that a seeded run is the same again."""
    return int(torch.randint(0, 2**31 - 1, ()))


def second_limit(x: Tensor) -> int:
    """The largest code of the second operand on this tensor's device."""
    return products.limit() if x.device.type == "cpu" and products.missing() is None else FULL


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: ComputeSpec, simulate: bool) -> Tensor:
        codes, rows = encode(x.reshape(-1, x.shape[-1])), encode_rows(weight, second_limit(x))
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
        if ctx.needs_input_grad[0]:
            if "input" in spec.backward:
                codes = encode(flat, _seed() if spec.stochastic else None, signed=True)
                turned = encode_rows(weight.t(), second_limit(flat))
                left = products.linear(codes, turned, None, simulate=simulate)
            else:
                left = flat @ weight.to(torch.float32)
            left = left.view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            if "weight" in spec.backward:
                # the transpose of the product of x's columns with the gradient's
                codes = _for_weight(flat, x, spec)
                columns = Codes(values.t().contiguous(), torch.ones_like(codes.scales), x.zero)
                rows = as_second(codes.values.t().contiguous(), codes, second_limit(flat))
                right = products.linear(columns, rows, None, simulate=simulate).t()
            else:
                right = flat.t() @ x.float()
            right = right.to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            below = flat.sum(0)
        return left, right, below, None, None


def _for_weight(grad: Tensor, x: Codes, spec: ComputeSpec) -> Codes:
    """The gradient as the weight's product wants it: rows are summed there, so x's steps are taken into one scale."""
    return encode(grad * x.steps, _seed() if spec.stochastic else None, signed=True, whole=True)


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
        codes = encode(x.contiguous(memory_format=torch.channels_last))
        rows = encode_rows(weight, second_limit(x))
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
        turns = wants[0] and "input" in spec.backward and can_turn(stride, padding, dilation, weight)
        weighs = wants[1] and "weight" in spec.backward and groups == 1
        if turns:
            codes = encode(grad, _seed() if spec.stochastic else None, signed=True)
            turned = encode_rows(turn(weight, groups), second_limit(grad))
            around = [d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[2:], padding, strict=True)]
            left = products.conv2d(codes, turned, None, (1, 1), around, dilation, groups, simulate=simulate)
            wants[0] = False
        if weighs:
            shape = (weight.shape[2:], stride, padding, dilation)
            codes = _for_weight(grad, x, spec)
            right = products.conv2d_weight(codes, x, *shape, second_limit(grad), simulate=simulate).to(weight.dtype)
            wants[1] = False
        if any(wants):
            # without the weight's gradient only the input's shape is looked at
            inputs = x.float() if wants[1] else grad.new_empty(()).expand(values.shape)
            found = torch.ops.aten.convolution_backward(
                grad,
                inputs,
                weight.to(torch.float32),
                [weight.shape[0]] if wants[2] else None,
                list(stride),
                list(padding),
                list(dilation),
                False,
                [0, 0],
                groups,
                wants,
            )
            left = found[0] if wants[0] else left
            right = found[1].to(weight.dtype) if wants[1] else right
            below = found[2] if wants[2] else None
        return (None if left is None else _laid(left.to(ctx.dtype), ctx.last)), right, below, None, None, None


def _channels_last(x: Tensor) -> bool:
    """Whether it lies so, and not by chance: one channel or one pixel lies both ways."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _laid(x: Tensor, last: bool) -> Tensor:
    """As a float convolution would leave it: whoever comes next finds the memory that it is used to."""
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def can_turn(stride: Any, padding: Any, dilation: Any, weight: Tensor) -> bool:
    """Whether the input's gradient is a plain convolution of the output's: with a stride, zeros would lie between."""
    return all(s == 1 for s in stride) and all(
        p <= d * (k - 1) for p, d, k in zip(padding, dilation, weight.shape[2:], strict=True)
    )


def turn(weight: Tensor, groups: int) -> Tensor:
    """(out, in/groups, …) → (in, out/groups, …), each kernel turned around."""
    out, per_group = weight.shape[:2]
    parts = weight.view(groups, out // groups, per_group, *weight.shape[2:]).transpose(1, 2)
    return parts.reshape(groups * per_group, out // groups, *weight.shape[2:]).flip(2, 3)


class _MatMul(torch.autograd.Function):
    """Batches of products, one after the other."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, spec: ComputeSpec, simulate: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.spec, ctx.simulate = spec, simulate
        return _products(a, b, None, simulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        spec, simulate = ctx.spec, ctx.simulate
        seed = _seed() if spec.stochastic else None
        left = right = None
        if ctx.needs_input_grad[0]:
            turned = b.transpose(-1, -2)
            left = _products(grad, turned, seed, simulate) if "input" in spec.backward else grad @ turned
        if ctx.needs_input_grad[1]:
            turned = a.transpose(-1, -2)
            right = _products(turned, grad, seed, simulate) if "weight" in spec.backward else turned @ grad
        return left, right, None, None


def _products(a: Tensor, b: Tensor, seed: int | None, simulate: bool) -> Tensor:
    """a · b over equal leading axes."""
    most = second_limit(a)
    codes = encode(a.reshape(-1, a.shape[-1]), seed)
    parts = zip(codes.values.view(-1, *a.shape[-2:]), codes.scales.view(-1, a.shape[-2]), strict=True)
    columns = b.transpose(-1, -2).reshape(-1, b.shape[-1], b.shape[-2])
    found = [
        products.linear(Codes(*one, codes.zero), encode_rows(other, most), None, simulate=simulate)
        for one, other in zip(parts, columns, strict=True)
    ]
    return torch.stack(found).view(*a.shape[:-1], b.shape[-1]).to(a.dtype)


class _Embedding(torch.autograd.Function):
    """Rows of 8-bit codes; their gradient goes to the float table as usual."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.padding, ctx.dtype = weight.shape[0], padding_idx, weight.dtype
        picked, places = torch.unique(index, return_inverse=True)
        return encode_rows(weight.detach()[picked], 127).float()[places].to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        table = torch.ops.aten.embedding_dense_backward(grad.contiguous(), index, ctx.rows, ctx.padding, False)
        return None, table.to(ctx.dtype), None


class Int8(Kernel):
    """8-bit codes: a scale per sample or token for activations and gradients, per output for weights, found anew."""

    name = "int8"
    kinds: ClassVar[tuple[str, ...]] = ("linear", "conv2d", "conv1d", "matmul", "embedding")

    @classmethod
    def refuses(cls, op: Op, spec: ComputeSpec) -> str | None:
        """Nothing of its kinds but what has other numbers than floats."""
        known = super().refuses(op, spec)
        if known is not None or op.kind == "embedding":
            return known
        return None if all(port.is_floating for port in op.ports) else "its inputs are no floating-point numbers"

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """oneDNN's integer products on CPUs, torch._int_mm on CUDA."""
        return products.missing() if device.type == "cpu" else None

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call; one that has other arguments than the usual ones runs in float."""
        known: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            F.conv2d: self._conv,
            torch.conv2d: self._conv,
            F.conv1d: self._conv,
            torch.conv1d: self._conv,
            F.embedding: self._embedding,
        }
        with torch.autocast(device_type=_device(args).type, enabled=False):
            run: Any = known.get(func, self._matmul)
            return run(func, *args, **kwargs)

    def _linear(self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _apply(_Linear, input, weight, bias, self.spec, self.simulate)

    def _conv(
        self,
        func: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str) or input.dim() != weight.dim():
            result: Tensor = func(input, weight, bias, stride, padding, dilation, groups)
            return result
        dims = weight.dim() - 2
        shape = [each_axis(value, dims) for value in (stride, padding, dilation)]
        if dims == 1:  # a picture of one row
            shape = [(first, *part) for first, part in zip((1, 0, 1), shape, strict=True)]
            wide = (input[:, :, None], weight[:, :, None])
            return _apply(_Conv2d, *wide, bias, (*shape, groups), self.spec, self.simulate)[:, :, 0]
        return _apply(_Conv2d, input, weight, bias, (*shape, groups), self.spec, self.simulate)

    def _matmul(self, func: Any, input: Tensor, other: Tensor) -> Any:
        if min(input.dim(), other.dim()) < 2:
            return func(input, other)
        lead = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
        a, b = input.expand(*lead, *input.shape[-2:]), other.expand(*lead, *other.shape[-2:])
        return _apply(_MatMul, a, b, self.spec, self.simulate)

    def _embedding(
        self,
        func: Any,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        if max_norm is not None or scale_grad_by_freq or sparse:
            return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return _apply(_Embedding, input, weight, -1 if padding_idx is None else padding_idx)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def each_axis(value: Any, dims: int) -> tuple[int, ...]:
    """A stride, padding or dilation for each axis."""
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)


def _device(args: tuple[Any, ...]) -> torch.device:
    return next((value.device for value in args if isinstance(value, Tensor)), torch.device("cpu"))
