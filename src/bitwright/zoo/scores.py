"""Scores of a classifier: accuracy, F1, and the accuracy of always predicting the most frequent class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bitwright.workload import call

__all__ = ["scores"]


def scores(data: Iterable[tuple[Any, Tensor]], predict: Callable[..., Any]) -> dict[str, float]:
    """Accuracy (`top1`) and share of the majority class in percent, F1 of class 1 for two classes, and samples `n`.

    >>> data = [(torch.eye(3)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))]
    >>> scores(data, lambda x: x[:, :2])
    {'top1': 75.0, 'f1': 80.0, 'majority': 50.0, 'n': 4.0}
    """
    outputs = [(call(predict, inputs), target) for inputs, target in data]
    logits, target = torch.cat([output for output, _ in outputs]), torch.cat([target for _, target in outputs])
    # argmax treats NaN as the largest value; count it as wrong so that a broken model doesn't score by chance
    answers = torch.where(logits.isnan().any(1), -1, logits.argmax(1))
    counts, n = torch.bincount(target), len(target)
    values = {"top1": 100.0 * int((answers == target).sum()) / n}
    if logits.shape[1] == 2:
        found = int(((answers == 1) & (target == 1)).sum())
        values["f1"] = 200.0 * found / max(1, int((answers == 1).sum()) + int((target == 1).sum()))
    return {**values, "majority": 100.0 * int(counts.max()) / n, "n": float(n)}
