"""The `Workload` class, its validation and its loss."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwright.core.arguments import strict
from bitwright.core.errors import WorkloadError, defined_at, user_code
from bitwright.core.tensor_tree import shape_of

#: Takes the model's output and the target; returns a tensor with one element.
Loss = Callable[[Any, Any], Tensor]

#: Words in metric names for which lower is usually better, as in "val_loss", "errors", "RMSE".
_SOUNDS_LOW = re.compile(
    r"(?i)(?<![a-z])(loss(es)?|err(ors?)?|n?r?mse|mae|mape|perplexity|ppl|wer|cer|nll|fid|bpc|bpb)(?![a-z])"
)


@strict
@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, example inputs and data: the input of every verb.

    Loaders are functions, not iterators, because verbs may iterate over the data several times.

    >>> import torch
    >>> from bitwright import Workload
    >>> images, labels = torch.randn(64, 8), torch.randint(4, (64,))
    >>> Workload(
    ...     name="tiny",
    ...     model=torch.nn.Linear(8, 4),
    ...     inputs=(images[:1],),
    ...     calibration=lambda: images.split(16),
    ...     evaluation=lambda: zip(images.split(16), labels.split(16)),
    ... )
    <Workload tiny: Linear with calibration, evaluation data>
    """

    name: str
    model: nn.Module
    #: One example call of the model: a tuple of positional arguments or a dict of keyword arguments.
    inputs: tuple[Any, ...] | dict[str, Any]
    #: Returns a new iterator over batches of inputs (tensors, tuples or dicts) without targets.
    calibration: Callable[[], Iterable[Any]] | None = None
    #: Returns a new iterator over (inputs, target).
    evaluation: Callable[[], Iterable[tuple[Any, Tensor]]] | None = None
    #: A custom metric: takes a function with the model's signature and returns numbers such as ``{"top1": 91.7}``.
    evaluate: Callable[[Callable[..., Any]], dict[str, float]] | None = None
    #: Returns the training data: a map-style data set of (inputs, target), or a DataLoader of one. The trainer
    #: shuffles, shards and batches it.
    training: Callable[[], Any] | None = None
    #: Makes a batch (inputs, target) from samples; default: torch's ``default_collate``. For a data set with
    #: ``__getitems__(indices)`` that returns complete batches, pass ``lambda batch: batch``.
    collate: Callable[[Any], tuple[Any, Any]] | None = None
    #: Takes the model's output and the target. It must be a mean over samples so that unequal batches can be weighted.
    loss: Loss | None = None
    #: The measured value that goals refer to.
    metric: str = "top1"
    #: Whether lower values of ``metric`` are better, or the names of all such measured values.
    lower_is_better: bool | Collection[str] | None = None

    def __repr__(self) -> str:
        data = [name for name in ("calibration", "evaluation", "training") if getattr(self, name) is not None]
        return f"<Workload {self.name}: {type(self.model).__name__} with {', '.join(data) or 'no'} data>"

    def less_is_better(self, metric: str | None = None) -> bool:
        """Whether a lower value of a metric (default: ``metric``) is better."""
        lower, name = self.lower_is_better, self.metric if metric is None else metric
        return name in lower if isinstance(lower, Collection) else bool(lower) and name == self.metric

    def direction_note(self) -> str | None:
        """A note if the metric's name suggests that lower is better, but the workload doesn't say so."""
        measured = self.evaluation is not None or self.evaluate is not None
        if self.lower_is_better is not None or not measured or not _SOUNDS_LOW.search(self.metric):
            return None
        return (
            f"higher values of {self.metric!r} are taken as better; if lower is better, pass "
            "Workload(lower_is_better=True), otherwise lower_is_better=False"
        )

    def __post_init__(self) -> None:
        """Reject common mistakes here, where the user's code is on the stack."""
        where = f"workload {self.name!r}"
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(
                "the model is not an nn.Module",
                where=where,
                value=type(self.model).__name__,
                fix="pass an instance (Net(), not Net)" if isinstance(self.model, type) else "pass an nn.Module",
                code="not-a-module",
            )
        if not isinstance(self.inputs, tuple | dict):
            raise WorkloadError(
                "the example inputs must be a tuple or a dict",
                where=where,
                value=type(self.inputs).__name__,
                fix="write inputs=(x,) for model(x), or inputs={'name': x} for model(name=x)",
                code="invalid-inputs",
            )
        if isinstance(self.lower_is_better, str):
            raise WorkloadError(
                "lower_is_better is a string",
                where=where,
                value=self.lower_is_better,
                fix=f"write lower_is_better=({self.lower_is_better!r},), or True for metric",
                code="wrong-argument-type",
            )
        for field in ("calibration", "evaluation", "evaluate", "training", "collate", "loss"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise WorkloadError(
                    f"{field} is not a function",
                    where=where,
                    value=type(value).__name__,
                    fix=f"write {field}=lambda: loader, so that each use gets a new iterator"
                    if field in ("calibration", "evaluation", "training")
                    else f"pass a function as {field}=",
                    code="not-a-function",
                )


_EXPECTED = "loss(output, target) returns a tensor with one element"


def loss_of(workload: Workload) -> Loss:
    """The workload's loss, with clear errors for exceptions and invalid results.

    It keeps the name of the loss because profiles identify it by name.
    """
    loss = workload.loss
    assert loss is not None
    where = f"workload {workload.name!r}"

    @functools.wraps(loss, assigned=("__name__", "__doc__", "reduction"), updated=())
    def guarded(output: Any, target: Any) -> Tensor:
        try:
            value: Any = loss(output, target)
        except Exception:
            got = f"output: {shape_of(output)}; target: {shape_of(target)}"
            fix = f"call loss(model(inputs), target) in Python ({got})"
            with user_code(workload.name, "loss", expected=_EXPECTED, fix=fix):
                raise
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise WorkloadError(
                f"loss returned an invalid value{defined_at(loss)}; expected: {_EXPECTED}",
                where=where,
                value=shape_of(value),
                fix="return the mean over samples" if isinstance(value, Tensor) else "return a tensor, without .item()",
                code="invalid-loss",
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise _no_gradient(loss, output, value, where)
        found: Tensor = value
        return found

    guarded.__qualname__ = getattr(loss, "__qualname__", type(loss).__name__)
    return guarded


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters. A model without any raises an error."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise WorkloadError(
            "the model has no trainable parameters",
            value=type(model).__name__,
            fix="call requires_grad_(True) on the parameters to train",
            code="nothing-to-train",
        )
    return found


def _no_gradient(loss: object, output: Any, value: Tensor, where: str) -> WorkloadError:
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
        return WorkloadError(
            f"loss has no gradient{defined_at(loss)}; expected: {_EXPECTED} that depends on the output",
            where=where,
            value=f"{shape_of(value)} of {str(value.dtype).removeprefix('torch.')}",
            fix="compute it from the output without .item(), .detach(), argmax or comparisons",
            code="no-gradient",
        )
    return WorkloadError(
        "the model's output has no gradient, so it can't be trained",
        where=where,
        value=shape_of(output),
        fix="call requires_grad_(True) on the parameters to train; avoid torch.no_grad() and .detach() in forward",
        code="no-gradient",
    )
