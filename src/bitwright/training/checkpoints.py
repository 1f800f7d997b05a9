"""Checkpoints of a training run: folders, files, and the exact state of model, optimizer and observers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor

from bitwright.backends.precisions import word
from bitwright.core.documents import name_problem, read_json, read_tensors, read_text
from bitwright.core.errors import BitwrightError, CheckpointError, Problem, TrainError
from bitwright.core.files import file_fingerprint, note_written, sync_to_disk, temporary_folder, write_text, writing
from bitwright.core.schemas import Strict, validated
from bitwright.deployment.checkpoint import load_checkpoint, read_state, save_state
from bitwright.training.adaptive import samples_per_step

if TYPE_CHECKING:
    from bitwright.training.run import TrainingRun


_TENSOR = "$tensor"


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Convert `value` to JSON types; its tensors are added to `tensors` under their paths.

    >>> import torch
    >>> kept = {}
    >>> pack({"a": {"b": torch.ones(2), "lr": 0.1}}, kept), list(kept)
    ({'a': {'b': {'$tensor': 'a/b'}, 'lr': 0.1}}, ['a/b'])
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous()
        return {_TENSOR: path}
    if isinstance(value, dict):
        return {str(key): pack(item, tensors, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError("this state can't be saved", where=path, value=type(value).__name__, code="unsaved-state")


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`, except that keys become strings and tuples become lists."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            name = value[_TENSOR]
            if name not in tensors:
                what = "the checkpoint doesn't contain this tensor"
                fix = "resume from another checkpoint"
                raise CheckpointError(what, where=str(name), fix=fix, code="damaged-checkpoint")
            return tensors[name]
        return {key: unpack(item, tensors) for key, item in value.items()}
    return [unpack(item, tensors) for item in value] if isinstance(value, list) else value


_NAME = re.compile(r"step-(\d{8})")
_KEPT = 2
STATE = "trainer.json"


_FIX = "remove this folder to resume from the previous checkpoint"


class TrainerState(Strict):
    """`trainer.json`: the progress and settings of a run, and the hashes of the other files."""

    model_config = ConfigDict(allow_inf_nan=True)  # a metric may be infinite or NaN

    version: Literal[2]
    identity: dict[str, Any]
    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    stale: int = Field(ge=0)
    stopped_early: bool
    best: dict[str, float] | None
    metrics: list[dict[str, float]]
    scaler: dict[str, Any]
    optimizer: dict[str, Any]
    ema: dict[str, Any] | None
    observers: dict[str, Any] | None
    adaptive: dict[str, Any] | None = None
    """The current plan and the timeline of an adaptive run."""
    batches: int | None = Field(default=None, ge=1)
    """Batches of an epoch."""
    processes: int | None = Field(default=None, ge=1)
    """The number of processes at the start of the run."""
    files: dict[str, str] = Field(default_factory=dict)
    """Name → fingerprint of every other file of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk."""

    folder: Path
    step: int

    def state(self) -> TrainerState:
        """The trainer's state; raises an error if a file is damaged, missing or replaced."""
        file = self.folder / STATE
        known = read_json(file, what="the checkpoint", fix=_FIX, error=CheckpointError, finite=False)
        title = f"{file} is damaged, or from another version of Bitwright"
        state = validated(
            TrainerState, known, title=title, fix=_FIX, error=lambda found: TrainError(found, title=title)
        )
        if state.step != self.step:
            raise self.damaged(file, f"it is the state of step {state.step}")
        found = [
            self.damaged(file, f"it has no hash of {name}")
            for name in ("model.safetensors", "state.safetensors")
            if name not in state.files
        ]
        for name, written in state.files.items():
            path = self.folder / name
            if name_problem(name) is not None or not path.is_file():
                found.append(self.damaged(path, "a file of the checkpoint is missing"))
            elif file_fingerprint(path) != written:
                found.append(self.damaged(path, "its contents changed after it was saved"))
        if len(found) == 1:
            raise found[0]
        if found:
            raise TrainError([error.problems[0] for error in found], title="the checkpoint is damaged")
        return state

    def damaged(self, path: Path, what: str) -> CheckpointError:
        """The error for a checkpoint that can't be used."""
        return CheckpointError(f"can't resume: {what}", where=str(path), fix=_FIX, code="damaged-checkpoint")


class Checkpoints:
    """The folder `checkpoints` of a run."""

    def __init__(self, run: Path, *, keep_all: bool = False) -> None:
        self.folder = run / "checkpoints"
        self.keep_all = keep_all

    def save(self, step: int, write: Callable[[Path], None], *, best: bool = False) -> SavedCheckpoint:
        """Call `write` to fill a temporary folder, then rename it once it is complete and on disk."""
        target = self.folder / f"step-{step:08d}"
        with writing(target):
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary_folder(self.folder) as temporary:
                staged = temporary / target.name
                staged.mkdir()
                write(staged)
                for file in staged.iterdir():
                    sync_to_disk(file)
                if target.exists():
                    shutil.rmtree(target)
                staged.rename(target)
                sync_to_disk(self.folder)
        note_written(target)
        saved = SavedCheckpoint(folder=target, step=step)
        if best:
            self.mark_best(saved)
        self._forget()
        return saved

    def mark_best(self, saved: SavedCheckpoint) -> None:
        """Note that this is the checkpoint with the best metric."""
        write_text(self.folder / "best", saved.folder.name)

    def remove_empty(self) -> None:
        """Remove the folder if it has no checkpoints."""
        with suppress(OSError):
            self.folder.rmdir()

    def all(self) -> list[SavedCheckpoint]:
        """All checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted(
            (
                SavedCheckpoint(folder=path, step=int(match[1]))
                for match, path in found
                if match and (path / STATE).is_file()
            ),
            key=lambda saved: saved.step,
        )

    def latest(self) -> SavedCheckpoint | None:
        """The newest checkpoint."""
        return saved[-1] if (saved := self.all()) else None

    def best(self) -> SavedCheckpoint | None:
        """The checkpoint with the best metric."""
        mark = self.folder / "best"
        fix = "remove this file; the next best checkpoint creates it again"
        name = read_text(mark, what="the best checkpoint's name", fix=fix).strip() if mark.is_file() else None
        return next((saved for saved in self.all() if saved.folder.name == name), None)

    def _forget(self) -> None:
        if self.keep_all:
            return
        best = self.best()
        for saved in self.all()[:-_KEPT]:
            if best is None or saved.step != best.step:
                shutil.rmtree(saved.folder)


# Settings that don't affect results; a resumed run may change them.
_FREE = {"save_steps", "log_steps", "workers"}


def identity(run: TrainingRun) -> dict[str, Any]:
    """The settings that must be equal to resume a run."""
    fixed = {key: value for key, value in run.config.settings().items() if key not in _FREE}
    adapts = {"adaptive": True, "samples per step": sum(run.data.parts)}
    return {
        "workload": run.workload.name,
        "quantize": word(run.precision),
        "samples": run.data.size,
        "batch per process": run.data.parts[0] if len(set(run.data.parts)) == 1 else run.data.parts,
        **({} if run.adaptation is None else adapts),
        **({} if run.compute is None else {"compute": word(run.compute), "simulate": run.simulate}),
        **({} if run.kind is None else {"kinds": run.kinds}),
        "processes": run.ranks.world,
        "init": None if run.init is None else str(run.init),
        "backend": run.backend,
        **{key: value for key, value in run.choices.items() if value not in (None, [], ())},
        **fixed,
    }


def unsharded_state(run: TrainingRun) -> dict[str, Tensor]:
    """The unsharded state of the model; all ranks must call this function."""
    return {name: run.parallel.whole(tensor) for name, tensor in run.model.state_dict().items()}


def checkpoint_writer(run: TrainingRun) -> Callable[[Path], None]:
    """Gather the state from all ranks and return the function that writes it."""
    tensors: dict[str, Tensor] = {}
    state = TrainerState(
        version=2,
        identity=identity(run),
        step=run.step,
        epoch=run.epoch,
        stale=run.stale,
        stopped_early=run.stopped_early,
        best=run.best,
        metrics=run.metrics,
        scaler=run.training_step.scaler.state_dict(),
        optimizer=pack(run.optimizer.state_dict()["state"], tensors, "optimizer"),
        ema=pack(run.ema.average, tensors, "ema") if run.ema is not None else None,
        observers=pack(_plain(run.qat.observer_state()), tensors, "observers") if run.qat is not None else None,
        adaptive=None if run.adaptation is None else run.adaptation.state(),
        batches=run.data.batches,
        processes=run.started_with,
    )
    tensors = {name: run.parallel.whole(tensor).cpu().contiguous() for name, tensor in tensors.items()}
    model = unsharded_state(run)

    def write(folder: Path) -> None:
        save_state(model, folder / "model.safetensors")
        if run.qat is not None:
            run.qat.plan.save(folder / "plan.yaml")
        save_file(tensors, folder / "state.safetensors")
        files = {file.name: file_fingerprint(file) for file in sorted(folder.iterdir())}
        known = state.model_copy(update={"files": files}).model_dump()
        write_text(folder / STATE, json.dumps(known, indent=1) + "\n")

    return write


# What may change if a run is or was adaptive, as long as its steps have the same number of samples.
_ADAPTED = {"adaptive", "batch", "batch per process", "channels_last", "compute", "kinds", "processes", "simulate"}


def validate_checkpoint(run: TrainingRun, saved: SavedCheckpoint, state: TrainerState) -> None:
    """Raise an error that lists every setting that differs from this run."""
    before, now = state.identity, json.loads(json.dumps(identity(run)))
    if "adaptive" in before or "adaptive" in now:
        before, now = (
            {
                **{key: value for key, value in one.items() if key not in _ADAPTED},
                "samples per step": samples_per_step(one),
            }
            for one in (before, now)
        )
    problems = [
        Problem(
            what=f"was {before.get(key)!r} when this run was saved",
            where=key,
            value=now.get(key),
            fix=f"use the same settings, or another folder (--init {saved.folder.parents[1]} starts from its weights)",
            code="resume-mismatch",
        )
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if problems:
        raise TrainError(problems, title=f"can't resume {saved.folder.name}: it belongs to another run")


def restore(run: TrainingRun, saved: SavedCheckpoint, state: TrainerState) -> None:
    """Restore everything except the model's state, which is already loaded."""
    tensors = _tensors(run, saved)
    try:
        _put(run, state, tensors)
    except BitwrightError as error:
        raise saved.damaged(saved.folder / STATE, f"{error.problems[0].where}: {error.problems[0].what}") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"the state doesn't match this run: {type(error).__name__}: {error}"
        raise saved.damaged(saved.folder / STATE, what) from error
    run.step, run.epoch, run.stale = state.step, state.epoch, state.stale
    run.stopped_early, run.best, run.metrics = state.stopped_early, state.best, state.metrics
    ended = run.step == min(run.epoch * run.steps_per_epoch, run.steps)
    if run.checkpoints is not None and run.ranks.first and ended and run.best and run.best["epoch"] == run.epoch:
        run.checkpoints.mark_best(saved)  # the run may have failed between the checkpoint and the mark
    run.note(f"resumed {saved.folder.name}: {run.step} of {run.steps} steps are done")


def _put(run: TrainingRun, state: TrainerState, tensors: dict[str, Tensor]) -> None:
    """Restore the optimizer, averaged weights, observers and loss scale."""
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Any]] = {}
    for index, known in unpack(state.optimizer, tensors).items():
        like = parameters[int(index)]
        moments[int(index)] = {
            name: run.parallel.part(value, like) if isinstance(value, Tensor) else value
            for name, value in known.items()
        }
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": moments})
    if run.ema is not None:
        _load_average(run, unpack(state.ema, tensors))
    if run.qat is not None:
        run.qat.load_observer_state(unpack(state.observers, tensors), state.epoch)
    if state.scaler:
        run.training_step.scaler.load_state_dict(state.scaler)


def load_best(run: TrainingRun, saved: SavedCheckpoint) -> None:
    """Load the model of another checkpoint of this run, with averaged weights if there are any."""
    if not run.parallel.evaluates_together:
        load_checkpoint(run.model, saved.folder / "model.safetensors")
    else:
        now = run.model.state_dict()
        with torch.no_grad():
            for name, tensor in read_state(saved.folder / "model.safetensors").items():
                now[name].copy_(run.parallel.part(tensor.to(run.device), now[name]))
    if run.ema is not None:
        _load_average(run, unpack(saved.state().ema, _tensors(run, saved)))
        run.ema.put(run.model)


def _load_average(run: TrainingRun, average: dict[str, Tensor]) -> None:
    assert run.ema is not None
    run.ema.average = {name: run.parallel.part(average[name], now) for name, now in run.ema.average.items()}


def _tensors(run: TrainingRun, saved: SavedCheckpoint) -> dict[str, Tensor]:
    file = saved.folder / "state.safetensors"
    found = read_tensors(file, fix=_FIX, error=CheckpointError, what="the checkpoint")
    return {name: tensor.to(run.device) for name, tensor in found.items()}


def _plain(observers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Remove what the plan already contains."""
    return {site: {k: v for k, v in state.items() if k != "format"} for site, state in observers.items()}
