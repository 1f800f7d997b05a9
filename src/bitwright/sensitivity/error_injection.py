"""Run single operators of a float model with a kernel, or record the tensors where a kernel would add errors."""

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
from bitwright.core.registry import KERNELS
from bitwright.core.tensor_tree import eval_mode
from bitwright.graph import Graph, Op
from bitwright.kernels.kernel import Convolution, arguments, embedding_arguments, matmul_operands
from bitwright.plan import ComputeSpec, Plan
from bitwright.quantizers import attachment_of, prepare, strip


class Operators:
    """Operators of a model that can be executed by a substitute."""

    def __init__(self, model: nn.Module, graph: Graph, names: Mapping[str, Any]) -> None:
        attachment = attachment_of(model)
        self._hooks = {name: attachment.hooks_at(graph.by_name[name]) for name in names}

    def put(self, stand_ins: Mapping[str, Any]) -> None:
        """Execute these operators with their substitutes, and all others in float."""
        for name, hooks in self._hooks.items():
            assert hooks is not None
            hooks.kernel = stand_ins.get(name)


@contextmanager
def substitutable_operators(model: nn.Module, graph: Graph, specs: Mapping[str, ComputeSpec]) -> Iterator[Operators]:
    """Allow substitutes for these operators; the model is restored at the end."""
    prepare(model, Plan(compute=specs), graph=graph, simulate=True)
    try:
        found = Operators(model, graph, specs)
        found.put({})
        yield found
    finally:
        strip(model)


@contextmanager
def training_batch_norms(model: nn.Module) -> Iterator[None]:
    """Batch norms use batch statistics, as in training, but dropout is off; running statistics are restored."""
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
    """The name of the operator's weight parameter, or None."""
    port = op.port("weight")
    source = port.sources[0] if port is not None and port.sources else None
    return source.name if source is not None and source.kind == "param" else None


def weight_of(model: nn.Module, op: Op) -> Tensor | None:
    """The operator's weight, or None."""
    name = weight_name(op)
    return None if name is None else model.get_parameter(name).detach()


def rounded_weight(weight: Tensor, kind: str, spec: ComputeSpec) -> Tensor:
    """The weight as the kernel rounds it for the forward product."""
    found: Tensor | None = KERNELS.get(spec.format).rounded(weight, kind, spec)
    if found is None:
        fix = "use output-error, which runs the kernel, or implement `rounded` in the kernel (docs/add-a-kernel.md)"
        raise BitwrightError(
            "this kernel doesn't define how it rounds weights", value=spec.format, fix=fix, code="rounding-unknown"
        )
    return found


@dataclass(frozen=True)
class Products:
    """The three products (forward and two backward) of an operator without bias."""

    kind: str
    forward: Callable[[Tensor, Tensor], Tensor]
    #: The gradient of the left operand, from (gradient of the output, left, right); None if it has no gradient.
    to_left: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    to_right: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: For convolutions: stride, padding, dilation, groups.
    shape: tuple[Any, ...] = ()


@dataclass
class OperatorCall:
    """One call of an operator: its values, and the tensors at which a kernel would add errors.

    Places: `left` and `right` are the operands of the forward product. `left_again` and `right_again` are the operands
    of the backward products, and `grad_for_left` and `grad_for_right` are the output's gradient in each. `out`,
    `to_left` and `to_right` are the results.
    """

    products: Products
    places: dict[str, Tensor]
    #: The function called by the model.
    func: Callable[..., Any]
    #: The gradient of the output, available after the backward pass.
    grad: Tensor | None = None
    #: The results of the products, by place.
    given: dict[str, Tensor] = field(default_factory=dict)

    @property
    def channel(self) -> int:
        """The channel axis of inputs and outputs."""
        return 1 if self.products.shape else -1

    def rows(self, x: Tensor) -> Tensor:
        """The units with their own scale in kernels: samples of a convolution, tokens otherwise."""
        return x if self.products.shape else x.reshape(-1, x.shape[-1])

    @property
    def left(self) -> Tensor:
        """The left operand."""
        return self.places["left"].detach()

    @property
    def right(self) -> Tensor:
        """The right operand: the weight, if there is one."""
        return self.places["right"].detach()


class _RecordedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seen: OperatorCall, *operands: Tensor) -> Tensor:
        left, right = operands[:2]
        ctx.seen = seen
        ctx.save_for_backward(*operands[2:])
        return seen.products.forward(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Use differentiable functions only, so that errors here are errors of the gradients."""
        left, right, zero = ctx.saved_tensors
        seen: OperatorCall = ctx.seen
        # the second backward pass calls this function again, but adds no error
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


class CallRecorder:
    """Takes the place of a kernel: runs each call in float and records its tensors."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls: list[OperatorCall] = []

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call; calls that kernels would leave in float aren't recorded."""
        known: dict[str, Callable[..., Found]] = {"linear": _linear, "embedding": _embedding, "matmul": _matmul}
        find: Callable[..., Found] = known.get(self.kind, _conv)
        named = arguments(func, args, kwargs)
        found = None if named is None else find(**named)
        if found is None:
            return func(*args, **kwargs)
        products, left, right, bias = found
        # inputs and frozen weights have errors, but no gradient yet
        left, right = (_with_gradient(x) for x in (left, right))
        operands = {name: x.view_as(x) for name, x in (("left", left), ("right", right))}
        operands |= {f"{name}_again": x.view_as(x) for name, x in (("left", left), ("right", right))}
        seen = OperatorCall(products, operands, func)
        zero = torch.zeros((), dtype=right.dtype, device=right.device, requires_grad=True)
        out: Tensor = _RecordedProduct.apply(seen, *operands.values(), zero)  # type: ignore[no-untyped-call]
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


def _conv(**named: Any) -> Found:
    if named["input"].dim() != named["weight"].dim():
        return None
    call = Convolution.of(**named)
    dims = call.weight.dim() - 2
    run: Callable[..., Tensor] = F.conv1d if dims == 1 else F.conv2d

    def back(grad: Tensor, left: Tensor, right: Tensor, which: int) -> Tensor:
        lists = [list(part) for part in (call.stride, call.padding, call.dilation)]
        wants = [which == 0, which == 1, False]
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            grad, left, right, None, *lists, False, [0] * dims, call.groups, wants
        )
        return found[which]

    products = Products(
        f"conv{dims}d",
        lambda left, right: run(left, right, None, *call.shape),
        lambda grad, left, right: back(grad, left, right, 0),
        lambda grad, left, right: back(grad, left, right, 1),
        call.shape,
    )
    return products, call.input, call.weight, call.bias


def _matmul(input: Tensor, other: Tensor) -> Found:
    operands = matmul_operands(input, other)
    if operands is None:
        return None
    products = Products(
        "matmul",
        torch.matmul,
        lambda grad, left, right: grad @ right.transpose(-1, -2),
        lambda grad, left, right: left.transpose(-1, -2) @ grad,
    )
    return products, *operands, None


def _embedding(**named: Any) -> Found:
    call = embedding_arguments(**named)
    if call is None:
        return None
    index, weight, skipped = call
    products = Products(
        "embedding",
        lambda left, right: F.embedding(left, right),
        None,
        lambda grad, left, right: torch.ops.aten.embedding_dense_backward(grad, left, right.shape[0], skipped, False),
    )
    return products, index, weight, None
