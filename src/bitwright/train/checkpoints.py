"""Checkpoints of a run: folders that appear whole, `step-00000390`, of which the newest two and the best are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.errors import CheckpointError
from bitwright.files import write_text

_NAME = re.compile(r"step-(\d{8})")
_KEPT = 2
STATE = "trainer.json"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint on disk."""

    folder: Path
    step: int

    def state(self) -> dict[str, Any]:
        """What the trainer wrote beside the tensors."""
        try:
            state: dict[str, Any] = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint can't be read: {error}",
                where=str(self.folder),
                fix="remove this folder: the one before it is used then",
            ) from error
        return state


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
        staged.mkdir()
        write(staged)
        for file in staged.iterdir():
            _to_disk(file)
        if target.exists():
            shutil.rmtree(target)
        staged.rename(target)
        _to_disk(self.folder)
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
        name = mark.read_text(encoding="utf-8").strip() if mark.is_file() else None
        return next((saved for saved in self.all() if saved.folder.name == name), None)

    def _forget(self) -> None:
        best = self.best()
        for saved in self.all()[:-_KEPT]:
            if best is None or saved.step != best.step:
                shutil.rmtree(saved.folder)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
