"""The float model as the reference of all candidates, and facts about the evaluation data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwright.core.errors import WorkloadError, did_you_mean
from bitwright.core.files import fingerprint, sample_fingerprints
from bitwright.core.tensor_tree import batch_size, eval_mode, tensors_in
from bitwright.workload import Workload, evaluate, hits_of, pairs
from bitwright.workload.data import joined, take

_PART, _LEAST = 512, 256  # samples in the part, and the minimum size of the data for using a part


@dataclass(frozen=True, kw_only=True)
class EvaluationSubset:
    """A random part of the evaluation data, drawn without replacement."""

    inputs: Any
    target: Tensor
    float_hits: int
    samples: int

    def hits(self, predict: Callable[..., Any]) -> int:
        """The number of samples that a model classifies correctly."""
        with torch.no_grad(), eval_mode(predict):
            return sum(int(right.sum()) for right, _ in hits_of([(self.inputs, self.target)], predict))


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The results of the float model on the evaluation data."""

    metrics: dict[str, float]
    data: str
    """A fingerprint of the evaluation data, or of the metrics if the workload has its own evaluation."""
    right: Tensor | None = None
    """Whether each sample is classified correctly; None if samples aren't accessible or have no classes."""
    majority: float | None = None
    """The accuracy of always predicting the most frequent class, in percent."""
    part: EvaluationSubset | None = None
    overlap: int | None = None
    """The number of calibration samples that are also evaluation samples; None if unknown."""

    @property
    def hit_rate(self) -> float:
        """The percentage of correctly classified samples."""
        return 0.0 if self.right is None else 100.0 * int(self.right.sum()) / len(self.right)

    @property
    def samples(self) -> int | None:
        """The number of samples, if known."""
        return None if self.right is None else len(self.right)


def measure_float(workload: Workload, metrics: Iterable[str], calibration: Iterable[Any], *, seed: int) -> Baseline:
    """Evaluate the float model, and collect facts about the data in the same pass."""
    seen = None if workload.evaluation is None else _look(workload, lenient=workload.evaluate is not None)
    if seen is None:
        known = _complete(evaluate(workload, workload.model), metrics, workload)
        return Baseline(metrics=known, data=fingerprint(repr(sorted(known.items()))))
    built_in = workload.evaluate is None
    values = {"top1": 100.0 * int(seen.right.sum()) / len(seen.right), "n": float(len(seen.right))}
    values = _complete(values if built_in else evaluate(workload, workload.model), metrics, workload)
    used = [
        p for batch in calibration for p in sample_fingerprints((t for _, t in tensors_in(batch)), batch_size(batch))
    ]
    return Baseline(
        metrics=values,
        data=fingerprint(*seen.prints, *([] if built_in else [repr(sorted(values.items()))])),
        right=seen.right,
        majority=100.0 * Counter(seen.targets.tolist()).most_common(1)[0][1] / len(seen.right),
        part=_part(workload, seen.right, seed) if built_in and tuple(metrics) == ("top1",) else None,
        overlap=sum(p in seen.samples for p in used),
    )


@dataclass(frozen=True, kw_only=True)
class _DataFacts:
    right: Tensor
    targets: Tensor
    samples: set[str]
    prints: list[str]


def _look(workload: Workload, *, lenient: bool) -> _DataFacts | None:
    """The hits of the float model. With `lenient`, returns None if the data isn't for classification."""
    right: list[Tensor] = []
    targets: list[Tensor] = []
    samples: set[str] = set()
    prints: list[str] = []

    def watched() -> Iterable[tuple[Any, Tensor]]:
        assert workload.evaluation is not None
        for inputs, target in pairs(workload):
            own = sample_fingerprints((t for _, t in tensors_in(inputs)), len(target))
            samples.update(own)
            prints.extend((*own, fingerprint(target)))
            yield inputs, target

    try:
        with torch.no_grad(), eval_mode(workload.model):
            for hits, target in hits_of(watched(), workload.model, where=f"workload {workload.name!r}"):
                right.append(hits.cpu())
                targets.append(target.cpu())
    except WorkloadError:
        if lenient:
            return None
        raise
    return _DataFacts(right=torch.cat(right), targets=torch.cat(targets), samples=samples, prints=prints)


def _complete(values: dict[str, float], metrics: Iterable[str], workload: Workload) -> dict[str, float]:
    for metric in metrics:
        if metric not in values:
            raise WorkloadError(
                "the goal uses a metric that wasn't measured",
                where=f"workload {workload.name!r}",
                value=metric,
                fix=did_you_mean(metric, values),
                code="metric-not-measured",
            )
    return values


def _part(workload: Workload, right: Tensor, seed: int) -> EvaluationSubset | None:
    """Random samples, collected in a second pass over the data so that only they are kept in memory."""
    whole = len(right)
    if whole < _LEAST:
        return None
    chosen = sorted(random.Random(seed).sample(range(whole), min(_PART, whole // 4)))
    assert workload.evaluation is not None
    inputs, targets, start = [], [], 0
    for batch, target in pairs(workload):
        inside = [index - start for index in chosen if start <= index < start + len(target)]
        if inside:
            inputs.append(take(batch, inside))
            targets.append(target[torch.tensor(inside)])
        start += len(target)
    return EvaluationSubset(
        inputs=joined(inputs),
        target=torch.cat(targets),
        float_hits=int(right[torch.tensor(chosen)].sum()),
        samples=len(chosen),
    )
