"""Metrics: by name, from the workload's own `evaluate`, or top-1 on its evaluation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, SupportsFloat

import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.core.arguments import strict
from bitwright.core.errors import WorkloadError, did_you_mean, user_code
from bitwright.core.tensor_tree import eval_mode, shape_of
from bitwright.workload.data import call, call_on, pairs
from bitwright.workload.workload import Workload

_LARGEST_EXPONENT = 700.0
Evaluate = Callable[[Callable[..., Any]], dict[str, float]]


class _Topk:
    """Percentage of samples with the target among the k largest outputs."""

    def __init__(self, k: int = 1) -> None:
        if type(k) is not int or k < 1:
            raise WorkloadError(
                "k must be an integer of at least 1",
                where="metric.topk.k",
                value=k,
                fix="write k: 1",
                code="invalid-options",
            )
        self.k, self.hits, self.n = k, 0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        if output.dim() < 2 or output.shape[1] < self.k:
            what = f"topk needs outputs of shape (samples, classes) with at least {self.k} classes"
            raise WorkloadError(
                what, where="metric.topk", value=tuple(output.shape), fix="choose a smaller k", code="invalid-output"
            )
        sound = ~output.isnan().any(dim=1)
        found = (output.topk(self.k, dim=1).indices == target[:, None]).any(dim=1)
        self.hits += int((found & sound).sum())
        self.n += len(target)

    def value(self) -> float:
        return 100.0 * self.hits / self.n


class _F1:
    """F1 score of the positive class, in percent."""

    def __init__(self, positive: int = 1) -> None:
        self.positive, self.hits, self.predicted, self.true = positive, 0, 0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        predicted = (output.argmax(dim=1) == self.positive) & ~output.isnan().any(dim=1)
        true = target == self.positive
        self.hits += int((predicted & true).sum())
        self.predicted += int(predicted.sum())
        self.true += int(true.sum())

    def value(self) -> float:
        return 200.0 * self.hits / (self.predicted + self.true) if self.predicted + self.true else 0.0


class _Error:
    """The mean of |y − ŷ|^power, or its root."""

    def __init__(self, power: int, *, root: bool = False) -> None:
        self.power, self.root, self.sum, self.n = power, root, 0.0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        self.sum += float((output.double() - target.double()).abs().pow(self.power).sum())
        self.n += target.numel()

    def value(self) -> float:
        mean = self.sum / self.n
        return mean**0.5 if self.root else mean


class _Perplexity:
    """exp of the mean cross-entropy of next tokens; the target is the token ids that the model got."""

    def __init__(self) -> None:
        self.sum, self.n = 0.0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        logits, following = output[:, :-1].flatten(0, 1), target[:, 1:].flatten()
        self.sum += float(F.cross_entropy(logits.float(), following, reduction="sum"))
        self.n += following.numel()

    def value(self) -> float:
        mean = self.sum / self.n
        return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf


METRICS: dict[str, tuple[Callable[..., Any], bool]] = {
    "topk": (_Topk, True),
    "f1": (_F1, True),
    "mse": (partial(_Error, 2), False),
    "mae": (partial(_Error, 1), False),
    "rmse": (partial(_Error, 2, root=True), False),
    "perplexity": (_Perplexity, False),
}
"""Each metric with whether higher is better."""


def metric_name(name: str, options: dict[str, Any]) -> str:
    """The name of a metric with these options: top1, top5, f1, …"""
    return f"top{options.get('k', 1)}" if name == "topk" else name


def make_evaluate(wanted: dict[str, dict[str, Any]], data: Callable[[], Iterable[tuple[Any, Tensor]]]) -> Evaluate:
    """Create a workload's `evaluate` from metric names and options."""
    for name in wanted:
        if name not in METRICS:
            raise WorkloadError("unknown metric", value=name, fix=did_you_mean(name, METRICS), code="unknown-name")
    for name, options in wanted.items():  # report wrong options now, not after the first evaluation
        try:
            METRICS[name][0](**options)
        except TypeError as error:
            raise WorkloadError(
                f"invalid options of the metric: {error}", where=name, value=options, code="invalid-options"
            ) from error

    def evaluate(predict: Callable[..., Any]) -> dict[str, float]:
        counters = {metric_name(name, options): METRICS[name][0](**options) for name, options in wanted.items()}
        n = 0
        for inputs, target in data():
            output = call(predict, inputs)
            logits = getattr(output, "logits", output)
            n += len(target)
            with torch.no_grad():
                for counter in counters.values():
                    counter.add(logits, target)
        if not n:
            raise WorkloadError("the evaluation loader yields no samples", fix="check its data set", code="no-data")
        return {**{name: counter.value() for name, counter in counters.items()}, "n": float(n)}

    return evaluate


def can_measure(workload: Workload) -> bool:
    """Whether the workload defines an evaluation."""
    return workload.evaluation is not None or workload.evaluate is not None


@strict
def evaluate(workload: Workload, predict: Callable[..., Any]) -> dict[str, float]:
    """Evaluate ``predict``, which is called like the workload's model, on the workload's evaluation data.

    The result has the values of the workload's ``evaluate``, or else top-1 accuracy in percent and the number of
    samples ``n``. A module is switched to evaluation mode meanwhile.

    >>> import torch
    >>> from bitwright import Workload, evaluate
    >>> inputs, labels = torch.eye(4), torch.tensor([0, 1, 2, 0])
    >>> workload = Workload(
    ...     name="tiny", model=torch.nn.Identity(), inputs=(inputs[:1],), evaluation=lambda: [(inputs, labels)]
    ... )
    >>> evaluate(workload, workload.model)
    {'top1': 75.0, 'n': 4.0}
    """
    where = f"workload {workload.name!r}"
    with torch.no_grad(), eval_mode(predict):
        if workload.evaluate is not None:
            with user_code(workload.name, "evaluate", expected=_METRICS, fix="call evaluate(model) in Python"):
                found = workload.evaluate(predict)
            values = _numbers(found, workload)
        elif workload.evaluation is not None:
            values = top1(pairs(workload), predict, where)
        else:
            raise WorkloadError(
                "the workload has no evaluation",
                where=where,
                fix="pass evaluation= or evaluate= to Workload",
                code="no-evaluation",
            )
    if workload.metric not in values:
        raise WorkloadError(
            f"the metric {workload.metric!r} was not measured",
            where=where,
            value=sorted(values),
            fix="set metric= to one of these, or pass an evaluate= that returns it",
            code="metric-not-measured",
        )
    return values


_METRICS = 'evaluate(model) calls the model and returns numbers by name, such as {"top1": 91.7}'


def _numbers(found: Any, workload: Workload) -> dict[str, float]:
    """The result of `evaluate` as floats by name. A single number is the value of the workload's metric."""
    values = found if isinstance(found, Mapping) else {workload.metric: found}
    wrong = [value for value in values.values() if not _is_number(value)]
    if wrong:
        raise WorkloadError(
            f"evaluate returned no numbers; expected: {_METRICS}",
            where=f"workload {workload.name!r}",
            value=shape_of(wrong[0]),
            fix=f"return {{{workload.metric!r}: number}}",
            code="invalid-metrics",
        )
    return {str(name): float(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, SupportsFloat)


def top1(data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any], where: str | None = None) -> dict[str, float]:
    """Top-1 accuracy in percent on batches of (inputs, target), and the number of samples `n`."""
    hits = n = 0
    with torch.no_grad(), eval_mode(predict):
        for right, _ in hits_of(data, predict, where=where):
            hits += int(right.sum())
            n += len(right)
    return {"top1": 100.0 * hits / n, "n": float(n)}


def hits_of(
    data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any], *, where: str | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each batch, which samples `predict` classifies correctly, and their targets."""
    empty = True
    for inputs, target in data:
        output = call_on("evaluation", predict, inputs, where=where)
        logits = getattr(output, "logits", output)  # Hugging Face classifiers return an object with logits
        if not isinstance(logits, Tensor) or logits.ndim != 2 or target.shape != logits.shape[:1]:
            raise WorkloadError(
                "top-1 needs an output of shape (samples, classes) and a target of shape (samples,)",
                where=where,
                value=f"{shape_of(logits)}, {shape_of(target)}",
                fix="pass your own evaluate= to Workload",
                code="invalid-output",
            )
        # argmax treats NaN as the largest value; count it as wrong so that a broken model doesn't score by chance
        sound = ~logits.isnan().any(dim=1)
        empty = empty and not len(target)
        yield (logits.argmax(dim=1) == target) & sound, target
    if empty:
        raise WorkloadError(
            "the evaluation loader yields no samples",
            where=where,
            fix="check its data set, and that each call returns a new iterator",
            code="no-data",
        )
