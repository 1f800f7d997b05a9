"""`suggest(…)`: which operators to keep in float, with the measured gain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwright.core.arguments import Count, strict
from bitwright.core.display import Progress
from bitwright.core.tensor_tree import eval_mode
from bitwright.plan import Plan, SiteSpec
from bitwright.quantizers import attachment_of, in_mode
from bitwright.quantizers.attachment import Attachment
from bitwright.sensitivity.score import Scores
from bitwright.workload import call


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
