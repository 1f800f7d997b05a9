"""A workload's model and data, as verbs need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from bitwright.batching import first
from bitwright.cli.out import Out
from bitwright.errors import BitwrightError, WorkloadError
from bitwright.graph.tree import tensors_in
from bitwright.modes import evaluating
from bitwright.workload import Workload, batches, call, load_workload


def open_workload(out: Out, ref: str) -> Workload:
    """Load a workload and call its model once: a model that fails by itself isn't an error of ours."""
    with out.steps(f"loading {ref}"):
        workload = load_workload(ref)
        try:
            with evaluating(workload.model), torch.no_grad():
                result = call(workload.model, workload.inputs)
        except BitwrightError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"the model fails on its own example inputs: {type(error).__name__}: {_line(error)}",
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
    return first(_of_owner(batches(workload.calibration), "calibration"), samples)


def probes(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Inputs to check with: of the evaluation, else of the calibration, else the example."""
    if workload.evaluation is not None:
        evaluation = _of_owner(workload.evaluation(), "evaluation")
        return first((inputs for inputs, _ in evaluation), samples)
    if workload.calibration is not None:
        return calibration(workload, samples)
    return iter([workload.inputs])


def labelled(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Pairs of inputs and targets of the evaluation data, at most so many samples."""
    assert workload.evaluation is not None
    return first(_of_owner(workload.evaluation(), "evaluation"), samples)


def _of_owner(stream: Iterable[Any], kind: str) -> Iterator[Any]:
    """A loader's own failure, told as such."""
    iterator = iter(stream)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except BitwrightError:
            raise
        except Exception as error:
            raise WorkloadError(
                f"the {kind} loader raised {type(error).__name__}: {_line(error)}",
                fix=f"walk through the workload's {kind}() in Python",
            ) from error
        yield item


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
