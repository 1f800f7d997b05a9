"""`score(model, batches)`: quantize one site at a time and measure the effect on the outputs.

`suggest(…)`: which operators to keep in float, with the measured gain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import log10, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitwright.core import display, formatting
from bitwright.core.arguments import Count, strict
from bitwright.core.display import Progress
from bitwright.core.errors import CalibrationError, PlanError, Problem
from bitwright.core.tensor_tree import batch_size, eval_mode
from bitwright.plan import Plan, SiteSpec
from bitwright.quantizers import Quantizer, attachment_of, in_mode, tapped
from bitwright.quantizers.attachment import Attachment
from bitwright.workload import Loss, call


@dataclass(frozen=True, kw_only=True)
class SiteScore:
    """The effect of quantizing only this site."""

    site: str
    format: str
    #: SQNR of the values at the site, in dB; None for all sites together.
    sqnr_db: float | None
    #: The mean squared error at the site; None for all sites together.
    mse: float | None
    #: ‖y − ŷ‖/‖y‖ of the model's outputs.
    output_error: float
    #: 1 − cos(y, ŷ) of the model's outputs.
    cosine_distance: float
    #: The change of the loss, if there is one.
    loss_change: float | None

    @property
    def operator(self) -> str:
        """The operator of the site."""
        return self.site.rpartition(":")[0]

    @property
    def penalty(self) -> float:
        """The value by which sites are sorted: the change of the loss if there is one, otherwise the output error."""
        return self.output_error if self.loss_change is None else self.loss_change


@dataclass(frozen=True, kw_only=True)
class Scores(display.Summarized):
    """The scores of all sites, worst first."""

    sites: tuple[SiteScore, ...]
    #: The score with all sites quantized.
    together: SiteScore
    samples: int
    #: The share of calls that reused recorded results instead of being executed.
    shared: float
    #: Bytes of the recorded results of the largest batch.
    kept_bytes: int

    def __repr__(self) -> str:
        worst = f", most sensitive: {self.sites[0].site}" if self.sites else ""
        sites, samples = formatting.counted(len(self.sites), "site"), formatting.counted(self.samples, "sample")
        return f"<Scores of {sites} on {samples}{worst}>"

    def summary(self) -> Iterator[display.Table | str]:
        """The sites, worst first."""
        heads = ["site", "format", "#own SQNR", "#output error", "#1 − cosine", "#loss change"]
        samples = formatting.counted(self.samples, "sample")
        title = f"Sensitivity of {formatting.counted(len(self.sites), 'site')}, {samples}"
        yield display.Table(heads, [_cells(one) for one in self.sites], title=title, most=20)
        error = formatting.percent(self.together.output_error)
        change = self.together.loss_change
        yield f"all sites together: {error} output error{'' if change is None else f', loss {change:+.3g}'}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data."""
        return asdict(self)

    def plot(self, most: int = 20) -> display.Chart:
        """The error of the outputs when one site is quantized, for the worst sites."""
        worst = sorted(self.sites, key=lambda one: -one.output_error)[:most]
        bars = [(one.site, formatting.percent(one.output_error), one.output_error) for one in worst]
        return display.bar_chart(bars, label="Error of the outputs if one site is quantized")

    def operators(self) -> list[tuple[str, float]]:
        """Operators with the sum over their sites, worst first."""
        sums: dict[str, float] = {}
        for site in self.sites:
            sums[site.operator] = sums.get(site.operator, 0.0) + site.penalty
        return sorted(sums.items(), key=lambda item: -item[1])


def _cells(one: SiteScore) -> tuple[object, ...]:
    return (
        one.site,
        one.format,
        None if one.sqnr_db is None else formatting.decibels(one.sqnr_db),
        formatting.percent(one.output_error),
        f"{one.cosine_distance:.2g}",
        None if one.loss_change is None else f"{one.loss_change:+.3g}",
    )


_FIRST = -1  # position of inputs and parameters, which exist before the first call


class Recording(TorchFunctionMode):
    """The results of one run, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self.position = 0
        self.cut = 0
        self._made: dict[int, int] = {}  # storage → the call that allocated it
        self._rewritten: list[tuple[int, int]] = []  # (allocated, overwritten): results in between are stale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here, self.position = self.position, self.position + 1
        if here < self.cut:
            return self.results[here]
        result = func(*args, **(kwargs or {}))
        if self.cut == 0 and here == len(self.results):
            self._keep(here, func, args, kwargs or {}, result)
        return result

    def _keep(self, here: int, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self.results.append(result)
        for target in _written(func, args, kwargs):
            self._rewritten.append((self._made.get(_storage(target), _FIRST), here))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._made.setdefault(_storage(made), here)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the run in this context."""
        self.results, self._made, self._rewritten = [], {}, []
        self.position = self.cut = 0
        with self:
            yield

    @contextmanager
    def replaying(self, cut: int) -> Iterator[None]:
        """Reuse the recorded results of the calls before `cut`, and execute the later ones."""
        self.position, self.cut = 0, self.usable(cut)
        try:
            with self:
                yield
        finally:
            self.cut = 0

    def usable(self, cut: int) -> int:
        """The last call up to `cut` at which all recorded results are still valid.

        A tensor that is overwritten in place is recorded with its final values, so a run can't start between its
        allocation and the write.
        """
        while True:
            earlier = min((made for made, over in self._rewritten if made < cut <= over), default=cut)
            if earlier == cut:
                return cut
            cut = max(earlier, 0)

    @property
    def bytes(self) -> int:
        """The memory of the recorded results; each storage counts once."""
        tensors = [x for x in tree_leaves(self.results) if isinstance(x, Tensor)]
        return sum({_storage(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes into."""
    name = getattr(func, "__name__", "")
    special = name.startswith("__") and name.endswith("__")
    in_place = (name.startswith("__i") and special and name not in ("__invert__", "__index__", "__int__")) or (
        name.endswith("_") and not special
    )
    targets = [args[0]] if args and (in_place or name == "__setitem__" or kwargs.get("inplace") is True) else []
    targets += tree_leaves(kwargs.get("out"))
    return [target for target in targets if isinstance(target, Tensor)]


@strict
@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score every site of a prepared and calibrated model, except biases (32 bits).

    With a `loss`, batches are (inputs, target). The float run of each batch is recorded, and the run of a site starts
    from the recorded results at that site. This needs memory for all float activations of one batch, so smaller
    batches need less. `progress` receives the number of finished batches.

    >>> import torch, bitwright
    >>> x = torch.randn(16, 8)
    >>> quantized = bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x])
    >>> scores = bitwright.score(quantized.model, [x])
    >>> sorted(one.site for one in scores.sites)
    ['0:input', '0:weight']
    """
    run = _Scoring(model, loss)
    with eval_mode(model), in_mode(model, "quantize"):
        for done, batch in enumerate(batches, 1):
            run.add(*(batch if loss is not None else (batch, None)))
            if progress is not None:
                progress(done, None, "scoring")
    return run.result()


class _ErrorSums:
    """Sums of squares and products of expected and actual values, over all batches."""

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
    """The effect on outputs and loss, over all batches."""

    def __init__(self) -> None:
        self.outputs, self.loss = _ErrorSums(), 0.0

    def add(self, wanted: list[Tensor], got: list[Tensor], loss: float) -> None:
        for one, other in zip(wanted, got, strict=True):
            self.outputs.add(one, other)
        self.loss += loss


class _SiteEffect(_Effect):
    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.own = _ErrorSums()
        self.cut: int | None = None  # the position at which this batch first reaches the site

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
        self.sites = {site: _SiteEffect(q) for site, q in self.quantizers.items() if not q.of}
        unready = [
            Problem(what="this site has no range", where=site, fix="calibrate(model, batches) first", code="no-range")
            for site, one in self.sites.items()
            if not one.quantizer.ready
        ]
        if unready:
            raise PlanError(unready, title="the model must be calibrated before scoring")
        self.float, self.together = _Effect(), _Effect()
        self.samples = self.calls = self.saved = self.kept_bytes = 0

    def add(self, inputs: Any, target: Any) -> None:
        """Run one batch in float, fully quantized, and with each site quantized."""
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
            # a tap prevents quantizers from fusing operations, so the calls match the recording
            with tapped(self.model, _ignore), self.recording.replaying(one.cut):
                one.add(wanted, *self._run(inputs, target, count))
            self.calls += len(self.recording.results)
            self.saved += self.recording.usable(one.cut)
        for quantizer in self.quantizers.values():
            quantizer.enabled = True

    def _run(self, inputs: Any, target: Any, count: int) -> tuple[list[Tensor], float]:
        """The outputs, and the loss summed over samples."""
        output = call(self.model, inputs)
        with torch._C.DisableTorchFunction():  # don't record the loss
            loss = 0.0 if self.loss is None else float(self.loss(output, target)) * count
        numbers = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        return numbers, loss

    def _quantize_only(self, site: str | None) -> None:
        for name, quantizer in self.quantizers.items():
            quantizer.enabled = name == site

    def _look(self, site: str, quantizer: Quantizer, x: Tensor) -> None:
        one = self.sites.get(quantizer.site)
        if one is not None:
            with torch._C.DisableTorchFunction():  # don't record these computations
                one.look(x, self.recording.position)

    def result(self) -> Scores:
        """The scores, worst first."""
        if not self.samples:
            raise CalibrationError(
                "no batch to compute scores with", fix="pass a loader with at least one batch", code="no-batches"
            )
        scores = [self._score(site, str(one.quantizer.format), one, one.own) for site, one in self.sites.items()]
        return Scores(
            sites=tuple(sorted(scores, key=lambda one: -one.penalty)),
            together=self._score("all sites", "as planned", self.together, None),
            samples=self.samples,
            shared=self.saved / self.calls if self.calls else 0.0,
            kept_bytes=self.kept_bytes,
        )

    def _score(self, site: str, format: str, effect: _Effect, own: _ErrorSums | None) -> SiteScore:
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


@torch.no_grad()
def errors_without(
    model: nn.Module, batches: Sequence[Any], variants: Mapping[str, Collection[str]]
) -> dict[str, float]:
    """‖y − ŷ‖/‖y‖ of a prepared model's outputs, for each variant, which is a set of disabled sites."""
    quantizers = attachment_of(model).quantizers
    with eval_mode(model):
        with in_mode(model, "float"):
            wanted = [_outputs(model, batch) for batch in batches]
        with in_mode(model, "quantize"):
            try:
                errors = {}
                for name, off in variants.items():
                    for site, quantizer in quantizers.items():
                        # a bias uses the scales of its input and weight, so it is disabled with either
                        quantizer.enabled = site not in off and not any(source in off for source in quantizer.of)
                    errors[name] = _error(wanted, [_outputs(model, batch) for batch in batches])
                return errors
            finally:
                for quantizer in quantizers.values():
                    quantizer.enabled = True


def _error(wanted: list[list[Tensor]], got: list[list[Tensor]]) -> float:
    error = signal = 0.0
    for reference, outputs in zip(wanted, got, strict=True):
        for one, other in zip(reference, outputs, strict=True):
            error += float((one.double() - other.double()).square().sum())
            signal += float(one.double().square().sum())
    return sqrt(error / signal) if signal else 0.0


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    return [x for x in tree_leaves(call(model, batch)) if isinstance(x, Tensor) and x.is_floating_point()]


ENOUGH = 0.8
"""Share of the largest possible gain at which adding more float operators stops, because each costs speed."""


@dataclass(frozen=True, kw_only=True)
class FloatTrial:
    """The measured metric of the plan with some operators in float."""

    operators: tuple[str, ...]
    metric: float


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The changed plan, and the measurements that led to it."""

    plan: Plan
    operators: tuple[str, ...]
    before: float
    after: float
    trials: tuple[FloatTrial, ...]

    @property
    def gain(self) -> float:
        """The change of the metric."""
        return self.after - self.before


@strict
def suggest(
    model: nn.Module,
    plan: Plan,
    scores: Scores,
    evaluate: Callable[[nn.Module], float],
    *,
    most: Count = 5,
    lower_is_better: bool = False,
    progress: Progress | None = None,
) -> Suggestion:
    """Evaluate the model with the worst 1, 2, … `most` operators in float, and choose the fewest with enough gain.

    `model` is the prepared model that was scored. Calibration uses float arithmetic, so the ranges of all other sites
    don't change: disabling quantizers is equivalent to preparing the changed plan.

    >>> import torch, bitwright
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> x = torch.randn(64, 8)
    >>> wanted = model(x).detach()
    >>> quantized = bitwright.quantize(model, [x], backend="academic", weights="int2/channel/sym")
    >>> scores = bitwright.score(quantized.model, [x])
    >>> def error(model):
    ...     with torch.no_grad():
    ...         return float((model(x) - wanted).square().mean())
    >>> found = bitwright.suggest(quantized.model, quantized.plan, scores, error, lower_is_better=True)
    >>> found.after < found.before and set(found.operators) <= set(found.plan.float)
    True
    """
    attachment = attachment_of(model)
    worst = [name for name, penalty in scores.operators() if penalty > 0][:most]
    with in_mode(model, "quantize"):
        before = evaluate(model)
        trials: list[FloatTrial] = []
        for count in range(1, len(worst) + 1):
            for site in float_sites(attachment, worst[:count]):
                if site in attachment.quantizers:
                    attachment.quantizers[site].enabled = False
            trials.append(FloatTrial(operators=tuple(worst[:count]), metric=evaluate(model)))
            if progress is not None:
                progress(count, len(worst), "evaluating with operators in float")
    chosen = _enough(before, trials, -1.0 if lower_is_better else 1.0)
    operators = chosen.operators if chosen else ()
    after = chosen.metric if chosen else before
    why = f"score: the worst {len(operators)} in float, {after - before:+.4g}"
    changed = replace(
        plan.with_sites({site: SiteSpec(why=why) for site in float_sites(attachment, operators)}),
        float={**plan.float, **dict.fromkeys(operators, why)},
    )
    return Suggestion(
        plan=changed if operators else plan, operators=operators, before=before, after=after, trials=tuple(trials)
    )


def _enough(before: float, trials: Sequence[FloatTrial], sign: float) -> FloatTrial | None:
    """The fewest operators with most of the possible gain; None if there is no gain."""
    gains = [sign * (trial.metric - before) for trial in trials]
    most = max(gains, default=0.0)
    return next((t for t, gain in zip(trials, gains, strict=True) if most > 0 and gain >= ENOUGH * most), None)


def float_sites(attachment: Attachment, operators: Iterable[str]) -> list[str]:
    """The sites that become float with these operators: their own sites, except quantizers shared with others.

    Biases that use the scale of such a site become float too.
    """
    chosen = set(operators)
    borrowed = {owner for site, owner in attachment.shared.items() if _operator(site) not in chosen}
    sites = [site for site in attachment.plan.sites if _operator(site) in chosen and site not in borrowed]
    kept = attachment.plan.sites
    gone = {site for site in sites if kept[site].quantizes}
    gone |= {site for site, q in attachment.quantizers.items() if gone & set(q.of)}
    return [site for site in kept if site in gone]


def _operator(site: str) -> str:
    return site.rpartition(":")[0]
