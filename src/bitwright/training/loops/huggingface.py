"""`transformers.Trainer`: create `Qat` before the Trainer, and pass this callback to it."""

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

__all__ = ["HuggingFaceQatCallback"]


class HuggingFaceQatCallback(TrainerCallback, ExportableState):
    """Synchronizes a `Qat` with the steps, evaluations and checkpoints of a `transformers.Trainer`.

    Create `Qat(model, …)` first, then `Trainer(model, …, callbacks=[HuggingFaceQatCallback(qat)])`. If the arguments
    contain `weight_decay`, also pass `optimizer_cls_and_kwargs=callback.optimizer(args)`: the Trainer selects
    parameters for weight decay by name, and would include scales.
    """

    def __init__(self, qat: Qat) -> None:
        self.qat = qat

    def optimizer(self, args: TrainingArguments, *, lr: float | None = None) -> tuple[Any, dict[str, Any]]:
        """The optimizer of the arguments, without decay of quantizers (`lr` applies to them), norms and biases."""
        model: Any = self.qat.model
        made, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        groups = self.qat.parameter_groups(weight_decay=args.weight_decay, lr=lr)
        return made, {**options, "params": groups}

    def state(self) -> dict[str, Any]:
        """The contents for a checkpoint's trainer_state.json."""
        tensors: dict[str, torch.Tensor] = {}
        packed = pack(self.qat.state_dict(), tensors)
        held = b64encode(save({name: tensor.cpu() for name, tensor in tensors.items()})).decode()
        return {"args": {}, "attributes": {"state": packed, "tensors": held}}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Reject unsupported arguments early."""
        _refuse(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **trainer: Any
    ) -> None:
        """Check the optimizer, and restore the state of a resumed checkpoint."""
        _refuse(args)
        self.qat.check_optimizer(trainer["optimizer"])
        if state.global_step == 0:
            return
        callbacks: Any = state.stateful_callbacks
        saved = callbacks.get(type(self).__name__)
        if not isinstance(saved, dict):
            raise TrainError.single(
                "this checkpoint has no quantizer state, because it was saved without the callback",
                where=f"step {state.global_step}",
                fix="load its weights into the model, create Qat, and train without resume_from_checkpoint",
                code="missing-quantizer-state",
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
        """Update ranges; settle weights before an evaluation or a checkpoint, as for deployment."""
        self.qat.after_step()
        if control.should_evaluate or control.should_save:
            self.qat.settle()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Settle weights, and freeze what is configured."""
        self.qat.after_epoch()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finish after the best checkpoint was loaded, if the arguments request it."""
        self.qat.finish()


def _refuse(args: TrainingArguments) -> None:
    problems = []
    if args.n_gpu > 1:
        what = "DataParallel (one process with several GPUs) runs copies of the model without quantizers"
        fix = "use torchrun with one process per GPU"
        problems.append(Problem(what=what, value=args.n_gpu, fix=fix, code="unsupported-parallelism"))
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            fix = "train with DDP (torchrun), or with bitwright.Trainer, which supports FSDP2"
            what = "it shards parameters, which quantizers don't support"
            problems.append(Problem(what=what, where=name, fix=fix, code="unsupported-parallelism"))
    if args.restore_callback_states_from_checkpoint:
        what = "it creates new callbacks, which isn't possible for this one; the callback resumes without this option"
        where, fix = "restore_callback_states_from_checkpoint", "set it to False"
        problems.append(Problem(what=what, where=where, fix=fix, code="unsupported-option"))
    if problems:
        raise TrainError(problems)
