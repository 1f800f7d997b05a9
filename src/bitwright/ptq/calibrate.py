"""`calibrate(model, batches)`: let real data pass and give every quantizer its range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from bitwright.arguments import strict
from bitwright.attach import Quantizer, attachment_of, folded_once, in_mode
from bitwright.attach.state import parameter_problems
from bitwright.errors import BitwrightError, CalibrationError, PlanError, Problem, log_warnings
from bitwright.graph.tree import as_call
from bitwright.modes import evaluating
from bitwright.ptq.calibration_data import CalibrationData
from bitwright.ptq.feeding import Feed, how_to_feed
from bitwright.ptq.ranks import describe, exchange, give_up, own_ranges, settle_together, several


@strict
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    progress: Callable[[int], None] | None = None,
    group: Any = None,
) -> int:
    """Run `batches` through a prepared model (eval mode, float arithmetic), then settle all ranges.

    Each batch is a tensor, a tuple of positional arguments or a dict of keywords. Data streams: nothing but
    the observers' own statistics is kept, and large batches are cut where that changes no range. Returns the number of
    batches. Every quantizer that gets no usable range (no batch reached it, or its format can't hold what came) is
    reported, all at once.

    Where `torch.distributed` is initialised, all processes of `group` (default: all) must call this, each with batches
    of its own (or none): ranges are merged, and all end with the same grids, or the same problems. A rank that should
    calibrate alone gives a group of its own, `dist.new_group([rank])`, or `ALONE`, of which the others needn't know.

    Data that is empty or has no variety is warned about.
    """
    seen = CalibrationData()
    count = find_ranges(model, map(seen.see, batches), progress=progress, group=group)
    log_warnings(seen.warnings())
    return count


def find_ranges(
    model: nn.Module, batches: Iterable[Any], *, progress: Callable[[int], None] | None = None, group: Any = None
) -> int:
    """`calibrate`, for callers that look at the data themselves."""
    attachment = attachment_of(model)
    # observers report quantized weights, by their sites
    observed = {site for site, quantizer in attachment.quantizers.items() if not quantizer.of}
    others = [(name, p) for name, p in model.named_parameters() if _site_of(name) not in observed]
    if wrong := parameter_problems(attachment.quantizers, others):
        raise PlanError(wrong, title="a model with these parameters can't be calibrated")
    # those that are made from others come last
    quantizers = sorted(attachment.quantizers.values(), key=lambda q: bool(q.of))
    for quantizer in quantizers:
        quantizer.observer = None
    if several(group):
        try:
            seen = _observe(model, quantizers, batches, progress)
            own = own_ranges(quantizers)
        except Exception as error:
            give_up(error, group)
            raise
        reports = exchange(describe(quantizers, seen), group)
        total = sum(report.batches for report in reports)
    else:
        total = seen = _observe(model, quantizers, batches, progress)
    if total == 0:
        raise CalibrationError(
            "the calibration loader yielded no batch", fix="give a loader (or list) with at least one batch"
        )
    problems = settle_together(quantizers, reports, own, group) if several(group) else _settle(quantizers)
    if problems:
        raise PlanError(problems, title="calibration left quantizers without a range")
    return seen


def _site_of(parameter: str) -> str:
    path, _, port = parameter.rpartition(".")
    return f"{path}:{port}"


def _observe(
    model: nn.Module, quantizers: Sequence[Quantizer], batches: Iterable[Any], progress: Callable[[int], None] | None
) -> int:
    def run(batch: Any) -> None:
        args, kwargs = as_call(batch)
        model(*args, **kwargs)

    seen = 0
    with evaluating(model), torch.no_grad(), in_mode(model, "calibrate"):
        stream = iter(batches)
        first = list(islice(stream, 1))
        feed = how_to_feed(model, quantizers, first[0], run) if first else Feed()
        stream = chain(first, stream)
        del first  # batches are let go as soon as the next one comes
        with folded_once(model):
            for batch in stream:
                try:
                    try:
                        for piece in feed.pieces(batch):
                            run(piece)
                    except RuntimeError:
                        if not feed.channels_last:
                            raise
                        # a path that the first samples didn't take wants another order; no observer minds a repetition
                        feed = replace(feed, channels_last=False)
                        for piece in feed.pieces(batch):
                            run(piece)
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
    return seen


def _settle(quantizers: Iterable[Quantizer]) -> list[Problem]:
    problems: list[Problem] = []
    for quantizer in quantizers:
        try:
            quantizer.settle()
        except CalibrationError as error:
            problems += error.problems
    return problems
