"""The progress bar and the report of a training run."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bitwright.cli.out import Out
from bitwright.core import formatting
from bitwright.reports import new_record, write_report
from bitwright.reports.sections import training_record
from bitwright.training.callbacks import Callback
from bitwright.training.run import TrainingRun


class TrainBar(Callback):
    """A bar with loss, metric and remaining time; without a terminal, one line per epoch."""

    def __init__(self, out: Out) -> None:
        self.out = out
        self.spoken = False
        self.progress: Progress | None = None
        self.losses: list[tuple[int, float]] = []  # of this epoch: the step, and the mean loss since the previous entry
        self.begun = 0

    def on_start(self, run: TrainingRun) -> None:
        """Start the bar."""
        self.spoken = True
        self.begun = run.step
        out = self.out
        if out.json or out.quiet or not out.stderr.is_terminal:
            return
        columns = [
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        ]
        self.progress = Progress(*columns, console=out.stderr, transient=True)
        self.task = self.progress.add_task("", total=run.steps, completed=run.step)
        self.progress.start()

    def on_log(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Collect the loss."""
        self.losses.append((run.step, values["loss"]))

    def _epoch_loss(self) -> float | None:
        """The mean over the steps of the epoch."""
        total, last = 0.0, self.begun
        for step, loss in self.losses:
            total, last = total + loss * (step - last), step
        return total / (last - self.begun) if last > self.begun else None

    def on_step(self, run: TrainingRun) -> None:
        """Update the bar."""
        if self.progress is None:
            return
        said = [f"epoch {run.epoch + 1}/{run.config.epochs}"]
        if run.loss is not None:
            said.append(f"loss {run.loss:.4f}")
        metric = run.workload.metric
        if run.metrics and metric in run.metrics[-1]:
            said.append(f"{metric} {formatting.metric_value(metric, run.metrics[-1][metric])}")
        self.progress.update(self.task, completed=run.step, description=", ".join(said))

    def on_epoch(self, run: TrainingRun, values: dict[str, float]) -> None:
        """Print a line for the epoch."""
        shown = ", ".join(
            f"{name} {formatting.metric_value(name, value)}" for name, value in values.items() if name != "n"
        )
        mean = self._epoch_loss()
        self.losses, self.begun = [], run.step
        loss = "" if mean is None else f"loss {mean:.4f}, "
        self.out.say(f"epoch {run.epoch}/{run.config.epochs}: {loss}{shown}")

    def on_end(self, run: TrainingRun) -> None:
        """Remove the bar."""
        if self.progress is not None:
            self.progress.stop()


class TrainReport(Callback):
    """Write the report together with the result."""

    def on_result(self, run: TrainingRun, folder: Path) -> None:
        """Write the report into the folder of the result."""
        write_report(new_record(run.workload.name, seed=run.config.seed, training=training_record(folder)), folder)
