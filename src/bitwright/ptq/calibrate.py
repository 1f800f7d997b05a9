"""`calibrate(model, batches)`: let real data pass and give every quantizer its range."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from bitwright.attach import attachment_of, in_mode
from bitwright.errors import BitwrightError, CalibrationError, PlanError, Problem
from bitwright.graph.tree import as_call
from bitwright.modes import evaluating


def calibrate(model: nn.Module, batches: Iterable[Any], *, progress: Callable[[int], None] | None = None) -> int:
    """Run `batches` through a prepared model (eval mode, float arithmetic), then settle all ranges.

    Each batch is a tensor, a tuple of positional arguments or a dict of keywords. Data streams: nothing but
    the observers' own statistics is kept. Returns the number of batches. Every quantizer that gets no usable
    range (no batch reached it, or its format can't hold what came) is reported, all at once.
    """
    attachment = attachment_of(model)
    seen = 0
    for quantizer in attachment.quantizers.values():
        quantizer.observer = None
    with evaluating(model), torch.no_grad(), in_mode(model, "calibrate"):
        for batch in batches:
            args, kwargs = as_call(batch)
            try:
                model(*args, **kwargs)
            except BitwrightError:
                raise
            except Exception as error:
                raise CalibrationError(
                    f"the model failed: {type(error).__name__}: {error}",
                    where=f"calibration batch {seen}",
                    fix="give batches that the model takes: a tensor, a tuple of arguments or a dict of keywords",
                ) from error
            seen += 1
            if progress is not None:
                progress(seen)
    if seen == 0:
        raise CalibrationError(
            "the calibration loader yielded no batch", fix="give a loader (or list) with at least one batch"
        )
    problems: list[Problem] = []
    # those that are made from others come last
    for quantizer in sorted(attachment.quantizers.values(), key=lambda q: bool(q.of)):
        try:
            quantizer.settle()
        except CalibrationError as error:
            problems += error.problems
    if problems:
        raise PlanError(problems, title="calibration left quantizers without a range")
    return seen
