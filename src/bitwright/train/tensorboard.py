"""TensorBoard: losses and rates of steps; metrics, scales, ranges and clipped shares of epochs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.errors import BitwrightError
from bitwright.train.callbacks import Callback

if TYPE_CHECKING:
    from bitwright.train.run import Run


class TensorBoard(Callback):
    """Writes event files into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        problem = tensorboard_problem()
        if problem is not None:
            raise BitwrightError(problem, fix='pip install "bitwright[tensorboard]"')
        self.writer: Any = None

    def on_start(self, run: Run) -> None:
        """Open the files; what a resumed run repeats is purged."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=run.step + 1 if run.step else None)
        self._sites(run)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        """Losses, learning rate, gradient norm."""
        for name, value in values.items():
            self.writer.add_scalar(f"train/{name}", value, run.step)

    def on_epoch(self, run: Run, values: dict[str, float]) -> None:
        """Metrics and sites."""
        for name, value in values.items():
            self.writer.add_scalar(f"evaluation/{name}", value, run.step)
        self._sites(run)
        self.writer.flush()

    def on_end(self, run: Run) -> None:
        """Close the files."""
        self.writer.close()

    def _sites(self, run: Run) -> None:
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
    """Why there are no TensorBoard logs here, if there are none."""
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        return f"TensorBoard isn't installed ({error})"
    return None
