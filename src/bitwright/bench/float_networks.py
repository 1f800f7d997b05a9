"""The float networks that rows start from: one for each model and seed, trained once and kept in files."""

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
from bitwright.bench.grid_validation import loading_problems
from bitwright.bench.machine import ONEDNN_VARIABLE, TORCH_VARIABLE
from bitwright.core.errors import PlanError, WorkloadError
from bitwright.core.files import fingerprint
from bitwright.core.task_store import Study
from bitwright.core.tensor_tree import tensors_in
from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
from bitwright.graph import Graph, capture
from bitwright.training import TrainConfig, Trainer
from bitwright.training.data import seed_all
from bitwright.workload import Workload, evaluate, load_workload, pairs


@dataclass(frozen=True, kw_only=True)
class Start:
    """A workload whose model has the float weights, and what is known of it."""

    workload: Workload
    accuracy: float
    samples: int | None
    fingerprint: str
    graph: Graph


class Starts:
    """Float networks by model and seed; the last few stay in memory."""

    def __init__(self, folder: Path, study: Study[RowTask, Any]) -> None:
        self.folder, self.study = folder, study
        self._known: dict[tuple[str, ...], Start] = {}

    def __call__(self, task: RowTask) -> Start:
        """The start of a row."""
        key = (task.model.workload, str(task.seed), repr(task.start), str(task.threads))
        if key not in self._known:
            if len(self._known) >= 4:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._make(task)
        return self._known[key]

    def check(self, tasks: Sequence[RowTask]) -> None:
        """Load all workloads before any is trained: the last one's problem must not come after hours of the first's."""
        with _random_numbers_kept():
            refs = list(dict.fromkeys(task.model.workload for task in tasks))
            problems = list(loading_problems(refs, load_workload))
        if problems:
            raise PlanError(problems, title="workloads of the grid can't be used")

    def _make(self, task: RowTask) -> Start:
        with _random_numbers_kept():
            seed_all(task.seed, "model")
            workload = load_workload(task.model.workload)
        name = self._same_as_before(task, workload)
        if task.start is not None:
            file = self.folder / f"{task.model.label}-{task.seed}-{name}.safetensors"
            if file.exists():
                load_checkpoint(workload.model, file)
            else:
                with _random_numbers_kept():
                    config = TrainConfig(seed=task.seed, drop_last=True, **task.start.model_dump())
                    trainer = Trainer(workload, config=config)
                    workload = replace(workload, model=trainer.fit().model)
                file.parent.mkdir(parents=True, exist_ok=True)
                save_checkpoint(workload.model, file)
        weights = fingerprint(*_state(workload))
        self._same_weights(task, weights)
        workload.model.eval()
        values = evaluate(workload, workload.model)
        return Start(
            workload=workload,
            accuracy=values[workload.metric],
            samples=int(values["n"]) if "n" in values else None,
            fingerprint=weights,
            graph=capture(workload.model, workload.inputs),
        )

    def _same_as_before(self, task: RowTask, workload: Workload) -> str:
        """A name for network and data before training: rows of different ones mustn't stand side by side."""
        now = fingerprint(*_state(workload), *_data(workload), repr(task.start))
        where = f"workload:{task.model.label}:{task.seed}:{fingerprint(repr(task.start))}"
        before = self.study.keep(where, now)
        if before != now:
            raise WorkloadError(
                "the workload was changed since this grid began: its model or its data are others",
                where=task.model.label,
                value=task.model.workload,
                fix="begin another grid (name: or store:), or undo the change",
            )
        return now

    def _same_weights(self, task: RowTask, weights: str) -> None:
        """Workers whose float weights differ (another CPU, another folder of starts) mustn't fill one table."""
        settings = fingerprint(repr((task.start, task.threads)))
        before = self.study.keep(f"start:{task.model.label}:{task.seed}:{settings}", weights)
        if before != weights:
            raise WorkloadError(
                "the float weights aren't those that rows of this grid started from",
                where=f"{task.model.label}, seed {task.seed}",
                value=f"{weights}, the grid has {before}",
                fix=f"use the same folder (--starts) and instructions ({TORCH_VARIABLE}=avx2 {ONEDNN_VARIABLE}=AVX2 on "
                "all machines), or begin another grid (name: or store:)",
            )


def _data(workload: Workload) -> Iterator[str]:
    """Example inputs and all that is evaluated on, a batch at a time."""
    yield fingerprint(*(tensor for _, tensor in tensors_in(workload.inputs)))
    if workload.evaluation is not None:
        with _random_numbers_kept():
            for batch in pairs(workload):
                yield fingerprint(*(tensor for _, tensor in tensors_in(batch)))


def _state(workload: Workload) -> list[str | Tensor]:
    return [part for name, tensor in workload.model.state_dict().items() for part in (name, tensor)]


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """The caller's random numbers stay as they were."""
    python, array = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    numpy.random.set_state(array)
