"""A workload's model and data, as verbs need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bitwright.cli.out import Out
from bitwright.core.errors import BitwrightError, WorkloadError
from bitwright.core.modes import eval_mode
from bitwright.core.tensor_tree import tensors_in
from bitwright.core.user_code import first_line, line_of
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks
from bitwright.workload import Workload, batches, call, load_workload, pairs
from bitwright.workload.data import first


def open_workload(out: Out, ref: str) -> Workload:
    """Load a workload and call its model once: a model that fails by itself isn't an error of ours."""
    with out.steps(f"loading {ref}"):
        workload = load_workload(ref)
        try:
            with eval_mode(workload.model), torch.no_grad():
                result = call(workload.model, workload.inputs)
        except BitwrightError:
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {first_line(error)}{line_of(error)}"
            raise WorkloadError(
                f"the model fails on its own example inputs: {words}",
                where=f"workload {workload.name!r}",
                fix="call model(*inputs) in Python, and mend the model or the inputs",
            ) from error
    if not any(True for _ in tensors_in(result)):
        raise WorkloadError(
            "the model returned no tensor",
            where=f"workload {workload.name!r}",
            value=type(result).__name__,
            fix="return a tensor, or tuples, lists, dicts or dataclasses of tensors",
        )
    return workload


def calibration(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Calibration data, at most so many samples of it."""
    return first(batches(workload.calibration, name=workload.name), samples)


def probes(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Inputs to check with: of the evaluation, else of the calibration, else the example."""
    if workload.evaluation is not None:
        return first((inputs for inputs, _ in pairs(workload)), samples)
    if workload.calibration is not None:
        return calibration(workload, samples)
    return iter([workload.inputs])


def labelled(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Pairs of inputs and targets of the evaluation data, or else of the training data, at most so many samples."""
    if workload.evaluation is not None:
        return first(pairs(workload), samples)
    alone = Ranks(rank=0, world=1, local=0)
    return first(TrainingData(workload, batch=None, seed=0, ranks=alone, workers=0).epoch(0), samples)
