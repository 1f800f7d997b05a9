"""Exact Hadamard rotations (QuaRot, SpinQuant): spread outliers over all channels without changing the function.

R1 rotates the residual stream: the scales of RMS norms move into the linear layers after them, layers that write to the
stream are multiplied by an orthogonal matrix, and layers that read it by the transpose. An RMS norm without scale
commutes with a rotation. R2 rotates the channels of each attention head between the value and the output projection.

Layers are found by the names that Llama-like models of transformers use. Each rotation is kept only if the model's
outputs stay the same on a batch; otherwise the weights are restored and the reason is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from bitwright.core.tensor_tree import as_call, eval_mode, tensors_in
from bitwright.ptq.step import PtqContext, Step
from bitwright.quantizers import in_mode

_QUERY_SIDE = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_UP_SIDE = ("gate_proj", "up_proj", "gate_up_proj", "fc1")
_OUTPUTS = ("o_proj", "out_proj", "down_proj", "fc2")
_STREAM = "residual stream"


class Rotate(Step):
    """Rotate the residual stream and the value channels of Llama-like models; exact, and verified by running them."""

    name: ClassVar[str] = "rotate"
    needs_ranges: ClassVar[bool] = False

    stream: bool = Field(default=True, description="Rotate the residual stream (R1).")
    values: bool = Field(default=True, description="Rotate the value channels of each head (R2).")
    tolerance: float = Field(
        default=1e-3, gt=0, description="Largest change of the outputs, relative to their largest."
    )

    def units(self, context: PtqContext) -> Sequence[str]:
        """The residual stream, then each attention."""
        attentions = [name for name, module in context.model.named_modules() if _is_attention(module)]
        if self.values and not attentions:
            context.skipped["values"] = "no attention has the projections v_proj and o_proj"
        return [*([_STREAM] if self.stream else []), *(attentions if self.values else [])]

    @torch.no_grad()
    def run(self, context: PtqContext, unit: str) -> None:
        """Rotate the weights, and restore them if the outputs changed."""
        stream = unit == _STREAM
        changes = _stream_changes(context) if stream else _value_changes(context, context.model.get_submodule(unit))
        if isinstance(changes, str):
            context.skipped[unit] = changes
            return
        before = [parameter.detach().clone() for parameter, _ in changes]
        expected = _outputs(context)
        for parameter, changed in changes:
            parameter.copy_(changed(parameter.double()).to(parameter.dtype))
        distance = _distance(expected, _outputs(context))
        if not distance <= self.tolerance:
            for (parameter, _), old in zip(changes, before, strict=True):
                parameter.copy_(old)
            context.skipped[unit] = f"a rotation would change the outputs by {distance:.2g}, so nothing was changed"


_Change = tuple[Tensor, Callable[[Tensor], Tensor]]


def _outputs(context: PtqContext) -> list[Tensor]:
    args, kwargs = as_call(next(context.data.pieces(2)))
    with eval_mode(context.model), in_mode(context.model, "float"):
        return [tensor.detach().clone() for _, tensor in tensors_in(context.model(*args, **kwargs))]


def _distance(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference relative to the largest output."""
    floats = [(a.float(), b.float()) for a, b in zip(expected, found, strict=True) if a.is_floating_point()]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in floats if a.numel())


# -- R1 ----------------------------------------------------------------------------------------------------


def _stream_changes(context: PtqContext) -> list[_Change] | str:
    """Every parameter that the rotation of the residual stream changes, or why it can't be rotated."""
    model = context.model
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and _are_layers(module)]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if len(blocks) != 1 or len(embeddings) != 1:
        return "the model doesn't have exactly one embedding and one list of decoder layers with norms"
    embedding = embeddings[0]
    width = embedding.embedding_dim
    heads = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.in_features == width and not _inside(module, blocks[0])
    ]
    inner = {id(module) for module in blocks[0].modules()}
    finals = [m for m in model.modules() if _is_norm(m, width) and id(m) not in inner]
    if len(finals) != 1 or len(heads) != 1:
        return "the model doesn't have exactly one final norm and one head"
    head = heads[0][1]
    if head.weight is embedding.weight:
        return "the head shares its weight with the embedding, so it can't hold the scale of the final norm"
    rotation = orthogonal(width, context.seed)
    first: list[_Change] = [(embedding.weight, lambda w: w @ rotation)]
    norms: list[tuple[Any, list[nn.Linear]]] = [(finals[0], [head])]
    for layer in blocks[0]:
        own = [module for module in layer.modules() if _is_norm(module, width)]
        readers = [_named(layer, names) for names in (_QUERY_SIDE, _UP_SIDE)]
        writers = _named(layer, _OUTPUTS)
        if len(own) != 2 or not all(readers) or not writers:
            return "its decoder layers don't consist of an attention and an MLP, each after one norm"
        linear = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        if len(linear) != sum(map(len, readers)) + len(writers):
            return "its decoder layers have other linear layers"
        norms += list(zip(own, readers, strict=True))
        for writer in writers:
            first.append((writer.weight, lambda w: rotation.T @ w))
            if writer.bias is not None:
                first.append((writer.bias, lambda b: b @ rotation))
    for norm, linears in norms:
        scale = norm.weight.detach().double().clone()
        for module in linears:
            first.append((module.weight, partial(_read_rotated, scale=scale, rotation=rotation)))
        first.append((norm.weight, torch.ones_like))
    seen: set[int] = set()
    for parameter, _ in first:
        if id(parameter) in seen:
            return "a parameter is shared between layers"
        seen.add(id(parameter))
    return first


def _read_rotated(weight: Tensor, scale: Tensor, rotation: Tensor) -> Tensor:
    return (weight * scale) @ rotation


def _inside(module: nn.Module, parent: nn.Module) -> bool:
    return any(module is other for other in parent.modules())


def _is_norm(module: nn.Module, width: int) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__
        and isinstance(weight, nn.Parameter)
        and weight.shape == (width,)
        and not list(module.children())
    )


def _are_layers(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and all(any(_is_attention(m) for m in layer.modules()) for layer in modules)


def _named(layer: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    return [m for name, m in layer.named_modules() if isinstance(m, nn.Linear) and name.rpartition(".")[2] in names]


# -- R2 ----------------------------------------------------------------------------------------------------


def _is_attention(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in ("v_proj", "o_proj"))


def _value_changes(context: PtqContext, attention: Any) -> list[_Change] | str:
    width = getattr(attention, "head_dim", None)
    value, output = attention.v_proj, attention.o_proj
    if not isinstance(width, int) or value.out_features % width or output.in_features % width:
        return "its head size is unknown"
    rotation = orthogonal(width, context.seed)

    def rotate_rows(w: Tensor) -> Tensor:
        return (rotation.T @ w.reshape(-1, width, w.shape[1])).reshape(w.shape)

    def rotate_columns(w: Tensor) -> Tensor:
        return (w.reshape(w.shape[0], -1, width) @ rotation).reshape(w.shape)

    changes: list[_Change] = [(value.weight, rotate_rows), (output.weight, rotate_columns)]
    if value.bias is not None:
        changes.append((value.bias, lambda b: (b.reshape(-1, width) @ rotation).reshape(-1)))
    return changes


# -- orthogonal matrices -----------------------------------------------------------------------------------


def orthogonal(size: int, seed: int) -> Tensor:
    """A Hadamard matrix with random signs of its rows, scaled to be orthogonal (float64).

    Hadamard matrices are built from powers of two and Paley's constructions. If there is none of this size, the odd
    factor is a random orthogonal matrix.

    >>> q = orthogonal(12, 0)
    >>> torch.allclose(q @ q.T, torch.eye(12, dtype=torch.float64)), q.abs().unique().numel()
    (True, 1)
    """
    generator = torch.Generator().manual_seed(seed)
    matrix: Tensor | None = None
    for base in _divisors(size):
        matrix = _hadamard(base)
        if matrix is not None:
            break
    else:
        base = size
        while base % 2 == 0:
            base //= 2
        matrix = torch.linalg.qr(torch.randn(base, base, generator=generator, dtype=torch.float64))[0] * base**0.5
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    result: Tensor = matrix * signs / size**0.5
    return result


def _divisors(size: int) -> Iterator[int]:
    """The sizes that doubling turns into `size`, from the smallest."""
    smallest = size
    while smallest % 2 == 0:
        smallest //= 2
    while smallest <= size:
        yield smallest
        smallest *= 2


def _hadamard(size: int) -> Tensor | None:
    """A Hadamard matrix of this size by Paley's constructions (or of size 1 or 2), or None."""
    if size <= 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:size, :size]
    if _is_prime(size - 1) and (size - 1) % 4 == 3:
        core = _jacobsthal(size - 1)
        matrix = torch.ones(size, size, dtype=torch.float64)
        matrix[1:, 1:] = core
        matrix[1:, 0] = -1
        matrix += torch.eye(size, dtype=torch.float64)
        matrix[0, 0] = 1
        return matrix
    half = size // 2
    if size % 2 == 0 and _is_prime(half - 1) and (half - 1) % 4 == 1:
        core = torch.ones(half, half, dtype=torch.float64)
        core[1:, 1:] = _jacobsthal(half - 1)
        core[0, 0] = 0
        one, two = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.tensor([[1.0, -1.0], [-1.0, -1.0]]).double()
        return torch.kron(core, one) + torch.kron(torch.eye(half, dtype=torch.float64), two)
    return None


def _jacobsthal(prime: int) -> Tensor:
    """χ(a − b) for all residues a and b, where χ is 1 for squares, −1 for other residues, and 0 for 0."""
    squares = {a * a % prime for a in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if a in squares else -1.0 for a in range(1, prime)], dtype=torch.float64)
    index = torch.arange(prime)
    matrix: Tensor = character[(index[:, None] - index[None, :]) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
