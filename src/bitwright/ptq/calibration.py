"""Calibration: run data through the model and set the range of every quantizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.display import Progress
from bitwright.core.environment import keep_freed_memory
from bitwright.core.errors import BitwrightError, CalibrationError, PlanError, Problem, log_warnings
from bitwright.core.registry import OBSERVERS
from bitwright.core.tensor_tree import as_call, batch_size, channels_last, eval_mode, slice_batch, tensors_in, untouched
from bitwright.ptq.distributed import (
    exchange,
    is_distributed,
    make_report,
    merge_ranges,
    own_ranges,
    send_failure,
    settle_across_ranks,
)
from bitwright.quantizers import Quantizer, attachment_of, folded_once, in_mode, tapped, weights_may_change
from bitwright.quantizers.state import parameter_problems
from bitwright.workload.data import CalibrationData, split

LARGEST = 12 * 2**20
"""Activations up to this many bytes are reused by the C library's allocator (measured with glibc)."""

_NEAR = 1e-4  # relative to a range; kernels for other batch sizes differ by less if samples are independent


@dataclass(frozen=True)
class Batching:
    """How batches reach the model: samples per call (None: whole batches) and memory format of images."""

    size: int | None = None
    channels_last: bool = False

    def pieces(self, batch: Any) -> Iterator[Any]:
        """The batch divided into the inputs of each call."""
        for piece in [batch] if self.size is None else split([batch], self.size):
            yield channels_last(piece) if self.channels_last else piece


def choose_batching(
    model: nn.Module, quantizers: Sequence[Quantizer], batch: Any, run: Callable[[Any], None]
) -> Batching:
    """Choose the batch size and the memory format that are fastest and don't change any site's range.

    Two samples are run separately, together and channels-last to compare the ranges. Batches stay whole if an observer
    counts batches. The model is unchanged afterwards.
    """
    whole = batch_size(batch)
    watched = {q for q in quantizers if not q.weight and not q.of}
    tensors = [tensor for _, tensor in tensors_in(batch)]
    if whole < 3 or not all(tensor.device.type == "cpu" for tensor in tensors):
        return Batching()
    if any(OBSERVERS.get(q.spec.observer).by_batch for q in watched):
        return Batching()

    def ranges(samples: Any) -> dict[str, Tensor]:
        run(samples)
        return {q.site: torch.stack(q.observer.range()) for q in watched if q.observer is not None}

    def forget() -> None:
        for quantizer in watched:
            quantizer.observer = None

    first, second = slice_batch(batch, 0, 1), slice_batch(batch, 1, 2)
    with untouched(model, train=False):
        for quantizer in quantizers:
            quantizer.observing = quantizer in watched  # weights don't depend on the batch
        try:
            alone = ranges(first)
            size = LARGEST // max((4 * q.observed_shape.numel() for q in watched if q.observer is not None), default=1)
            cut = size < whole
            if cut:
                apart = ranges(second)
                forget()
                cut = _alike(apart, ranges(slice_batch(batch, 0, 2)))
        except Exception:  # use whole batches; if they fail too, calibration reports the error
            return Batching()
        images = any(tensor.dim() == 4 and tensor.is_floating_point() for tensor in tensors)
        forget()
        try:
            images = images and _alike(alone, ranges(channels_last(first)))
        except Exception:  # for example, a view that requires another memory format
            images = False
    keep_freed_memory()
    return Batching(max(1, size) if cut else None, images)


def _alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(_near(a[site], b[site]) for site in a)


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= _NEAR * (b[1] - b[0])).all())


@strict
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    progress: Progress | None = None,
    group: Any = None,
) -> int:
    """Run `batches` through a prepared model (eval mode, float arithmetic), then set all ranges.

    Each batch is a tensor, a tuple of positional arguments or a dict of keyword arguments. Batches are streamed: only
    the statistics of the observers stay in memory. Large batches are divided if that doesn't change any range. Returns
    the number of batches. All quantizers without a usable range are reported together, either because no batch reached
    them or because their format can't represent the values.

    If `torch.distributed` is initialized, all processes of `group` (default: all) must call this function, each with
    its own batches (or none). Ranges are merged, so all processes get the same grids or the same problems. To calibrate
    in a single process, pass its own group, `dist.new_group([rank])`, or `ALONE`, which needs no communication.

    Empty or constant data causes a warning.

    >>> import torch, bitwright
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.randn(16, 8)
    >>> bitwright.prepare(model, bitwright.make_plan(bitwright.capture(model, x), "onnxruntime")) and None
    >>> bitwright.calibrate(model, [x, x])
    2
    """
    seen = CalibrationData()
    count = find_ranges(model, map(seen.see, batches), progress=progress, group=group)
    log_warnings(seen.warnings())
    return count


def find_ranges(
    model: nn.Module, batches: Iterable[Any], *, progress: Progress | None = None, group: Any = None
) -> int:
    """Like `calibrate`, without warnings about the data."""
    attachment = attachment_of(model)
    # observers check quantized weights and report them by site
    observed = {site for site, quantizer in attachment.quantizers.items() if not quantizer.of}
    others = [(name, p) for name, p in model.named_parameters() if _site_of(name) not in observed]
    if wrong := parameter_problems(attachment.quantizers, others):
        raise PlanError(wrong, title="a model with these parameters can't be calibrated")
    # quantizers derived from others come last
    stored = [q for q in attachment.quantizers.values() if not q.spec.format.dynamic]  # others have no range
    quantizers = sorted(stored, key=lambda q: bool(q.of))
    for quantizer in quantizers:
        quantizer.observer = None
    if is_distributed(group):
        try:
            seen = _observe(model, quantizers, batches, progress)
            own = own_ranges(quantizers)
        except Exception as error:
            send_failure(error, group)
            raise
        reports = exchange(make_report(quantizers, seen), group)
        total = sum(report.batches for report in reports)
    else:
        total = seen = _observe(model, quantizers, batches, progress)
    if total == 0:
        raise CalibrationError(
            "the calibration loader yielded no batch",
            fix="pass a loader or list with at least one batch",
            code="no-calibration-data",
        )
    problems = settle_across_ranks(quantizers, reports, own, group) if is_distributed(group) else _settle(quantizers)
    if problems:
        raise PlanError(problems, title="calibration left quantizers without a range")
    attachment.note_unseen_experts()
    return seen


def _site_of(parameter: str) -> str:
    path, _, port = parameter.rpartition(".")
    return f"{path}:{port}"


def _observe(
    model: nn.Module, quantizers: Sequence[Quantizer], batches: Iterable[Any], progress: Progress | None
) -> int:
    def run(batch: Any) -> None:
        args, kwargs = as_call(batch)
        model(*args, **kwargs)

    seen = 0
    only_weights = all(quantizer.weight and not quantizer.of for quantizer in quantizers)

    def complete() -> bool:
        """Whether more data can't change anything: each weight was observed, and no experts count their tokens."""
        return only_weights and all(q.observer is not None for q in quantizers) and not attachment_of(model).tokens

    with eval_mode(model), torch.no_grad(), in_mode(model, "calibrate"):
        stream = iter(batches)
        first = list(islice(stream, 1))
        feed = choose_batching(model, quantizers, first[0], run) if first and not only_weights else Batching()
        if first and only_weights and batch_size(first[0]) > 1:
            try:
                run(slice_batch(first[0], 0, 1))
            except BitwrightError:
                raise
            except Exception:
                pass
        stream = chain(first, stream)
        del first  # release each batch as soon as the next one arrives
        with folded_once(model):
            for batch in stream:
                if complete():
                    seen += 1
                    continue
                try:
                    try:
                        for piece in feed.pieces(batch):
                            run(piece)
                    except RuntimeError:
                        if not feed.channels_last:
                            raise
                        # another path needs another memory format; observing a sample twice doesn't change ranges
                        feed = replace(feed, channels_last=False)
                        for piece in feed.pieces(batch):
                            run(piece)
                except BitwrightError:
                    raise
                except Exception as error:
                    raise CalibrationError(
                        f"the model failed: {type(error).__name__}: {error}",
                        where=f"calibration batch {seen}",
                        fix="pass batches that the model accepts: a tensor, a tuple of arguments or a dict of keywords",
                        code="calibration-failed",
                    ) from error
                seen += 1
                if progress is not None:
                    progress(seen, None, "calibrating")
    return seen


def _settle(quantizers: Iterable[Quantizer]) -> list[Problem]:
    problems: list[Problem] = []
    for quantizer in quantizers:
        try:
            quantizer.update_grid()
        except CalibrationError as error:
            problems += error.problems
    return problems


@torch.no_grad()
def settle_ranges(quantizers: list[Quantizer], group: Any = None) -> None:
    """Set each quantizer's range from its observer; sites that no tensor reached keep their range.

    If `torch.distributed` is initialized, all processes must call this function: one collective merges the ranges, and
    all processes get bit-equal grids.
    """
    seen = [q for q in quantizers if q.saw and q.observer is not None]
    ranges = {q.site: q.observer.range() for q in seen if q.observer is not None}
    if is_distributed(group):
        ranges = merge_ranges(quantizers, [q.scale.numel() for q in quantizers], ranges, group)
    for quantizer in quantizers:
        if quantizer.site in ranges:
            quantizer.update_grid_from(*ranges[quantizer.site], quantizer.observed_shape)


@torch.no_grad()
def settle_weights(model: nn.Module, example: Any) -> list[str]:
    """Refit the ranges of a trained model's weights; returns the sites with a scale that a guard had to raise.

    Learned scales are kept, except where a guard against accumulator overflow applies. `example` is one call of the
    model: weights are observed as they are deployed, including folded norms.
    """
    seen: dict[str, tuple[Quantizer, Tensor]] = {}

    def look(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if quantizer.weight:
            seen.setdefault(quantizer.site, (quantizer, x.detach()))

    args, kwargs = as_call(example)
    with eval_mode(model), in_mode(model, "quantize"), weights_may_change(model), tapped(model, look):
        model(*args, **kwargs)
    raised: list[str] = []
    for quantizer, weight in sorted(seen.values(), key=lambda pair: bool(pair[0].of)):
        if quantizer.of:  # a bias: the scale of its weight may have to increase
            quantizer.observe(weight)
            quantizer.update_grid()
        elif quantizer.learned:
            if quantizer.keep_guard(weight):
                raised.append(quantizer.site)
        else:
            observer = quantizer.new_observer()
            observer.observe(quantizer.layout.rows(weight.to(torch.float32)))
            quantizer.set_range(*observer.range(), weight.shape, weight.to(torch.float32))
    for quantizer in attachment_of(model).quantizers.values():
        quantizer.tracked.forget()
    for fold in attachment_of(model).folds.values():
        fold.bias = None  # computed with the previous scale
    return raised
