"""The data of a workload for calibration, for checks and for scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks
from bitwright.workload import Workload, batches, pairs
from bitwright.workload.data import first

__all__ = ["calibration", "labelled", "probes"]


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


def labelled(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Batches of (inputs, target) of the evaluation data, else of the training data."""
    if workload.evaluation is not None:
        return first(pairs(workload), samples)
    alone = Ranks(rank=0, world=1, local=0)
    return first(TrainingData(workload, batch=None, seed=0, ranks=alone, workers=0).epoch(0), samples)
