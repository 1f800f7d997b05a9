"""Lightning: one callback that quantizes before the optimizers are configured, and keeps in step with the Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from bitwright.core.arguments import reject_unknown
from bitwright.core.errors import TrainError
from bitwright.training.qat import Qat

__all__ = ["QatCallback"]


class QatCallback(Callback):
    """Quantizes the module at `module` (a path within the LightningModule; "" is all of it) when `fit` sets up.

    `batches` are calibration inputs, or a function that gives them; `options` are those of `Qat`. Layers must be
    there when `fit` is called: those that `setup` or `configure_model` build come too late. `qat` is there after
    `setup`. In `configure_optimizers` use `parameter_groups(self, weight_decay=…)`, so that scales don't decay.
    """

    qat: Qat

    def __init__(
        self, batches: Iterable[Any] | Callable[[], Iterable[Any]], *, module: str = "", **options: Any
    ) -> None:
        reject_unknown("QatCallback", options, inspect.signature(Qat).parameters)
        self.batches = batches
        self.module = module
        self.options = options
        self.step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Quantizers go in before weights are restored, and before optimizers and DDP are made."""
        if stage != "fit" or hasattr(self, "qat"):
            return
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise TrainError.single(
                "quantizers can't follow this strategy's parameters",
                where="strategy",
                value=type(trainer.strategy).__name__,
                fix='use one device, or strategy="ddp"',
            )
        model = pl_module.get_submodule(self.module)
        if not any(True for _ in model.parameters()):
            raise TrainError.single(
                "there are no layers yet",
                where=self.module or type(pl_module).__name__,
                fix="build layers in __init__: configure_model runs after callbacks are set up",
            )
        batches = self.batches() if callable(self.batches) else self.batches
        self.qat = Qat(model, batches, **self.options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what was made of it."""
        self.qat.check_optimizer(*trainer.optimizers)
        self.step = trainer.global_step
        if self.qat.following and not self.qat.model.training:
            raise TrainError.single(
                "the model is in evaluation mode, where ranges don't follow the data",
                where=self.module or None,
                fix="call .train() on it before fit: Lightning leaves modes as they are",
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The Trainer counts: it may have been resumed from between validation and the end of an epoch."""
        self.qat.at_epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Not every batch ends with a step."""
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.qat.after_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It comes before the end of the epoch: what is validated is what would be deployed."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.qat.settle()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before checkpoints are written: Lightning calls those callbacks last."""
        self.qat.after_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing moves any more."""
        self.qat.finish()

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints, beside the model's own state."""
        return self.qat.state_dict() if hasattr(self, "qat") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint that `fit(ckpt_path=…)` resumes."""
        if hasattr(self, "qat"):
            self.qat.load_state_dict(state)
