"""A workload's model and data, as verbs need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bitwright.cli.out import Out
from bitwright.deployment import calibration, probes
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks
from bitwright.workload import Workload, pairs
from bitwright.workload import open_workload as load
from bitwright.workload.data import first

__all__ = ["calibration", "labelled", "open_workload", "probes"]


def open_workload(out: Out, ref: str) -> Workload:
    """Load a workload, with a spinner."""
    with out.progress(f"loading {ref}"):
        return load(ref)


def labelled(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Pairs of inputs and targets of the evaluation data, or else of the training data, at most so many samples."""
    if workload.evaluation is not None:
        return first(pairs(workload), samples)
    alone = Ranks(rank=0, world=1, local=0)
    return first(TrainingData(workload, batch=None, seed=0, ranks=alone, workers=0).epoch(0), samples)
