"""A workload's model and data, as verbs need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bitwright.cli.out import Out

if TYPE_CHECKING:
    from bitwright.workload import Workload


def open_workload(out: Out, ref: str) -> Workload:
    """Load a workload, with a spinner."""
    with out.progress(f"loading {ref}"):
        from bitwright.workload import open_workload as load

        return load(ref)


def calibration(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Batches of the calibration data, with at most `samples` samples."""
    from bitwright.workflows import calibration as find

    return find(workload, samples)


def probes(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Inputs to check a model with."""
    from bitwright.workflows import probes as find

    return find(workload, samples)


def labelled(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Batches of (inputs, target) of the evaluation data, else of the training data, with at most `samples` samples."""
    from bitwright.training.data import TrainingData
    from bitwright.training.distributed import Ranks
    from bitwright.workload import pairs
    from bitwright.workload.data import first

    if workload.evaluation is not None:
        return first(pairs(workload), samples)
    alone = Ranks(rank=0, world=1, local=0)
    return first(TrainingData(workload, batch=None, seed=0, ranks=alone, workers=0).epoch(0), samples)
