"""`transformers.Trainer`: quantizers before the Trainer, this callback within it."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from bitwright.core.errors import Problem, TrainError
from bitwright.training.checkpoints import pack, unpack
from bitwright.training.qat import Qat

__all__ = ["QatCallback"]


class QatCallback(TrainerCallback, ExportableState):
    """Keeps a `Qat` in step with a `transformers.Trainer`, its evaluations and its checkpoints.

    Make `Qat(model, …)` first, then `Trainer(model, …, callbacks=[QatCallback(qat)])`. With `weight_decay` in the
    arguments, also `optimizer_cls_and_kwargs=callback.optimizer(args)`: the Trainer decays by names, and scales aren't
    among those that it spares.
    """

    def __init__(self, qat: Qat) -> None:
        self.qat = qat

    def optimizer(self, args: TrainingArguments, *, lr: float | None = None) -> tuple[Any, dict[str, Any]]:
        """The optimizer that the arguments ask for, without decay of quantizers (`lr` is theirs), norms and biases."""
        model: Any = self.qat.model
        made, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        groups = self.qat.parameter_groups(weight_decay=args.weight_decay, lr=lr)
        return made, {**options, "params": groups}

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint's trainer_state.json."""
        tensors: dict[str, torch.Tensor] = {}
        packed = pack(self.qat.state_dict(), tensors)
        held = b64encode(save({name: tensor.cpu() for name, tensor in tensors.items()})).decode()
        return {"args": {}, "attributes": {"state": packed, "tensors": held}}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse what can't work while nothing is lost."""
        _refuse(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trainer: Any
    ) -> None:
        """Everything is in place but no step was made: look at it; go on where a checkpoint ends."""
        _refuse(args)
        self.qat.check_optimizer(trainer["optimizer"])
        if state.global_step == 0:
            return
        callbacks: Any = state.stateful_callbacks
        saved = callbacks.get(type(self).__name__)
        if not isinstance(saved, dict):
            raise TrainError.single(
                "this checkpoint has no quantizer state: it was saved without the callback",
                where=f"step {state.global_step}",
                fix="load its weights into the model, make Qat, and train without resume_from_checkpoint",
            )
        try:
            held = saved["attributes"]
            packed, tensors = held["state"], load(b64decode(held["tensors"], validate=True))
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise TrainError.single(
                f"the quantizer state of this checkpoint is damaged: {error}",
                where=f"step {state.global_step}",
                fix="resume from another checkpoint",
                code="damaged-checkpoint",
            ) from error
        restored = unpack(packed, tensors)
        self.qat.load_state_dict(restored if isinstance(restored, dict) else {})
        self.qat.at_epoch(int(state.epoch))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ranges follow; what is evaluated or saved now is what would be deployed."""
        self.qat.after_step()
        if control.should_evaluate or control.should_save:
            self.qat.settle()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Settle, and freeze what is due."""
        self.qat.after_epoch()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """After the best checkpoint was loaded, if the arguments say so."""
        self.qat.finish()


def _refuse(args: TrainingArguments) -> None:
    problems = []
    if args.n_gpu > 1:
        what = "one process with several GPUs (DataParallel) runs copies that quantizers don't see"
        problems.append(Problem(what=what, value=args.n_gpu, fix="start it with torchrun: one process for each GPU"))
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            fix = "train with DDP (torchrun), or with bitwright.Trainer, which has FSDP2"
            problems.append(Problem(what="shards parameters, quantizers can't follow them", where=name, fix=fix))
    if args.restore_callback_states_from_checkpoint:
        what = "makes callbacks anew, which this one can't be: it resumes without that"
        fix = "leave it off"
        problems.append(Problem(what=what, where="restore_callback_states_from_checkpoint", fix=fix))
    if problems:
        raise TrainError(problems)
