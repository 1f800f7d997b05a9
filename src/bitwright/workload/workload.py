"""The fields of a workload, and the slips that are refused when it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.errors import WorkloadError

#: Names of metrics of which less is most often better, as whole words: "val_loss", "errors", "RMSE".
_SOUNDS_LOW = re.compile(
    r"(?i)(?<![a-z])(loss(es)?|err(ors?)?|n?r?mse|mae|mape|perplexity|ppl|wer|cer|nll|fid|bpc|bpb)(?![a-z])"
)


@strict
@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every verb is given: a model, example inputs, and data.

    Loaders are functions, not iterators: each verb walks the data from its beginning, some more than once.
    """

    name: str
    model: nn.Module
    #: One example call of the model: a tuple is positional, a dict is by keyword.
    inputs: tuple[Any, ...] | dict[str, Any]
    #: Gives a fresh iterator over batches of inputs (a tensor, a tuple or a dict each), without targets.
    calibration: Callable[[], Iterable[Any]] | None = None
    #: Gives a fresh iterator over (inputs, target).
    evaluation: Callable[[], Iterable[tuple[Any, Tensor]]] | None = None
    #: The owner's own metric: gets a function that is called as the model is, gives ``{"top1": 91.7}``.
    evaluate: Callable[[Callable[..., Any]], dict[str, float]] | None = None
    #: Gives what is trained on: a map-style data set of (inputs, target), or a DataLoader of one. The trainer
    #: shuffles, shards and batches by itself.
    training: Callable[[], Any] | None = None
    #: Makes a batch (inputs, target) of samples; torch's ``default_collate`` if not given. A data set with
    #: ``__getitems__(indices)`` may give whole batches: then this is ``lambda batch: batch``.
    collate: Callable[[Any], tuple[Any, Any]] | None = None
    #: Gets the model's output and the target; a mean over samples, or those of unequal batches don't count alike.
    loss: Callable[[Any, Any], Tensor] | None = None
    #: The key of the measured values on which goals are set.
    metric: str = "top1"
    #: Whether less of ``metric`` is better, or the names of all measured values of which less is better.
    lower_is_better: bool | Collection[str] | None = None

    def less_is_better(self, metric: str | None = None) -> bool:
        """Whether less of a measured value (by default of ``metric``) is better."""
        said, name = self.lower_is_better, self.metric if metric is None else metric
        return name in said if isinstance(said, Collection) else bool(said) and name == self.metric

    def direction_note(self) -> str | None:
        """What to say where the metric's name sounds as if less were better, and nobody said so."""
        measured = self.evaluation is not None or self.evaluate is not None
        if self.lower_is_better is not None or not measured or not _SOUNDS_LOW.search(self.metric):
            return None
        return (
            f"more of {self.metric!r} is taken for better; if less is, give Workload(lower_is_better=True), "
            "else lower_is_better=False"
        )

    def __post_init__(self) -> None:
        """Refuse the usual slips here, where the owner's code is on the stack, and not minutes later."""
        where = f"workload {self.name!r}"
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(
                "the model is not an nn.Module",
                where=where,
                value=type(self.model).__name__,
                fix="pass an instance (Net(), not Net)" if isinstance(self.model, type) else "pass an nn.Module",
            )
        if not isinstance(self.inputs, tuple | dict):
            raise WorkloadError(
                "the example inputs are neither a tuple nor a dict",
                where=where,
                value=type(self.inputs).__name__,
                fix="write inputs=(x,) for model(x), or inputs={'name': x} for model(name=x)",
            )
        if isinstance(self.lower_is_better, str):
            raise WorkloadError(
                "lower_is_better is a text",
                where=where,
                value=self.lower_is_better,
                fix=f"write lower_is_better=({self.lower_is_better!r},), or True for metric=",
            )
        for field in ("calibration", "evaluation", "evaluate", "training", "collate", "loss"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise WorkloadError(
                    f"{field} is not a function",
                    where=where,
                    value=type(value).__name__,
                    fix=f"write {field}=lambda: loader, so that each use starts afresh"
                    if field in ("calibration", "evaluation", "training")
                    else f"give {field}= a function",
                )
