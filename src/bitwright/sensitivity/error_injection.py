"""Put kernels, or errors, onto single operators of a float model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitwright.core.errors import BitwrightError
from bitwright.core.modes import eval_mode
from bitwright.core.registry import KERNELS
from bitwright.graph import Graph, Op
from bitwright.kernels.kernel import arguments, each_axis, padded
from bitwright.plan import ComputeSpec, Plan
from bitwright.quantizers import attachment_of, prepare, strip


class Operators:
    """The operators of a model, each of which can be run by something else."""

    def __init__(self, model: nn.Module, graph: Graph, names: Mapping[str, Any]) -> None:
        attachment = attachment_of(model)
        self._hooks = {name: attachment.hooks_at(graph.by_name[name]) for name in names}

    def put(self, stand_ins: Mapping[str, Any]) -> None:
        """These run by what is given for them, all others in float."""
        for name, hooks in self._hooks.items():
            assert hooks is not None
            hooks.kernel = stand_ins.get(name)


@contextmanager
def operators_of(model: nn.Module, graph: Graph, specs: Mapping[str, ComputeSpec]) -> Iterator[Operators]:
    """Take hold of these operators; in the end the model is as it was."""
    prepare(model, Plan(compute=specs), graph=graph, simulate=True)
    try:
        found = Operators(model, graph, specs)
        found.put({})
        yield found
    finally:
        strip(model)


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Batch norms by the batch, as where gradients are made, but no dropout; running statistics are put back."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with eval_mode(model):
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.train()
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])


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


@dataclass(frozen=True)
class Products:
    """The three products of an operator without bias."""

    kind: str
    forward: Callable[[Tensor, Tensor], Tensor]
    #: The gradient of the left operand, from (gradient of the output, left, right); None where it has none.
    to_left: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    to_right: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: Of convolutions: stride, padding, dilation, groups.
    shape: tuple[Any, ...] = ()


@dataclass
class Seen:
    """One call of an operator: its numbers, and the tensors that stand for errors.

    Places: the operands of the output, `left` and `right`; those of the backward products, `left_again`, `right_again`
    and the output's gradient in each, `grad_for_left` and `grad_for_right`; what the products give, `out`, `to_left`
    and `to_right`.
    """

    products: Products
    places: dict[str, Tensor]
    #: The function that the model calls.
    func: Callable[..., Any]
    #: The gradient of the output, known after the backward pass.
    grad: Tensor | None = None
    #: What the products gave, by place.
    given: dict[str, Tensor] = field(default_factory=dict)

    @property
    def channel(self) -> int:
        """The axis of channels of what comes and what goes."""
        return 1 if self.products.shape else -1

    def rows(self, x: Tensor) -> Tensor:
        """Samples of a convolution, tokens of anything else: what kernels give a scale of its own."""
        return x if self.products.shape else x.reshape(-1, x.shape[-1])

    @property
    def left(self) -> Tensor:
        """Its left operand."""
        return self.places["left"].detach()

    @property
    def right(self) -> Tensor:
        """Its right operand: the weight, if it has one."""
        return self.places["right"].detach()


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seen: Seen, *operands: Tensor) -> Tensor:
        left, right = operands[:2]
        ctx.seen = seen
        ctx.save_for_backward(*operands[2:])
        return seen.products.forward(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Made of differentiable functions: errors in here are errors of the gradients."""
        left, right, zero = ctx.saved_tensors
        seen: Seen = ctx.seen
        # the second backward pass comes by again, through what the gradients were made of: there is no error in it
        first_pass = seen.grad is None
        if first_pass:
            seen.grad = grad.detach()

        def product(function: Callable[..., Tensor], side: str) -> Tensor:
            if not first_pass:
                return function(grad, left, right)
            seen.places[f"grad_for_{side}"] = error = zero.expand(grad.shape)
            result = function(grad + error, left, right)
            seen.given[f"to_{side}"] = result.detach()
            seen.places[f"to_{side}"] = error = zero.expand(result.shape)
            given: Tensor = result + error
            return given

        products = seen.products
        to_left = None
        if ctx.needs_input_grad[1] and products.to_left is not None:
            to_left = product(products.to_left, "left")
        to_right = product(products.to_right, "right") if ctx.needs_input_grad[2] else None
        return None, to_left, to_right, None, None, None


class Places:
    """Stands where a kernel would: runs the call in float, and keeps what there is to know of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls: list[Seen] = []

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call; one that kernels leave in float is left alone."""
        known: dict[str, Callable[..., Found]] = {"linear": _linear, "embedding": _embedding, "matmul": _matmul}
        find: Callable[..., Found] = known.get(self.kind, _conv)
        named = arguments(func, args, kwargs)
        found = None if named is None else find(**named)
        if found is None:
            return func(*args, **kwargs)
        products, left, right, bias = found
        # data and frozen weights have no gradient, but errors
        left, right = (_with_gradient(x) for x in (left, right))
        operands = {name: x.view_as(x) for name, x in (("left", left), ("right", right))}
        operands |= {f"{name}_again": x.view_as(x) for name, x in (("left", left), ("right", right))}
        seen = Seen(products, operands, func)
        zero = torch.zeros((), dtype=right.dtype, device=right.device, requires_grad=True)
        out: Tensor = _Run.apply(seen, *operands.values(), zero)  # type: ignore[no-untyped-call]
        seen.places["out"] = out
        seen.given["out"] = out.detach()
        self.calls.append(seen)
        return out if bias is None else out + bias.view(-1, *(1,) * (out.dim() - 2 if products.shape else 0))


def _with_gradient(x: Tensor) -> Tensor:
    return x if x.requires_grad or not x.is_floating_point() else x.detach().requires_grad_()


Found = tuple[Products, Tensor, Tensor, Tensor | None] | None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    if weight.dim() != 2:
        return None
    products = Products(
        "linear",
        F.linear,
        lambda grad, left, right: grad @ right,
        lambda grad, left, right: grad.reshape(-1, grad.shape[-1]).t() @ left.reshape(-1, left.shape[-1]),
    )
    return products, input, weight, bias


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Found:
    if input.dim() != weight.dim():
        return None
    dims = weight.dim() - 2
    apart = each_axis(dilation, dims)
    input, sides = padded(input, weight, padding, apart)
    shape = (each_axis(stride, dims), sides, apart)
    run: Callable[..., Tensor] = F.conv1d if dims == 1 else F.conv2d

    def back(grad: Tensor, left: Tensor, right: Tensor, which: int) -> Tensor:
        lists = [list(part) for part in shape]
        wants = [which == 0, which == 1, False]
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grad, left, right, None, *lists, False, [0] * dims, groups, wants
        )
        return found[which]

    products = Products(
        f"conv{dims}d",
        lambda left, right: run(left, right, None, *shape, groups),
        lambda grad, left, right: back(grad, left, right, 0),
        lambda grad, left, right: back(grad, left, right, 1),
        (*shape, groups),
    )
    return products, input, weight, bias


def _matmul(input: Tensor, other: Tensor) -> Found:
    if min(input.dim(), other.dim()) < 2:
        return None
    lead = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    products = Products(
        "matmul",
        torch.matmul,
        lambda grad, left, right: grad @ right.transpose(-1, -2),
        lambda grad, left, right: left.transpose(-1, -2) @ grad,
    )
    return products, input.expand(*lead, *input.shape[-2:]), other.expand(*lead, *other.shape[-2:]), None


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Found:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    skipped = -1 if padding_idx is None else padding_idx % weight.shape[0]
    products = Products(
        "embedding",
        lambda left, right: F.embedding(left, right),
        None,
        lambda grad, left, right: torch.ops.aten.embedding_dense_backward(grad, left, right.shape[0], skipped, False),
    )
    return products, input, weight, None
