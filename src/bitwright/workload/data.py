"""The data of a workload in batches: reading, checking, cutting and regrouping."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.errors import BitwrightError, WorkloadError
from bitwright.core.modes import copied
from bitwright.core.tensor_tree import batch_size, map_tensors, slice_batch, tensors_in
from bitwright.core.user_code import first_line, line_of, user_code
from bitwright.workload.workload import Workload


def first(stream: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """Batches up to a number of samples; the last one is cut."""
    for batch in stream:
        size = batch_size(batch)
        yield batch if samples is None or size <= samples else slice_batch(batch, 0, samples)
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
            yield batch if whole <= size else slice_batch(batch, start, start + size)


def rebatched(stream: Iterable[Any], size: int | None) -> Iterator[Any]:
    """Batches of exactly `size`; what is left over at the end of a batch is dropped."""
    for batch in stream:
        whole = batch_size(batch)
        if size is None or whole == size:
            yield batch
            continue
        for start in range(0, whole - size + 1, size):
            yield slice_batch(batch, start, start + size)


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


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Call the model with a copy of one batch: ``model(x)``, ``model(*xs)`` or ``model(**xs)``.

    >>> call(lambda a, b: a - b, (3, 2)), call(lambda a, b: a - b, {"b": 3, "a": 2})
    (1, -1)
    """
    return _call(model, copied(batch))


def _call(model: Callable[..., Any], batch: Any) -> Any:
    args: tuple[Any, ...] = tuple(batch) if isinstance(batch, tuple | list) else ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, dict):
        kwargs = batch
    elif not isinstance(batch, tuple | list):
        args = (batch,)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        # A batch that doesn't fit the signature is the workload's fault; any other TypeError is the model's.
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as misfit:
            raise WorkloadError(
                f"a batch doesn't fit the model's arguments {signature}: {misfit}",
                value=shape_of(batch),
                fix="yield exactly what the model takes; calibration data has inputs without targets",
            ) from error
        raise


def call_on(data: str, model: Callable[..., Any], batch: Any, *, where: str | None = None) -> Any:
    """The same with a batch of the workload's "training" or "evaluation"."""
    with fed_with(data, batch, where=where):
        return _call(model, batch) if data == "training" else call(model, batch)


@contextmanager
def fed_with(data: str, batch: Any, *, where: str | None = None) -> Iterator[None]:
    """While the model is called with a batch of "training" or "evaluation": if it fails, that data is named."""
    try:
        yield
    except BitwrightError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"the model fails on {data} data: {type(error).__name__}: {first_line(error)}{line_of(error)}",
            where=where,
            value=shape_of(batch),
            fix=f"let {data} yield (inputs, target) with inputs as the model takes them",
        ) from error


def batches(
    loader: Callable[[], Iterable[Any]] | None, limit: int | None = None, *, name: str | None = None
) -> Iterator[Any]:
    """Walk the calibration data of the workload ``name`` from its beginning, at most ``limit`` batches of it.

    >>> from torch import ones
    >>> [int(x.sum()) for x in batches(lambda: [ones(2), ones(3)], limit=1)]
    [2]
    """
    if loader is None:
        raise WorkloadError(
            "the workload has no calibration data",
            fix="give Workload(calibration=...) a function that yields batches of inputs",
        )
    if limit is not None and limit < 1:
        raise WorkloadError("the number of calibration batches is not positive", value=limit, fix="use 1 or more")
    return _checked(loader, limit, name)


def _checked(loader: Callable[[], Iterable[Any]], limit: int | None, name: str | None) -> Iterator[Any]:
    empty = True
    expected = "calibration() gives an iterator over batches of inputs"
    fix = "walk through the workload's calibration() in Python"
    with user_code(name, "the calibration loader", expected=expected, fix=fix):
        for index, batch in enumerate(itertools.islice(iter(loader()), limit)):
            if not isinstance(batch, Tensor | tuple | list | dict):
                raise WorkloadError(
                    f"calibration batch {index} is neither a tensor, a tuple nor a dict",
                    value=type(batch).__name__,
                    fix="yield a tensor, a tuple of positional inputs, or a dict of keyword inputs",
                )
            empty = False
            yield batch
    if empty:
        raise WorkloadError(
            "the calibration loader yields no batch",
            fix="check that its data set isn't empty, and that each call gives a new iterator",
        )


def pairs(workload: Workload) -> Iterator[tuple[Any, Tensor]]:
    """The evaluation data from its beginning: (inputs, target) each."""
    assert workload.evaluation is not None
    expected = "evaluation() gives an iterator over pairs (inputs, target)"
    fix = "walk through the workload's evaluation() in Python"
    with user_code(workload.name, "the evaluation loader", expected=expected, fix=fix):
        batch: Any
        for index, batch in enumerate(workload.evaluation()):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise WorkloadError(
                    f"evaluation batch {index} is no pair; expected: {expected}",
                    where=f"workload {workload.name!r}",
                    value=shape_of(batch),
                    fix="yield (inputs, target); a tuple of inputs is one item: ((a, b), target)",
                )
            yield batch[0], batch[1]


def shape_of(value: object) -> str:
    """A word for a batch in an error message: its shape, never its contents."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return f"dict of {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__
