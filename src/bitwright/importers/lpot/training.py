"""The training section of LPOT files: optimizers and losses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from bitwright.core.errors import TrainError
from bitwright.core.tensor_tree import map_tensors
from bitwright.importers.key_table import Honoured, Marker, Named, Noted, Option, Rejected, Section
from bitwright.importers.lpot.datasets import Loader
from bitwright.importers.lpot.metrics import Postprocess
from bitwright.quantizers import Quantizer
from bitwright.workload.data import call

__all__ = ["Train"]

Count = Annotated[int, Field(ge=1, le=10**7)]


class _Optimizer(Option):
    about: ClassVar[Marker] = Honoured("")
    weight_decay: Annotated[float, Field(ge=0, le=1e6), Honoured("The weight decay.")] = 0.0

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer for these parameters."""
        raise NotImplementedError(self.name)


_LR = Annotated[float, Field(ge=0, le=1e6), Honoured("The learning rate.")]


class SGD(_Optimizer):
    """Stochastic gradient descent."""

    learning_rate: _LR
    momentum: Annotated[float, Field(ge=0, lt=1), Honoured("The momentum.")] = 0.0
    nesterov: Annotated[bool, Honoured("Nesterov's momentum.")] = False

    @model_validator(mode="after")
    def _momentum(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum")
        return self

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """PyTorch's SGD."""
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, nesterov=self.nesterov)


class Adam(_Optimizer):
    """Adam."""

    learning_rate: _LR = 0.001
    beta_1: Annotated[float, Field(ge=0, lt=1), Honoured("The first β.")] = 0.9
    beta_2: Annotated[float, Field(ge=0, lt=1), Honoured("The second β.")] = 0.999
    epsilon: Annotated[float, Field(gt=0, le=1), Honoured("ε.")] = 1e-07
    amsgrad: Annotated[bool, Honoured("The AMSGrad variant.")] = False
    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """PyTorch's Adam or AdamW."""
        betas = (self.beta_1, self.beta_2)
        return self.kind(groups, lr=self.learning_rate, betas=betas, eps=self.epsilon, amsgrad=self.amsgrad)


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


class _Criterion(Option):
    about: ClassVar[Marker] = Honoured("")
    reduction: Annotated[
        Literal["mean", "sum", "none", "auto", "sum_over_batch_size"], Honoured("How samples become one number.")
    ] = "mean"
    from_logits: Annotated[bool, Noted("PyTorch's loss always takes logits.")] = False

    @property
    def reduce(self) -> str:
        """PyTorch's reduction."""
        return self.reduction if self.reduction in ("sum", "none") else "mean"

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss of a batch."""
        scores: Any = getattr(output, "logits", output[0] if isinstance(output, tuple | list) else output)
        return nn.functional.cross_entropy(scores, target, reduction=self.reduce)


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

    def run(self, model: nn.Module, batches: Callable[[int], Iterable[tuple[Any, Tensor]]]) -> None:
        """Train a model. `batches` gives those of an epoch.

        Weights decay as LPOT's do: all of them. The scales of quantizers never do.
        """
        optimizer, (criterion,) = self.optimizer[0], self.criterion
        own = {p for module in model.modules() if isinstance(module, Quantizer) for p in module.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        shift = 0 if self.postprocess is None else self.postprocess.label_shift
        groups = [
            {"params": [p for p in trained if p not in own], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in trained if p in own], "weight_decay": 0.0},
        ]
        steps = optimizer.make([group for group in groups if group["params"]])
        device = next((p.device for p in trained), torch.device("cpu"))
        model.train()
        for epoch in self.epochs:
            for number, (inputs, target) in enumerate(batches(epoch)):
                if number == self.iteration:
                    break
                steps.zero_grad()
                inputs = map_tensors(inputs, lambda tensor: tensor.to(device))
                loss = criterion.loss(call(model, inputs), target.to(device) - shift)
                if not loss.isfinite():
                    what, fix = "the loss is not finite", "lower the learning rate"
                    where = f"epoch {epoch}, batch {number}"
                    raise TrainError.single(
                        what, where=where, value=float(loss.detach()), fix=fix, code="loss-not-finite"
                    )
                loss.backward()
                steps.step()
