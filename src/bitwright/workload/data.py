"""Read, check, slice and regroup the batches of a workload."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.errors import BitwrightError, Problem, WorkloadError, first_line, line_of, user_code
from bitwright.core.tensor_tree import batch_size, copied, map_tensors, shape_of, slice_batch, tensors_in
from bitwright.workload.workload import Workload


def first(stream: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """Yield batches until `samples` are reached; the last batch is cut."""
    for batch in stream:
        size = batch_size(batch)
        yield batch if samples is None or size <= samples else slice_batch(batch, 0, samples)
        if samples is not None:
            samples -= size
            if samples <= 0:
                return


def take(batch: Any, indexes: Sequence[int]) -> Any:
    """The samples of a batch with these indexes."""
    size, chosen = batch_size(batch), torch.tensor(indexes)
    return map_tensors(batch, lambda t: t[chosen.to(t.device)] if t.dim() and t.shape[0] == size else t)


def split(stream: Iterable[Any], size: int) -> Iterator[Any]:
    """Batches of at most `size` samples."""
    for batch in stream:
        whole = batch_size(batch)
        for start in range(0, whole, size):
            yield batch if whole <= size else slice_batch(batch, start, start + size)


def rebatched(stream: Iterable[Any], size: int | None) -> Iterator[Any]:
    """Batches of exactly `size` samples. Incomplete batches are dropped."""
    for batch in stream:
        whole = batch_size(batch)
        if size is None or whole == size:
            yield batch
            continue
        for start in range(0, whole - size + 1, size):
            yield slice_batch(batch, start, start + size)


def regrouped(stream: Iterable[Any], size: int) -> Iterator[Any]:
    """Join small batches until they have at least `size` samples. The last one is padded by repetition."""
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
    """Concatenate batches."""
    if len(parts) == 1:
        return parts[0]
    columns = [[tensor for _, tensor in tensors_in(part)] for part in parts]
    sizes = [batch_size(part) for part in parts]
    whole = iter([_cat(same, sizes) for same in zip(*columns, strict=True)])
    return map_tensors(parts[0], lambda tensor: next(whole))


def _cat(tensors: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    batched = all(t.dim() and t.shape[0] == size for t, size in zip(tensors, sizes, strict=True))
    return torch.cat(tensors) if batched else tensors[0]


def in_chunks(predict: Callable[..., Any], size: int | None) -> Callable[..., Any]:
    """Let a runtime with a fixed batch size process any number of samples. The last chunk is padded."""
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
        # A batch that doesn't match the signature is an error in the workload; other TypeErrors come from the model.
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as misfit:
            raise WorkloadError(
                f"a batch doesn't match the model's arguments {signature}: {misfit}",
                value=shape_of(batch),
                fix="yield the model's arguments; calibration data has inputs without targets",
                code="invalid-batch",
            ) from error
        raise


def call_on(data: str, model: Callable[..., Any], batch: Any, *, where: str | None = None) -> Any:
    """`call` with a batch of the workload's "training" or "evaluation" data."""
    with report_data_errors(data, batch, where=where):
        return _call(model, batch) if data == "training" else call(model, batch)


@contextmanager
def report_data_errors(data: str, batch: Any, *, where: str | None = None) -> Iterator[None]:
    """Name the data ("training" or "evaluation") in the error if the model fails in this block."""
    try:
        yield
    except BitwrightError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"the model fails on {data} data: {type(error).__name__}: {first_line(error)}{line_of(error)}",
            where=where,
            value=shape_of(batch),
            fix=f"let {data} yield (inputs, target), with inputs that the model accepts",
            code="model-failed",
        ) from error


def batches(
    loader: Callable[[], Iterable[Any]] | None, limit: int | None = None, *, name: str | None = None
) -> Iterator[Any]:
    """Iterate over the calibration data of the workload ``name``, at most ``limit`` batches.

    >>> from torch import ones
    >>> [int(x.sum()) for x in batches(lambda: [ones(2), ones(3)], limit=1)]
    [2]
    """
    if loader is None:
        raise WorkloadError(
            "the workload has no calibration data",
            fix="pass Workload(calibration=...) a function that yields batches of inputs",
            code="no-calibration-data",
        )
    if limit is not None and limit < 1:
        raise WorkloadError(
            "the number of calibration batches must be positive", value=limit, fix="use 1 or more", code="invalid-value"
        )
    return _checked(loader, limit, name)


def _checked(loader: Callable[[], Iterable[Any]], limit: int | None, name: str | None) -> Iterator[Any]:
    empty = True
    expected = "calibration() returns an iterator over batches of inputs"
    fix = "iterate over the workload's calibration() in Python"
    with user_code(name, "the calibration loader", expected=expected, fix=fix):
        for index, batch in enumerate(itertools.islice(iter(loader()), limit)):
            if not isinstance(batch, Tensor | tuple | list | dict):
                raise WorkloadError(
                    f"calibration batch {index} is not a tensor, tuple or dict",
                    value=type(batch).__name__,
                    fix="yield a tensor, a tuple of positional inputs, or a dict of keyword inputs",
                    code="invalid-batch",
                )
            empty = False
            yield batch
    if empty:
        raise WorkloadError(
            "the calibration loader yields no batch",
            fix="check that its data set isn't empty, and that each call returns a new iterator",
            code="no-data",
        )


def pairs(workload: Workload) -> Iterator[tuple[Any, Tensor]]:
    """Iterate over the evaluation data: (inputs, target)."""
    assert workload.evaluation is not None
    expected = "evaluation() returns an iterator over pairs (inputs, target)"
    fix = "iterate over the workload's evaluation() in Python"
    with user_code(workload.name, "the evaluation loader", expected=expected, fix=fix):
        batch: Any
        for index, batch in enumerate(workload.evaluation()):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise WorkloadError(
                    f"evaluation batch {index} is not a pair; expected: {expected}",
                    where=f"workload {workload.name!r}",
                    value=shape_of(batch),
                    fix="yield (inputs, target); several inputs are one tuple: ((a, b), target)",
                    code="invalid-batch",
                )
            yield batch[0], batch[1]


class CalibrationData:
    """Inspects calibration batches for missing variety."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.varied: set[str] = set()
        self.unequal = False
        self.samples = 0
        self.empty = 0

    def see(self, batch: Any) -> Any:
        """Inspect one batch and return it."""
        tensors = [(path, tensor) for path, tensor in tensors_in(batch) if tensor.dim()]
        self.empty += bool(tensors) and all(tensor.numel() == 0 for _, tensor in tensors)
        self.samples += batch_size(batch)
        for path, tensor in tensors:
            if tensor.numel() == 0:
                continue
            first = self.first.setdefault(path, tensor[:1].detach().clone())
            if path not in self.varied and bool((tensor != first.flatten()[0]).any()):
                self.varied.add(path)
            if not self.unequal and (tensor.shape[1:] != first.shape[1:] or bool((tensor != first).any())):
                self.unequal = True
        return batch

    def warnings(
        self,
        name: str = "the calibration data",
        *,
        fix: str = "calibrate with a few hundred samples of real data, with the preprocessing used in production",
        suffix: str = "calibration",
    ) -> tuple[Problem, ...]:
        """The problems of the data. Their codes end with `suffix`."""
        found = []
        if self.empty:
            what = f"{self.empty} batches of {name} are empty"
            found.append(Problem(what=what, fix="check the loader's batches", code=f"empty-{suffix}"))
        if self.first and not self.varied and any(tensor.numel() > 1 for tensor in self.first.values()):
            values = ", ".join(f"{path or 'input'} = {t.flatten()[0].item():g}" for path, t in self.first.items())
            what = f"all values of {name} are the same ({values}), so ranges are meaningless"
            found.append(Problem(what=what, fix=fix, code=f"constant-{suffix}"))
        elif self.samples > 1 and self.first and not self.unequal:
            what = f"all {self.samples} samples of {name} are identical"
            found.append(Problem(what=what, fix=fix, code=f"constant-{suffix}"))
        return tuple(found)


def calibration(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Batches of the calibration data, with at most `samples` samples."""
    return first(batches(workload.calibration, name=workload.name), samples)


def probes(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Inputs to check a model with: those of the evaluation, else of the calibration, else the example."""
    if workload.evaluation is not None:
        return first((inputs for inputs, _ in pairs(workload)), samples)
    if workload.calibration is not None:
        return calibration(workload, samples)
    return iter([workload.inputs])
