"""The float model: what all candidates are compared with, and what the data is like."""

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
from bitwright.core.modes import eval_mode
from bitwright.core.tensor_tree import batch_size, tensors_in
from bitwright.workload import Workload, evaluate, hits_of, pairs
from bitwright.workload.data import joined, take

_PART, _LEAST = 512, 256  # samples of the part, and of the whole if a part shall be worth it


@dataclass(frozen=True, kw_only=True)
class Part:
    """A random part of the evaluation data, drawn without replacement."""

    inputs: Any
    target: Tensor
    float_hits: int
    samples: int

    def hits(self, predict: Callable[..., Any]) -> int:
        """How many of them a model gets right."""
        with torch.no_grad(), eval_mode(predict):
            return sum(int(right.sum()) for right, _ in hits_of([(self.inputs, self.target)], predict))


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The float model on the evaluation data."""

    metrics: dict[str, float]
    data: str
    """A fingerprint of the evaluation data; of the float model's metrics if the workload evaluates by itself."""
    right: Tensor | None = None
    """Which samples it gets right; None: they can't be seen, or have no classes."""
    majority: float | None = None
    """What always saying the most frequent class would score, in percent."""
    part: Part | None = None
    overlap: int | None = None
    """Calibration samples that are evaluation samples, too; None: can't be seen."""

    @property
    def hit_rate(self) -> float:
        """Percent of the samples that it gets right."""
        return 0.0 if self.right is None else 100.0 * int(self.right.sum()) / len(self.right)

    @property
    def samples(self) -> int | None:
        """How many there are, if they can be counted."""
        return None if self.right is None else len(self.right)


def measure_float(workload: Workload, metrics: Iterable[str], calibration: Iterable[Any], *, seed: int) -> Baseline:
    """Evaluate the float model, and look at the data on the way."""
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
class _Seen:
    right: Tensor
    targets: Tensor
    samples: set[str]
    prints: list[str]


def _look(workload: Workload, *, lenient: bool) -> _Seen | None:
    """Which samples the float model gets right. `lenient`: None if the data isn't that of a classifier."""
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
    return _Seen(right=torch.cat(right), targets=torch.cat(targets), samples=samples, prints=prints)


def _complete(values: dict[str, float], metrics: Iterable[str], workload: Workload) -> dict[str, float]:
    for metric in metrics:
        if metric not in values:
            raise WorkloadError(
                "the goal is set on a metric that was not measured",
                where=f"workload {workload.name!r}",
                value=metric,
                fix=did_you_mean(metric, values),
            )
    return values


def _part(workload: Workload, right: Tensor, seed: int) -> Part | None:
    """Random samples, fetched in a second walk through the data: only they are kept."""
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
    return Part(
        inputs=joined(inputs),
        target=torch.cat(targets),
        float_hits=int(right[torch.tensor(chosen)].sum()),
        samples=len(chosen),
    )
