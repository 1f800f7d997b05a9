"""How good a model is: the workload's own metric, or top-1 of its evaluation data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from bitwright.arguments import strict
from bitwright.errors import WorkloadError
from bitwright.modes import evaluating
from bitwright.owner import owners_code
from bitwright.workload.feeding import call_on, pairs, shape_of
from bitwright.workload.workload import Workload


def can_measure(workload: Workload) -> bool:
    """Whether the workload says how good a model is."""
    return workload.evaluation is not None or workload.evaluate is not None


@strict
def measure(workload: Workload, predict: Callable[..., Any]) -> dict[str, float]:
    """Score ``predict``, which is called as the workload's model is, on the workload's evaluation data.

    The workload's own ``evaluate`` has the say; without it the score is top-1 in percent, with the number of
    samples ``n``. A module is scored in evaluation mode, and left in the modes that it had.
    """
    where = f"workload {workload.name!r}"
    with torch.no_grad(), evaluating(predict):
        if workload.evaluate is not None:
            with owners_code(workload.name, "evaluate", expected=_METRICS, fix="call evaluate(model) in Python"):
                found = workload.evaluate(predict)
            values = _numbers(found, workload)
        elif workload.evaluation is not None:
            values = _top1(pairs(workload), predict, where)
        else:
            raise WorkloadError(
                "nothing says how good the model is",
                where=where,
                fix="give the Workload evaluation= or evaluate=",
            )
    if workload.metric not in values:
        raise WorkloadError(
            f"the metric {workload.metric!r} was not measured",
            where=where,
            value=sorted(values),
            fix="set metric= to one of these, or give an evaluate= that returns it",
        )
    return values


_METRICS = 'evaluate(model) calls model as the model is called, and gives numbers by name: {"top1": 91.7}'


def _numbers(found: Any, workload: Workload) -> dict[str, float]:
    """What `evaluate` gave, as floats by name; a number alone is the metric."""
    values = found if isinstance(found, Mapping) else {workload.metric: found}
    wrong = [value for value in values.values() if not _is_number(value)]
    if wrong:
        raise WorkloadError(
            f"evaluate gave no numbers; expected: {_METRICS}",
            where=f"workload {workload.name!r}",
            value=shape_of(wrong[0]),
            fix=f"return {{{workload.metric!r}: number}}",
        )
    return {str(name): float(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)


def _top1(data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any], where: str) -> dict[str, float]:
    hits = n = 0
    for right, _ in hits_of(data, predict, where=where):
        hits += int(right.sum())
        n += len(right)
    return {"top1": 100.0 * hits / n, "n": float(n)}


def hits_of(
    data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any], *, where: str | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each batch, which samples `predict` gets right, and their targets."""
    empty = True
    for inputs, target in data:
        output = call_on("evaluation", predict, inputs, where=where)
        logits = getattr(output, "logits", output)  # the outputs of Hugging Face's classifiers
        if not isinstance(logits, Tensor) or logits.ndim != 2 or target.shape != logits.shape[:1]:
            raise WorkloadError(
                "top-1 needs an output of (samples, classes) and a target of (samples,)",
                where=where,
                value=f"{shape_of(logits)}, {shape_of(target)}",
                fix="give the Workload an evaluate= of its own",
            )
        # argmax calls NaN the largest, so a broken model would score by chance: NaN is a miss.
        sound = ~logits.isnan().any(dim=1)
        empty = empty and not len(target)
        yield (logits.argmax(dim=1) == target) & sound, target
    if empty:
        raise WorkloadError(
            "the evaluation loader yields no sample",
            where=where,
            fix="check its data set, and that each call starts afresh",
        )
