"""The float networks that rows start from. Each model and seed has one, which is trained once and stored in a file."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from bitwright.bench.grid import RowTask
from bitwright.core.environment import ONEDNN_VARIABLE, TORCH_VARIABLE
from bitwright.core.errors import BitwrightError, PlanError, Problem, WorkloadError
from bitwright.core.files import fingerprint
from bitwright.core.task_store import Study
from bitwright.core.tensor_tree import tensors_in
from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
from bitwright.graph import Graph, capture
from bitwright.training import Trainer
from bitwright.training.data import seed_all
from bitwright.workload import Workload, can_measure, evaluate, load_workload, pairs


@dataclass(frozen=True, kw_only=True)
class FloatNetwork:
    """A workload whose model has the float weights, with its accuracy and graph."""

    workload: Workload
    accuracy: float
    samples: int | None
    fingerprint: str
    graph: Graph


class FloatNetworks:
    """Float networks by model and seed. The last few stay in memory."""

    def __init__(self, folder: Path, study: Study[RowTask, Any]) -> None:
        self.folder, self.study = folder, study
        self._known: dict[tuple[str, ...], FloatNetwork] = {}

    def __call__(self, task: RowTask) -> FloatNetwork:
        """The float network of a row."""
        key = (task.model.workload, str(task.seed), repr(task.start), str(task.threads))
        if key not in self._known:
            if len(self._known) >= 4:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._make(task)
        return self._known[key]

    def check(self, tasks: Sequence[RowTask]) -> None:
        """Load all workloads before any is trained, so that problems do not appear after hours of work."""
        with _random_state_kept():
            refs = list(dict.fromkeys(task.model.workload for task in tasks))
            problems = list(_loading_problems(refs))
        if problems:
            raise PlanError(problems, title="workloads of the grid can't be used")

    def _make(self, task: RowTask) -> FloatNetwork:
        with _random_state_kept():
            seed_all(task.seed, "model")
            workload = load_workload(task.model.workload)
        name = self._same_as_before(task, workload)
        if task.start is not None:
            file = self.folder / f"{task.model.label}-{task.seed}-{name}.safetensors"
            if file.exists():
                load_checkpoint(workload.model, file)
            else:
                with _random_state_kept():
                    config = task.start.config(seed=task.seed)
                    trainer = Trainer(workload, config=config)
                    workload = replace(workload, model=trainer.fit().model)
                file.parent.mkdir(parents=True, exist_ok=True)
                save_checkpoint(workload.model, file)
        weights = fingerprint(*_state(workload))
        self._same_weights(task, weights)
        workload.model.eval()
        values = evaluate(workload, workload.model)
        return FloatNetwork(
            workload=workload,
            accuracy=values[workload.metric],
            samples=int(values["n"]) if "n" in values else None,
            fingerprint=weights,
            graph=capture(workload.model, workload.inputs),
        )

    def _same_as_before(self, task: RowTask, workload: Workload) -> str:
        """A fingerprint of network and data before training. A grid never mixes rows of different ones."""
        now = fingerprint(*_state(workload), *_data(workload), repr(task.start))
        where = f"workload:{task.model.label}:{task.seed}:{fingerprint(repr(task.start))}"
        before = self.study.keep(where, now)
        if before != now:
            raise WorkloadError(
                "the workload has changed since this grid began: its model or its data differ",
                where=task.model.label,
                value=task.model.workload,
                fix="start a new grid (name: or store:), or undo the change",
                code="workload-changed",
            )
        return now

    def _same_weights(self, task: RowTask, weights: str) -> None:
        """Reject float weights that differ from those of the grid (another CPU, another folder of float networks)."""
        settings = fingerprint(repr((task.start, task.threads)))
        before = self.study.keep(f"start:{task.model.label}:{task.seed}:{settings}", weights)
        if before != weights:
            raise WorkloadError(
                "the float weights differ from those that rows of this grid started from",
                where=f"{task.model.label}, seed {task.seed}",
                value=f"{weights}, the grid has {before}",
                fix=f"use the same folder (--starts) and instructions ({TORCH_VARIABLE}=avx2 {ONEDNN_VARIABLE}=AVX2 on "
                "all machines), or start a new grid (name: or store:)",
                code="weights-differ",
            )


def _data(workload: Workload) -> Iterator[str]:
    """Fingerprints of the example inputs and of each batch of the evaluation data."""
    yield fingerprint(*(tensor for _, tensor in tensors_in(workload.inputs)))
    if workload.evaluation is not None:
        with _random_state_kept():
            for batch in pairs(workload):
                yield fingerprint(*(tensor for _, tensor in tensors_in(batch)))


def _state(workload: Workload) -> list[str | Tensor]:
    return [part for name, tensor in workload.model.state_dict().items() for part in (name, tensor)]


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the state of all random generators at the end."""
    python, array = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    numpy.random.set_state(array)


def _loading_problems(refs: Sequence[str]) -> Iterator[Problem]:
    """Load every workload before the first is trained, and report all that can't be used."""
    for ref in refs:
        try:
            workload = load_workload(ref)
        except BitwrightError as error:
            yield from (replace(problem, where=problem.where or ref) for problem in error.problems)
            continue
        if not can_measure(workload):
            yield Problem(
                what="a grid compares accuracies, but the workload has no evaluation data",
                where=ref,
                fix="pass Workload(evaluation=...) or Workload(evaluate=...)",
                code="no-evaluation",
            )
