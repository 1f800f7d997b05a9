"""The data of a workload, batch by batch: what comes in the wrong form is told with the form that is wanted."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from bitwright.errors import BitwrightError, WorkloadError
from bitwright.modes import copied
from bitwright.owner import first_line, line_of, owners_code
from bitwright.workload.workload import Workload


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
    with owners_code(name, "the calibration loader", expected=expected, fix=fix):
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
    with owners_code(workload.name, "the evaluation loader", expected=expected, fix=fix):
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
