"""Lightning: a callback that quantizes before optimizers are configured, and follows the Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from bitwright.core.arguments import reject_unknown
from bitwright.core.errors import TrainError
from bitwright.training.qat import Qat

__all__ = ["LightningQatCallback"]


class LightningQatCallback(Callback):
    """Quantizes the module at `module` (a path within the LightningModule; "" is all of it) when `fit` sets up.

    `batches` are calibration inputs, or a function that returns them; `options` are those of `Qat`. Layers must exist
    when `fit` is called: layers built in `setup` or `configure_model` are too late. `qat` is available after `setup`.
    In `configure_optimizers`, use `parameter_groups(self, weight_decay=…)` so that scales don't decay.
    """

    qat: Qat

    def __init__(
        self, batches: Iterable[Any] | Callable[[], Iterable[Any]], *, module: str = "", **options: Any
    ) -> None:
        reject_unknown("LightningQatCallback", options, inspect.signature(Qat).parameters)
        self.batches = batches
        self.module = module
        self.options = options
        self.step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add quantizers before weights are restored and before optimizers and DDP are created."""
        if stage != "fit" or hasattr(self, "qat"):
            return
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise TrainError.single(
                "quantizers don't support the parameters of this strategy",
                where="strategy",
                value=type(trainer.strategy).__name__,
                fix='use one device, or strategy="ddp"',
                code="unsupported-parallelism",
            )
        model = pl_module.get_submodule(self.module)
        if not any(True for _ in model.parameters()):
            raise TrainError.single(
                "the module has no parameters yet",
                where=self.module or type(pl_module).__name__,
                fix="build layers in __init__; configure_model runs after callbacks are set up",
                code="no-parameters",
            )
        batches = self.batches() if callable(self.batches) else self.batches
        self.qat = Qat(model, batches, **self.options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizers and the mode of the model."""
        self.qat.check_optimizer(*trainer.optimizers)
        self.step = trainer.global_step
        if self.qat.following and not self.qat.model.training:
            raise TrainError.single(
                "the model is in evaluation mode, in which ranges aren't updated",
                where=self.module or None,
                fix="call .train() on it before fit; Lightning doesn't change modes",
                code="evaluation-mode",
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Use the Trainer's epoch, which may have been resumed between validation and the end of an epoch."""
        self.qat.at_epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update ranges if the batch ended with a step."""
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.qat.after_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle weights before validation, which precedes the end of the epoch."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.qat.settle()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle weights before checkpoints are written: Lightning calls checkpoint callbacks last."""
        self.qat.after_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze all ranges."""
        self.qat.finish()

    def state_dict(self) -> dict[str, Any]:
        """State for Lightning's checkpoints, in addition to the model's state."""
        return self.qat.state_dict() if hasattr(self, "qat") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint that `fit(ckpt_path=…)` resumes."""
        if hasattr(self, "qat"):
            self.qat.load_state_dict(state)
