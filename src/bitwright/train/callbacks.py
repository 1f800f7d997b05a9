"""What can look on while a run goes: each event is one method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.disk import writing
from bitwright.documents import parse_json
from bitwright.errors import BitwrightError
from bitwright.files import write_text

if TYPE_CHECKING:
    from bitwright.train.run import Run


class Callback:
    """Look on at a run. On ranks other than 0 nothing is called."""

    def on_start(self, run: Run) -> None:
        """Everything is in place, no step was made (or the run goes on at `run.step`)."""

    def on_step(self, run: Run) -> None:
        """A step was made; `run.loss` is that of the last logged one."""

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        """Every `log_steps` steps: loss, lr, and the norm of gradients where it is known."""

    def on_epoch(self, run: Run, values: dict[str, float]) -> None:
        """An epoch was finished and measured; `values` has the workload's metrics."""

    def on_end(self, run: Run) -> None:
        """The run is over, or was interrupted."""


class History(Callback):
    """`history.jsonl`: one line for each logged step and each epoch; what a resumed run repeats is cut off first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "history.jsonl"

    def on_start(self, run: Run) -> None:
        """Keep what was before the step at which this run begins."""
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        kept = [line.decode() for line in lines if (step := _step(line)) is not None and step <= run.step]
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        """A step's line."""
        self._add({"step": run.step, "epoch": run.epoch, **values})

    def on_epoch(self, run: Run, values: dict[str, float]) -> None:
        """An epoch's line."""
        self._add({"step": run.step, "epoch": run.epoch, "metrics": values})

    def _add(self, row: dict[str, Any]) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _step(line: bytes) -> int | None:
    """The step of a line; None: the line is damaged, as a kill leaves the last one."""
    try:
        row = parse_json(line, where="history.jsonl", finite=False)
    except BitwrightError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None
