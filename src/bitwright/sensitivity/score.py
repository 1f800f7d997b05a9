"""`score(model, batches)`: quantize one site at a time and look at what becomes of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import log10, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwright.arguments import strict
from bitwright.attach import Quantizer, attachment_of, in_mode, tapped
from bitwright.errors import CalibrationError, PlanError, Problem
from bitwright.graph.tree import batch_size
from bitwright.modes import evaluating
from bitwright.sensitivity.replay import Recording
from bitwright.sensitivity.scores import Scores, SiteScore
from bitwright.workload import call

Loss = Callable[[Any, Any], Tensor]


@strict
@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Score every site of a prepared and calibrated model, biases (32 bits) aside.

    With a `loss`, batches are (inputs, target). The float run of a batch is recorded; the run of a site starts from
    the recorded numbers where that site comes. Memory: the activations of one batch in float, so smaller batches need
    less. `progress` gets the number of batches that are done.
    """
    run = _Scoring(model, loss)
    with evaluating(model), in_mode(model, "quantize"):
        for done, batch in enumerate(batches, 1):
            run.add(*(batch if loss is not None else (batch, None)))
            if progress is not None:
                progress(done)
    return run.result()


class _Sums:
    """Squares and products of what should be and what is, over all batches."""

    def __init__(self) -> None:
        self.signal = self.error = self.got = self.product = 0.0
        self.count = 0

    def add(self, wanted: Tensor, got: Tensor) -> None:
        wanted, got = wanted.double(), got.double()
        self.count += wanted.numel()
        self.signal += float(wanted.square().sum())
        self.got += float(got.square().sum())
        self.error += float((got - wanted).square().sum())
        self.product += float((got * wanted).sum())

    @property
    def relative(self) -> float:
        return sqrt(self.error / self.signal) if self.signal else 0.0

    @property
    def decibels(self) -> float:
        return -20 * log10(self.relative) if self.relative else float("inf")

    @property
    def cosine_distance(self) -> float:
        size = sqrt(self.signal * self.got)
        return max(0.0, 1.0 - self.product / size) if size else 0.0


class _Effect:
    """What becomes of the outputs, and of the loss, over all batches."""

    def __init__(self) -> None:
        self.outputs, self.loss = _Sums(), 0.0

    def add(self, wanted: list[Tensor], got: list[Tensor], loss: float) -> None:
        for one, other in zip(wanted, got, strict=True):
            self.outputs.add(one, other)
        self.loss += loss


class _Site(_Effect):
    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.own = _Sums()
        self.cut: int | None = None  # the call before which this batch comes to it first

    def look(self, x: Tensor, position: int) -> None:
        if self.cut is not None:
            return
        self.cut = position
        if not self.quantizer.weight or not self.own.signal:  # a weight is the same in every batch
            wide = x.to(torch.float32)
            self.own.add(self.quantizer.transform(wide), self.quantizer.quantize(wide))


class _Scoring:
    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self.model, self.loss, self.recording = model, loss, Recording()
        self.quantizers = attachment_of(model).quantizers
        self.sites = {site: _Site(q) for site, q in self.quantizers.items() if not q.of}
        unready = [
            Problem(what="this site has no range", where=site, fix="calibrate(model, batches) first")
            for site, one in self.sites.items()
            if not one.quantizer.ready
        ]
        if unready:
            raise PlanError(unready, title="what isn't calibrated can't be scored")
        self.float, self.together = _Effect(), _Effect()
        self.samples = self.calls = self.saved = self.kept_bytes = 0

    def add(self, inputs: Any, target: Any) -> None:
        """One batch: float, all quantized, and each site."""
        count = batch_size(inputs)
        self.samples += count
        all_quantized = self._run(inputs, target, count)
        self._quantize_only(None)
        for one in self.sites.values():
            one.cut = None
        with tapped(self.model, self._look), self.recording.recorded():
            wanted, float_loss = self._run(inputs, target, count)
        self.float.add(wanted, wanted, float_loss)
        self.together.add(wanted, *all_quantized)
        self.kept_bytes = max(self.kept_bytes, self.recording.bytes)
        for site, one in self.sites.items():
            if one.cut is None:  # this batch took another path
                one.add(wanted, wanted, float_loss)
                continue
            self._quantize_only(site)
            # a tap keeps quantizers from doing several things in one pass: the same calls as in the recording
            with tapped(self.model, _ignore), self.recording.replaying(one.cut):
                one.add(wanted, *self._run(inputs, target, count))
            self.calls += len(self.recording.results)
            self.saved += self.recording.usable(one.cut)
        for quantizer in self.quantizers.values():
            quantizer.enabled = True

    def _run(self, inputs: Any, target: Any, count: int) -> tuple[list[Tensor], float]:
        """The outputs, and the loss of all samples."""
        output = call(self.model, inputs)
        with torch._C.DisableTorchFunction():  # the loss is no part of the run
            loss = 0.0 if self.loss is None else float(self.loss(output, target)) * count
        numbers = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        return numbers, loss

    def _quantize_only(self, site: str | None) -> None:
        for name, quantizer in self.quantizers.items():
            quantizer.enabled = name == site

    def _look(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        one = self.sites.get(quantizer.site)
        if one is not None:
            with torch._C.DisableTorchFunction():  # nor is what is computed here
                one.look(x, self.recording.position)

    def result(self) -> Scores:
        """The sites, worst first."""
        if not self.samples:
            raise CalibrationError("there was no batch to score with", fix="give a loader with at least one batch")
        scores = [self._score(site, str(one.quantizer.format), one, one.own) for site, one in self.sites.items()]
        return Scores(
            sites=tuple(sorted(scores, key=lambda one: -one.suffering)),
            together=self._score("all sites", "as planned", self.together, None),
            samples=self.samples,
            shared=self.saved / self.calls if self.calls else 0.0,
            kept_bytes=self.kept_bytes,
        )

    def _score(self, site: str, format: str, effect: _Effect, own: _Sums | None) -> SiteScore:
        return SiteScore(
            site=site,
            format=format,
            sqnr_db=None if own is None else own.decibels,
            mse=None if own is None else own.error / max(own.count, 1),
            output_error=effect.outputs.relative,
            cosine_distance=effect.outputs.cosine_distance,
            loss_change=None if self.loss is None else (effect.loss - self.float.loss) / self.samples,
        )


def _ignore(site: str, quantizer: Quantizer, x: Tensor) -> None:
    pass
