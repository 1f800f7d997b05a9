"""Checkpoints of a run: folders that appear whole, `step-00000390`, of which the newest two and the best are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from bitwright.disk import note_written, to_disk, writing
from bitwright.documents import Strict, name_problem, read_json, read_text, validated
from bitwright.errors import CheckpointError, TrainError
from bitwright.files import write_text
from bitwright.fingerprint import file_fingerprint

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
        for name in ("model.safetensors", "state.safetensors"):
            if name not in state.files:
                raise self.damaged(file, f"it has no hash of {name}")
        for name, written in state.files.items():
            path = self.folder / name
            if name_problem(name) is not None or not path.is_file():
                raise self.damaged(path, "a file of the checkpoint is missing")
            if file_fingerprint(path) != written:
                raise self.damaged(path, "its contents are not those that were saved")
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
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".step-*"):  # of a process that was killed
            shutil.rmtree(left)
        target = self.folder / f"step-{step:08d}"
        staged = self.folder / f".step-{step:08d}"
        try:
            with writing(target):
                staged.mkdir()
                write(staged)
                for file in staged.iterdir():
                    to_disk(file)
                if target.exists():
                    shutil.rmtree(target)
                staged.rename(target)
                to_disk(self.folder)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        note_written(target)
        if best:
            write_text(self.folder / "best", target.name)
        self._forget()
        return Saved(folder=target, step=step)

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
