"""A workload's model and data, as verbs need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from bitwright.cli.out import Out
from bitwright.errors import BitwrightError, WorkloadError
from bitwright.graph.tree import map_tensors, tensors_in
from bitwright.modes import evaluating
from bitwright.workload import Workload, batches, call, load_workload


def open_workload(out: Out, ref: str) -> Workload:
    """Load a workload and call its model once: a model that fails by itself isn't an error of ours."""
    with out.steps(f"loading {ref}"):
        workload = load_workload(ref)
        try:
            with evaluating(workload.model), torch.no_grad():
                result = call(workload.model, workload.inputs)
        except BitwrightError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"the model fails on its own example inputs: {type(error).__name__}: {_line(error)}",
                where=f"workload {workload.name!r}",
                fix="call model(*inputs) in Python, and mend the model or the inputs",
            ) from error
    if not any(True for _ in tensors_in(result)):
        raise WorkloadError(
            "the model returned no tensor",
            where=f"workload {workload.name!r}",
            value=type(result).__name__,
            fix="return a tensor, or tuples, lists, dicts or dataclasses of tensors",
        )
    return workload


def calibration(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Calibration data, at most so many samples of it."""
    return first(_of_owner(batches(workload.calibration), "calibration"), samples)


def probes(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Inputs to check with: of the evaluation, else of the calibration, else the example."""
    if workload.evaluation is not None:
        evaluation = _of_owner(workload.evaluation(), "evaluation")
        return first((inputs for inputs, _ in evaluation), samples)
    if workload.calibration is not None:
        return calibration(workload, samples)
    return iter([workload.inputs])


def batch_size(batch: Any) -> int:
    """The length of the first tensor's first axis."""
    return next((int(tensor.shape[0]) for _, tensor in tensors_in(batch) if tensor.dim()), 1)


def first(stream: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """Batches up to a number of samples; the last one is cut."""
    for batch in stream:
        size = batch_size(batch)
        yield batch if samples is None or size <= samples else _part(batch, size, 0, samples)
        if samples is not None:
            samples -= size
            if samples <= 0:
                return


def in_pieces(stream: Iterable[Any], size: int) -> Iterator[Any]:
    """Batches of at most `size` samples."""
    for batch in stream:
        whole = batch_size(batch)
        for start in range(0, whole, size):
            yield batch if whole <= size else _part(batch, whole, start, start + size)


def labelled(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Pairs of inputs and targets of the evaluation data, at most so many samples."""
    assert workload.evaluation is not None
    return first(_of_owner(workload.evaluation(), "evaluation"), samples)


def _part(batch: Any, size: int, start: int, stop: int) -> Any:
    return map_tensors(batch, lambda t: t[start:stop] if t.dim() and t.shape[0] == size else t)


def _of_owner(stream: Iterable[Any], kind: str) -> Iterator[Any]:
    """A loader's own failure, told as such."""
    iterator = iter(stream)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except BitwrightError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"the {kind} loader raised {type(error).__name__}: {_line(error)}",
                fix=f"walk through the workload's {kind}() in Python",
            ) from error
        yield item


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def fixed_batch(artefact: Path) -> int | None:
    """The batch size that an artefact is bound to, or None if it takes any."""
    try:
        inputs = ir.load(artefact).graph.inputs
    except Exception:  # a damaged file: the runtime will say so, in its own words
        return None
    sizes = [value.shape[0] for value in inputs if value.shape is not None and len(value.shape)]
    fixed = [size for size in sizes if isinstance(size, int)]
    return fixed[0] if fixed and len(fixed) == len(sizes) else None


def rebatched(stream: Iterable[Any], size: int | None) -> Iterator[Any]:
    """Batches of exactly `size`; what is left over at the end of a batch is dropped."""
    for batch in stream:
        whole = batch_size(batch)
        if size is None or whole == size:
            yield batch
            continue
        for start in range(0, whole - size + 1, size):
            yield _part(batch, whole, start, start + size)


def regrouped(stream: Iterable[Any], size: int) -> Iterator[Any]:
    """Small batches put together until they have at least `size` samples; the last one is filled by repeating."""
    kept: list[Any] = []
    for batch in stream:
        kept.append(batch)
        if sum(batch_size(part) for part in kept) >= size:
            yield _joined(kept)
            kept = []
    if kept:
        short = list(kept)
        while sum(batch_size(part) for part in kept) < size:
            kept += short
        yield _joined(kept)


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    columns = [[tensor for _, tensor in tensors_in(part)] for part in parts]
    sizes = [batch_size(part) for part in parts]
    whole = iter([_cat(same, sizes) for same in zip(*columns, strict=True)])
    return map_tensors(parts[0], lambda tensor: next(whole))


def _cat(tensors: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    batched = all(t.dim() and t.shape[0] == size for t, size in zip(tensors, sizes, strict=True))
    return torch.cat(tensors) if batched else tensors[0]


def any_batch(predict: Callable[..., Any], size: int | None) -> Callable[..., Any]:
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
