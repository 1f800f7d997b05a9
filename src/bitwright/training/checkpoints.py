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
from bitwright.core.arrays import read_tensors
from bitwright.core.documents import Strict, name_problem, read_json, read_text, validated
from bitwright.core.errors import BitwrightError, CheckpointError, Problem, TrainError
from bitwright.core.files import file_fingerprint, note_written, temporary_folder, to_disk, write_text, writing
from bitwright.deploy.checkpoint import load_checkpoint, read_state, save_state

if TYPE_CHECKING:
    from bitwright.training.run import Run


_TENSOR = "$tensor"


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """`value` as JSON can hold it; its tensors go into `tensors`, under their paths.

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
    raise CheckpointError("this state can't be saved", where=path, value=type(value).__name__)


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `pack` was given, but for keys that weren't text and tuples."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            name = value[_TENSOR]
            if name not in tensors:
                what = "the checkpoint lacks this tensor"
                raise CheckpointError(what, where=str(name), fix="resume from another one", code="damaged-checkpoint")
            return tensors[name]
        return {key: unpack(item, tensors) for key, item in value.items()}
    return [unpack(item, tensors) for item in value] if isinstance(value, list) else value


_NAME = re.compile(r"step-(\d{8})")
_KEPT = 2
STATE = "trainer.json"


_FIX = "remove this folder: the checkpoint before it is used then"


class TrainerState(Strict):
    """`trainer.json`: where a run stands, what it was told, and the hashes of the files beside it."""

    model_config = ConfigDict(allow_inf_nan=True)  # a metric of a run may be either

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
    files: dict[str, str] = Field(default_factory=dict)
    """Name → fingerprint of every other file of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint on disk."""

    folder: Path
    step: int

    def state(self) -> TrainerState:
        """What the trainer wrote beside the tensors; a file that is damaged, missing or replaced is an error."""
        file = self.folder / STATE
        known = read_json(file, what="the checkpoint", fix=_FIX, error=CheckpointError, finite=False)
        title = f"{file} is damaged, or of another version of Bitwright"
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
                found.append(self.damaged(path, "its contents are not those that were saved"))
        if len(found) == 1:
            raise found[0]
        if found:
            raise TrainError([error.problems[0] for error in found], title="the checkpoint is damaged")
        return state

    def damaged(self, path: Path, what: str) -> CheckpointError:
        """The error of a checkpoint that can't be used."""
        return CheckpointError(f"can't resume: {what}", where=str(path), fix=_FIX, code="damaged-checkpoint")


class Checkpoints:
    """The folder `checkpoints` of a run."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "checkpoints"

    def save(self, step: int, write: Callable[[Path], None], *, best: bool = False) -> Saved:
        """Let `write` fill a folder; only when it is whole and on the disk it gets its name."""
        target = self.folder / f"step-{step:08d}"
        with writing(target):
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary_folder(self.folder) as temporary:
                staged = temporary / target.name
                staged.mkdir()
                write(staged)
                for file in staged.iterdir():
                    to_disk(file)
                if target.exists():
                    shutil.rmtree(target)
                staged.rename(target)
                to_disk(self.folder)
        note_written(target)
        saved = Saved(folder=target, step=step)
        if best:
            self.mark_best(saved)
        self._forget()
        return saved

    def mark_best(self, saved: Saved) -> None:
        """Note that this is the checkpoint with the best metric."""
        write_text(self.folder / "best", saved.folder.name)

    def remove_empty(self) -> None:
        """Remove the folder if it has no checkpoints."""
        with suppress(OSError):
            self.folder.rmdir()

    def all(self) -> list[Saved]:
        """The checkpoints that there are, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted(
            (Saved(folder=path, step=int(match[1])) for match, path in found if match and (path / STATE).is_file()),
            key=lambda saved: saved.step,
        )

    def latest(self) -> Saved | None:
        """The newest one."""
        return saved[-1] if (saved := self.all()) else None

    def best(self) -> Saved | None:
        """The one with the best metric."""
        mark = self.folder / "best"
        fix = "remove this file: another checkpoint will be the best one"
        name = read_text(mark, what="the best checkpoint's name", fix=fix).strip() if mark.is_file() else None
        return next((saved for saved in self.all() if saved.folder.name == name), None)

    def _forget(self) -> None:
        best = self.best()
        for saved in self.all()[:-_KEPT]:
            if best is None or saved.step != best.step:
                shutil.rmtree(saved.folder)


_STATE_FIX = "remove this folder: the checkpoint before it is used then"
# Settings that change nothing about the numbers: a resumed run may have others.
_FREE = {"save_steps", "log_steps", "workers"}


def identity(run: Run) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    fixed = {key: value for key, value in run.config.model_dump().items() if key not in _FREE}
    return {
        "workload": run.workload.name,
        "quantize": word(run.precision),
        "samples": run.data.size,
        "batch per process": run.data.parts[0] if len(set(run.data.parts)) == 1 else run.data.parts,
        **({} if run.compute is None else {"compute": word(run.compute), "simulate": run.simulate}),
        **({} if run.kind is None else {"kinds": run.kinds}),
        "processes": run.ranks.world,
        "init": None if run.init is None else str(run.init),
        "backend": run.backend,
        **{key: value for key, value in run.choices.items() if value not in (None, [], ())},
        **fixed,
    }


def whole_state(run: Run) -> dict[str, Tensor]:
    """The model's state as one process would have it; all ranks must ask."""
    return {name: run.parallel.whole(tensor) for name, tensor in run.model.state_dict().items()}


def writer(run: Run) -> Callable[[Path], None]:
    """Collect the state (with all ranks, where they share it); gives what writes it."""
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
        scaler=run.scaler.state_dict(),
        optimizer=pack(run.optimizer.state_dict()["state"], tensors, "optimizer"),
        ema=pack(run.ema.average, tensors, "ema") if run.ema is not None else None,
        observers=pack(_plain(run.qat.observer_state()), tensors, "observers") if run.qat is not None else None,
    )
    tensors = {name: run.parallel.whole(tensor).cpu().contiguous() for name, tensor in tensors.items()}
    model = whole_state(run)

    def write(folder: Path) -> None:
        save_state(model, folder / "model.safetensors")
        if run.qat is not None:
            run.qat.plan.save(folder / "plan.yaml")
        save_file(tensors, folder / "state.safetensors")
        files = {file.name: file_fingerprint(file) for file in sorted(folder.iterdir())}
        known = state.model_copy(update={"files": files}).model_dump()
        write_text(folder / STATE, json.dumps(known, indent=1) + "\n")

    return write


def checked(run: Run, saved: Saved) -> TrainerState:
    """The state of a checkpoint; one of another run is refused, with every difference."""
    state = saved.state()
    before, now = state.identity, json.loads(json.dumps(identity(run)))
    problems = [
        Problem(
            what=f"was {before.get(key)!r} when this run was saved",
            where=key,
            value=now.get(key),
            fix=f"use the same settings, or another folder (--init {saved.folder.parents[1]} starts from its weights)",
        )
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if problems:
        raise TrainError(problems, title=f"can't resume {saved.folder.name}: this is another run")
    return state


def restore(run: Run, saved: Saved, state: TrainerState) -> None:
    """Resume from a checkpoint whose model is loaded already."""
    tensors = _tensors(run, saved)
    try:
        _put(run, state, tensors)
    except BitwrightError as error:
        raise saved.damaged(saved.folder / STATE, f"{error.problems[0].where}: {error.problems[0].what}") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"the state doesn't fit this run: {type(error).__name__}: {error}"
        raise saved.damaged(saved.folder / STATE, what) from error
    run.step, run.epoch, run.stale = state.step, state.epoch, state.stale
    run.stopped_early, run.best, run.metrics = state.stopped_early, state.best, state.metrics
    ended = run.step == run.epoch * run.steps_per_epoch
    if run.checkpoints is not None and run.ranks.first and ended and run.best and run.best["epoch"] == run.epoch:
        run.checkpoints.mark_best(saved)  # the run may have failed between the checkpoint and the mark
    run.note(f"resumed {saved.folder.name}: {run.step} of {run.steps} steps are done")


def _put(run: Run, state: TrainerState, tensors: dict[str, Tensor]) -> None:
    """Moments, averages and observers."""
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
        run.scaler.load_state_dict(state.scaler)


def load_best(run: Run, saved: Saved) -> None:
    """The model of another checkpoint of this run, averaged if averages are kept."""
    if not run.parallel.measures_together:
        load_checkpoint(run.model, saved.folder / "model.safetensors")
    else:
        now = run.model.state_dict()
        with torch.no_grad():
            for name, tensor in read_state(saved.folder / "model.safetensors").items():
                now[name].copy_(run.parallel.part(tensor.to(run.device), now[name]))
    if run.ema is not None:
        _load_average(run, unpack(saved.state().ema, _tensors(run, saved)))
        run.ema.put(run.model)


def _load_average(run: Run, average: dict[str, Tensor]) -> None:
    assert run.ema is not None
    run.ema.average = {name: run.parallel.part(average[name], now) for name, now in run.ema.average.items()}


def _tensors(run: Run, saved: Saved) -> dict[str, Tensor]:
    file = saved.folder / "state.safetensors"
    found = read_tensors(file, fix=_STATE_FIX, error=CheckpointError, what="the checkpoint")
    return {name: tensor.to(run.device) for name, tensor in found.items()}


def _plain(observers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without what the plan says already."""
    return {site: {k: v for k, v in state.items() if k != "format"} for site, state in observers.items()}
