"""The training section of LPOT files: optimizers and losses by name."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bitwright.importers.key_table import Honoured, Marker, Named, Noted, Option, Rejected, Section
from bitwright.importers.lpot.datasets import Loader
from bitwright.importers.lpot.metrics import Postprocess

__all__ = ["Train"]

Count = Annotated[int, Field(ge=1, le=10**7)]


class _Optimizer(Option):
    about: ClassVar[Marker] = Honoured("")


_LR = Annotated[float, Field(ge=0, le=1e6), Honoured("The learning rate.")]
_DECAY = Annotated[float, Field(ge=0, le=1e6), Honoured("The weight decay.")]


class SGD(_Optimizer):
    """Stochastic gradient descent."""

    learning_rate: _LR
    momentum: Annotated[float, Field(ge=0, lt=1), Honoured("The momentum.")] = 0.0
    nesterov: Annotated[bool, Honoured("Nesterov's momentum.")] = False
    weight_decay: _DECAY = 0.0


class Adam(_Optimizer):
    """Adam."""

    learning_rate: _LR = 0.001
    beta_1: Annotated[float, Field(ge=0, lt=1), Honoured("The first β.")] = 0.9
    beta_2: Annotated[float, Field(ge=0, lt=1), Honoured("The second β.")] = 0.999
    epsilon: Annotated[float, Field(gt=0, le=1), Honoured("ε.")] = 1e-07
    amsgrad: Annotated[bool, Honoured("The AMSGrad variant.")] = False
    weight_decay: _DECAY = 0.0


class AdamW(Adam):
    """Adam with decoupled weight decay."""


class _Criterion(Option):
    about: ClassVar[Marker] = Honoured("")
    reduction: Annotated[
        Literal["mean", "sum", "none", "auto", "sum_over_batch_size"], Honoured("How samples become one number.")
    ] = "mean"
    from_logits: Annotated[bool, Noted("PyTorch's loss always takes logits.")] = False


class CrossEntropyLoss(_Criterion):
    """Cross-entropy."""


class SparseCategoricalCrossentropy(_Criterion):
    """Cross-entropy with class numbers."""


class _Distillation(Option):
    about: ClassVar[Marker] = Rejected(
        "distillation is not supported", "train with CrossEntropyLoss, or distil with another tool first"
    )


class KnowledgeDistillationLoss(_Distillation):
    """Distillation."""


class IntermediateLayersKnowledgeDistillationLoss(_Distillation):
    """Distillation."""


class SelfKnowledgeDistillationLoss(_Distillation):
    """Distillation."""


_OPTIMIZERS: dict[str, type[Option]] = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW}
_CRITERIA: dict[str, type[Option]] = {
    kind.__name__: kind for parent in (_Criterion, _Distillation) for kind in parent.__subclasses__()
}


class Train(Section):
    """The training of `quant_aware_training`."""

    epoch: Annotated[Count | None, Honoured("Number of epochs.")] = None
    start_epoch: Annotated[int, Field(ge=0, le=10**6), Honoured("The first epoch.")] = 0
    end_epoch: Annotated[int | None, Field(ge=0, le=10**6), Honoured("The epoch after the last one.")] = None
    iteration: Annotated[Count | None, Honoured("Batches per epoch; all if missing.")] = None
    frequency: Annotated[Count | None, Noted("Only pruning updates its masks every so many steps.")] = None
    dataloader: Loader | None = None
    optimizer: Annotated[tuple[_Optimizer, ...], Named(_OPTIMIZERS, most=1), Honoured("The optimizer.")] = ()
    criterion: Annotated[tuple[_Criterion, ...], Named(_CRITERIA, most=1), Honoured("The loss.")] = ()
    execution_mode: Annotated[Literal["eager", "graph"], Noted("PyTorch always runs eagerly.")] = "eager"
    postprocess: Postprocess | None = None
    hostfile: Annotated[str | None, Noted("Reserved in LPOT; nothing reads it.")] = None

    @property
    def epochs(self) -> range:
        """The numbers of the epochs."""
        end = self.end_epoch if self.end_epoch is not None else self.start_epoch + (self.epoch or 1)
        return range(self.start_epoch, end)
