"""Streams of batches: cut, regrouped, and run piece by piece where an artefact takes only one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bitwright.graph.tree import batch_size, map_tensors, part, tensors_in


def first(stream: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """Batches up to a number of samples; the last one is cut."""
    for batch in stream:
        size = batch_size(batch)
        yield batch if samples is None or size <= samples else part(batch, 0, samples)
        if samples is not None:
            samples -= size
            if samples <= 0:
                return


def take(batch: Any, indexes: Sequence[int]) -> Any:
    """These samples of a batch."""
    size, chosen = batch_size(batch), torch.tensor(indexes)
    return map_tensors(batch, lambda t: t[chosen.to(t.device)] if t.dim() and t.shape[0] == size else t)


def split(stream: Iterable[Any], size: int) -> Iterator[Any]:
    """Batches of at most `size` samples."""
    for batch in stream:
        whole = batch_size(batch)
        for start in range(0, whole, size):
            yield batch if whole <= size else part(batch, start, start + size)


def rebatched(stream: Iterable[Any], size: int | None) -> Iterator[Any]:
    """Batches of exactly `size`; what is left over at the end of a batch is dropped."""
    for batch in stream:
        whole = batch_size(batch)
        if size is None or whole == size:
            yield batch
            continue
        for start in range(0, whole - size + 1, size):
            yield part(batch, start, start + size)


def regrouped(stream: Iterable[Any], size: int) -> Iterator[Any]:
    """Small batches put together until they have at least `size` samples; the last one is filled by repeating."""
    kept: list[Any] = []
    for batch in stream:
        kept.append(batch)
        if sum(batch_size(part) for part in kept) >= size:
            yield joined(kept)
            kept = []
    if kept:
        short = list(kept)
        while sum(batch_size(part) for part in kept) < size:
            kept += short
        yield joined(kept)


def joined(parts: list[Any]) -> Any:
    """Batches put together into one."""
    if len(parts) == 1:
        return parts[0]
    columns = [[tensor for _, tensor in tensors_in(part)] for part in parts]
    sizes = [batch_size(part) for part in parts]
    whole = iter([_cat(same, sizes) for same in zip(*columns, strict=True)])
    return map_tensors(parts[0], lambda tensor: next(whole))


def _cat(tensors: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    batched = all(t.dim() and t.shape[0] == size for t, size in zip(tensors, sizes, strict=True))
    return torch.cat(tensors) if batched else tensors[0]


def in_pieces(predict: Callable[..., Any], size: int | None) -> Callable[..., Any]:
    """Let a runtime with a fixed batch take any number of samples: piece by piece, the last one filled up."""
    if size is None:
        return predict

    def run(*args: Any, **kwargs: Any) -> Any:
        whole = batch_size((args, kwargs))
        pieces = []
        for start in range(0, whole, size):
            part_args, part_kwargs = map_tensors(
                (args, kwargs),
                lambda t, s=start: _filled(t, whole, s, size),  # type: ignore[misc]
            )
            pieces.append(predict(*part_args, **part_kwargs))
        if isinstance(pieces[0], Tensor):
            return torch.cat(pieces)[:whole]
        return tuple(torch.cat(parts)[:whole] for parts in zip(*pieces, strict=True))

    return run


def _filled(tensor: Tensor, whole: int, start: int, size: int) -> Tensor:
    if not tensor.dim() or tensor.shape[0] != whole:
        return tensor
    index = torch.arange(start, start + size).clamp(max=whole - 1)
    return tensor[index]
