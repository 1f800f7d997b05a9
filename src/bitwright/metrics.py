"""Metrics that a configuration can name: from a model's outputs and the targets to one number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import WorkloadError, did_you_mean
from bitwright.workload import call

Evaluate = Callable[[Callable[..., Any]], dict[str, float]]


class _Topk:
    """Percent of the samples whose target is among the k largest outputs."""

    def __init__(self, k: int = 1) -> None:
        if type(k) is not int or k < 1:
            raise WorkloadError("topk counts whole numbers from 1", where="metric.topk.k", value=k, fix="write k: 1")
        self.k, self.hits, self.n = k, 0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        if output.dim() < 2 or output.shape[1] < self.k:
            what = f"topk needs outputs of shape (samples, classes) with {self.k} classes or more"
            raise WorkloadError(what, where="metric.topk", value=tuple(output.shape), fix="choose a smaller k")
        sound = ~output.isnan().any(dim=1)
        found = (output.topk(self.k, dim=1).indices == target[:, None]).any(dim=1)
        self.hits += int((found & sound).sum())
        self.n += len(target)

    def value(self) -> float:
        return 100.0 * self.hits / self.n


class _F1:
    """Of the positive class, in percent."""

    def __init__(self, positive: int = 1) -> None:
        self.positive, self.both, self.said, self.true = positive, 0, 0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        said = (output.argmax(dim=1) == self.positive) & ~output.isnan().any(dim=1)
        true = target == self.positive
        self.both += int((said & true).sum())
        self.said += int(said.sum())
        self.true += int(true.sum())

    def value(self) -> float:
        return 200.0 * self.both / (self.said + self.true) if self.said + self.true else 0.0


class _Error:
    """The mean of |y − ŷ|^power, and its root if asked for."""

    def __init__(self, power: int, *, root: bool = False) -> None:
        self.power, self.root, self.sum, self.n = power, root, 0.0, 0

    def add(self, output: Tensor, target: Tensor) -> None:
        self.sum += float((output.double() - target.double()).abs().pow(self.power).sum())
        self.n += target.numel()

    def value(self) -> float:
        mean = self.sum / self.n
        return mean**0.5 if self.root else mean


METRICS: dict[str, tuple[Callable[..., Any], bool]] = {
    "topk": (_Topk, True),
    "f1": (_F1, True),
    "mse": (partial(_Error, 2), False),
    "mae": (partial(_Error, 1), False),
    "rmse": (partial(_Error, 2, root=True), False),
}
"""Each with whether more of it is better."""


def metric_name(name: str, options: dict[str, Any]) -> str:
    """How a metric with these options is called: top1, top5, f1, …"""
    return f"top{options.get('k', 1)}" if name == "topk" else name


def make_evaluate(wanted: dict[str, dict[str, Any]], data: Callable[[], Iterable[tuple[Any, Tensor]]]) -> Evaluate:
    """A workload's `evaluate` from names and options of metrics."""
    for name in wanted:
        if name not in METRICS:
            raise WorkloadError("unknown metric", value=name, fix=did_you_mean(name, METRICS))
    for name, options in wanted.items():  # wrong options are told now, not after the first evaluation
        try:
            METRICS[name][0](**options)
        except TypeError as error:
            raise WorkloadError(f"the options of the metric are wrong: {error}", where=name, value=options) from error

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
            raise WorkloadError("the evaluation loader yields no sample", fix="check its data set")
        return {**{name: counter.value() for name, counter in counters.items()}, "n": float(n)}

    return evaluate
