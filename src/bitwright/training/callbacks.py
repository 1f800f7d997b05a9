"""Callbacks of a training run: each event is one method."""

from __future__ import annotations

import json
import shutil
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.core.display import Progress
from bitwright.core.documents import parse_json
from bitwright.core.errors import BitwrightError
from bitwright.core.files import write_text, writing
from bitwright.core.formatting import metric_value

if TYPE_CHECKING:
    from bitwright.training.adaptive import Planned
    from bitwright.training.run import TrainingRun

log = getLogger("bitwright.training")


class Callback:
    """Observes a run. Methods are called on rank 0 only."""

    def on_start(self, run: TrainingRun) -> None:
        """Called after the set-up, before the first step (or before step `run.step` of a resumed run)."""

    def on_step(self, run: TrainingRun) -> None:
        """Called after each step; `run.loss` is the last logged loss."""

    def on_log(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Called every `log_steps` steps with the loss, lr, and the norm of gradients if it is known."""

    def on_switch(self, run: TrainingRun, planned: Planned) -> None:
        """Called after an adaptive run has switched to another plan."""

    def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Called after an epoch is finished and evaluated; `values` contains the workload's metrics."""

    def on_result(self, run: TrainingRun, folder: Path) -> None:
        """The run is complete. What is written to `folder` moves to the run's folder together with the result."""

    def on_end(self, run: TrainingRun) -> None:
        """Called when the run ends or is interrupted."""

    def discard(self, run: TrainingRun) -> None:
        """The run failed before its first checkpoint: remove the files that this callback has written to its folder."""


class EpochLog(Callback):
    """Logs a line for each epoch, and reports the progress of each step."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress
        self.losses: list[tuple[int, float]] = []  # this epoch's (step, mean loss since the previous entry)
        self.begun = 0

    def on_start(self, run: TrainingRun) -> None:
        """Remember the first step."""
        self.begun = run.step
        if run.step == run.steps:
            log.info("this run was already finished: no step was trained, and the report was written again")

    def on_step(self, run: TrainingRun) -> None:
        """Report the progress."""
        if self.progress is not None:
            loss = "" if run.loss is None else f", loss {run.loss:.4f}"
            self.progress(run.step, run.steps, f"training, epoch {run.epoch + 1}/{run.epochs}{loss}")

    def on_log(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Collect the loss."""
        self.losses.append((run.step, values["loss"]))

    def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Log the mean loss of the epoch and the metrics."""
        total, last = 0.0, self.begun
        for step, loss in self.losses:
            total, last = total + loss * (step - last), step
        parts = [f"loss {total / (last - self.begun):.4f}"] if last > self.begun else []
        parts += [f"{name} {metric_value(name, value)}" for name, value in values.items() if name != "n"]
        self.losses, self.begun = [], run.step
        log.info("epoch %d/%d: %s", run.epoch, run.epochs, ", ".join(parts))


class History(Callback):
    """`history.jsonl`: one line per logged step and epoch; lines that a resumed run repeats are removed first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "history.jsonl"
        self._new = False

    def on_start(self, run: TrainingRun) -> None:
        """Keep the lines up to the step at which this run starts."""
        self._new = not self.path.exists()
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        kept = [line.decode() for line in lines if (step := _step(line)) is not None and step <= run.step]
        write_text(self.path, "".join(f"{line}\n" for line in kept))

    def on_log(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Append the line of a step."""
        self._add({"step": run.step, "epoch": run.epoch, **values})

    def on_switch(self, run: TrainingRun, planned: Planned) -> None:
        """Append the line of a switch."""
        switch = {"sections": planned.sections, "batches": planned.batches, "predicted": planned.seconds}
        self._add({"step": run.step, "epoch": run.epoch, "switch": switch})

    def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Append the line of an epoch."""
        self._add({"step": run.step, "epoch": run.epoch, "metrics": values})

    def discard(self, run: TrainingRun) -> None:
        """Remove the file, unless it existed before."""
        if self._new:
            self.path.unlink(missing_ok=True)

    def _add(self, row: dict[str, Any]) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _step(line: bytes) -> int | None:
    """The step of a line, or None if the line is damaged, for example by a killed process."""
    try:
        row = parse_json(line, where="history.jsonl", finite=False)
    except BitwrightError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None


class TensorBoard(Callback):
    """Writes event files into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        problem = tensorboard_problem()
        if problem is not None:
            raise BitwrightError(problem, fix='pip install "bitwright[tensorboard]"', code="missing-tensorboard")
        self.writer: Any = None
        self._before: frozenset[Path] | None = None  # files that existed before; None if the folder didn't exist

    def on_start(self, run: TrainingRun) -> None:
        """Open the files and purge the steps that a resumed run repeats."""
        from torch.utils.tensorboard import SummaryWriter

        self._before = frozenset(self.folder.iterdir()) if self.folder.is_dir() else None
        with writing(self.folder, strict=True):
            self.writer = SummaryWriter(str(self.folder), purge_step=run.step + 1 if run.step else None)
            self._sites(run)

    def on_log(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Write the loss, learning rate and gradient norm."""
        with writing(self.folder):
            for name, value in values.items():
                self.writer.add_scalar(f"train/{name}", value, run.step)

    def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Write the metrics and the state of all sites."""
        with writing(self.folder, strict=True):
            for name, value in values.items():
                self.writer.add_scalar(f"evaluation/{name}", value, run.step)
            self._sites(run)
            self.writer.flush()

    def on_end(self, run: TrainingRun) -> None:
        """Close the files."""
        if self.writer is not None:
            with writing(self.folder):
                self.writer.close()

    def discard(self, run: TrainingRun) -> None:
        """Remove the files of this run."""
        if self._before is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            for file in set(self.folder.iterdir()) - self._before:
                file.unlink(missing_ok=True)

    def _sites(self, run: TrainingRun) -> None:
        for row in run.sites():
            for name, value in (
                ("scale", (row.scale_min + row.scale_max) / 2),
                ("range/low", row.low),
                ("range/high", row.high),
                ("clipped", row.clipped),
            ):
                if value is not None:
                    self.writer.add_scalar(f"{name}/{row.site}", value, run.step)


def tensorboard_problem() -> str | None:
    """The reason why TensorBoard isn't available, or None."""
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        return f"TensorBoard isn't installed ({error})"
    return None
