"""Choose a format for each weight within a budget of bits: an integer program over the costs of candidates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bitwright.backends.precisions import Choices, reject_choices_with_plan
from bitwright.core import display
from bitwright.core.arguments import strict
from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.formats import Format
from bitwright.core.formatting import counted
from bitwright.core.formatting import size as size_text
from bitwright.plan import Plan

_SCALE_BITS = 16  # compact files store scales as float16
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*")
_TRIES = 3
_SECONDS = 20.0  # time limit of the program; the best choice found until then is used


@dataclass(frozen=True, kw_only=True)
class FormatCost:
    """The cost of one format at one weight."""

    format: str
    bits: float
    """Stored bits per weight, with its share of the scales (16 bits each) and zero points."""
    penalty: float
    """The expected increase of the loss: half of Σ E[g²]·(ŵ − w)², with the gradients g of the loss."""


@strict
@dataclass(frozen=True, kw_only=True)
class WeightCosts(display.Summarized):
    """The costs of candidate formats for each weight, and the size of the other parameters.

    >>> high, low = (FormatCost(format=f"int{n}/tensor/sym", bits=n, penalty=4.0**-n) for n in (8, 4))
    >>> WeightCosts(sites={"head:weight": (high, low)}, elements={"head:weight": 100}, other_bytes=0, samples=32)
    <Costs of 1 weight on 32 samples>
    """

    sites: Mapping[str, tuple[FormatCost, ...]]
    elements: Mapping[str, int]
    """The number of weights at each site."""
    other_bytes: int
    """Bytes of the parameters that aren't quantized."""
    samples: int

    def __repr__(self) -> str:
        return f"<Costs of {counted(len(self.sites), 'weight')} on {counted(self.samples, 'sample')}>"

    def summary(self) -> Iterator[display.Table | str]:
        """The penalty of each candidate, for the most sensitive weights."""
        names = list(dict.fromkeys(one.format for costs in self.sites.values() for one in costs))
        worst = sorted(self.sites, key=lambda site: -max(one.penalty for one in self.sites[site]))
        rows = []
        for site in worst:
            known = {one.format: f"{one.penalty:.2g}" for one in self.sites[site]}
            rows.append([site, *(known.get(name) for name in names)])
        yield display.Table(["weight", *(f"#{name}" for name in names)], rows, title=repr(self)[1:-1], most=20)

    def to_dict(self) -> dict[str, Any]:
        """All costs as plain data."""
        return asdict(self)


def stored_bits(format: Format, shape: tuple[int, ...]) -> float:
    """Bits per weight of a weight of this shape, whose channels are its first axis.

    >>> stored_bits(Format.parse("int4/group32/sym"), (64, 64))
    4.5
    """
    elements = int(np.prod(shape))
    per_scale = {"tensor": elements, "channel": elements // shape[0]}.get(format.granularity, format.group)
    zero_point = 0 if format.symmetric else format.bits
    return format.bits + (_SCALE_BITS + zero_point) / per_scale


def parse_size(size: int | str) -> int:
    """A number of bytes from text.

    >>> parse_size("60MB"), parse_size("1.5 GiB")
    (60000000, 1610612736)
    """
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        problem = Problem(
            what="a size is a number with a unit", where="size", value=size, fix='"60MB", "1.5GB"', code="invalid-size"
        )
        raise PlanError([problem])
    return int(float(match[1]) * _UNITS[match[2].lower()])


def choose_formats(
    costs: WeightCosts, *, bits: float | None = None, size: int | str | None = None
) -> dict[str, FormatCost]:
    """The format of each weight with the smallest sum of penalties within the budget.

    `bits` is the mean per weight of all `sites`; `size` limits the bytes of all parameters together.

    >>> high, low = (FormatCost(format=f"int{n}/tensor/sym", bits=n, penalty=4.0**-n) for n in (8, 4))
    >>> costs = WeightCosts(sites={"a": (high, low)}, elements={"a": 100}, other_bytes=0, samples=1)
    >>> choose_formats(costs, bits=6)["a"].bits
    4
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # imported here because it takes most of a second

    pairs = [(site, cost) for site, own in costs.sites.items() for cost in own]
    stored = np.array([cost.bits * costs.elements[site] for site, cost in pairs])
    limit = _limit(costs, bits, size)
    least = sum(min(c.bits for c in own) * costs.elements[site] for site, own in costs.sites.items())
    if least > limit * (1 + 1e-12):
        raise PlanError([_too_small(costs, least, bits, size)])
    row = {site: index for index, site in enumerate(costs.sites)}
    one_each = np.zeros((len(row), len(pairs)))
    for column, (site, _) in enumerate(pairs):
        one_each[row[site], column] = 1
    penalties = np.array([cost.penalty for _, cost in pairs])
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(stored[None] / limit, -np.inf, 1.0)]
    scale, chosen = float(penalties.max()) or 1.0, None
    for _ in range(_TRIES):  # the solver's tolerances are absolute, so the goal is scaled by the penalty that was found
        # among equal penalties, prefer fewer bits
        goal = penalties / scale + 1e-9 * stored / stored.sum()
        found = milp(
            goal,
            constraints=constraints,
            integrality=np.ones(len(pairs)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-5, "time_limit": _SECONDS},
        )
        if found.x is None:
            break
        chosen = found.x > 0.5
        total = float(penalties[chosen].sum())
        if total > 0.1 * scale or total == 0:
            break
        scale = total
    if chosen is None:
        raise PlanError([_too_small(costs, least, bits, size)])
    return {site: cost for (site, cost), taken in zip(pairs, chosen, strict=True) if taken}


def _limit(costs: WeightCosts, bits: float | None, size: int | str | None) -> float:
    if (bits is None) == (size is None):
        problem = Problem(what="give either bits or a size", where="bits", value=bits, code="ambiguous-budget")
        raise PlanError([problem])
    if size is not None:
        return 8.0 * max(parse_size(size) - costs.other_bytes, 0) + 1e-9
    assert bits is not None
    return bits * sum(costs.elements.values())


def _too_small(costs: WeightCosts, least: float, bits: float | None, size: int | str | None) -> Problem:
    if bits is not None:
        needed = f"at least {least / sum(costs.elements.values()):.3g} bits per weight"
    else:
        needed = f"at least {size_text(int(least / 8) + costs.other_bytes)}"
        needed += f", of which {size_text(costs.other_bytes)} are parameters that stay in float"
    return Problem(
        what=f"the candidates need {needed}",
        where="bits" if bits is not None else "size",
        value=bits if bits is not None else size,
        fix="raise the budget, or give candidates with fewer bits",
        code="budget-too-small",
    )


def budget_choices(
    costs: WeightCosts | None, choices: Choices, *, bits: float | None, size: int | str | None, precision: str | None
) -> Choices:
    """The choices of a plan within a budget: weights as in the costs, and activations in float by default."""
    budget = bits is not None or size is not None
    if budget != (costs is not None):
        problem = Problem(
            what="a budget needs the costs of formats, and costs need a budget",
            where="costs" if budget else "bits",
            fix="make_plan(graph, backend, bits=4.5, costs=weight_costs(model, batches, backend))",
            code="incomplete-budget",
        )
        raise PlanError([problem])
    if costs is None:
        return choices
    own = {name: choices.get(name) for name in ("weights", "group", "head_bits")}
    reject_choices_with_plan({**own, "precision": precision})
    made: Choices = {**choices}
    made["weights"] = next((own[0].format for own in costs.sites.values()), None)
    made["activations"] = choices.get("activations") or "float"
    return made


def with_budget(plan: Plan, costs: WeightCosts, *, bits: float | None, size: int | str | None) -> Plan:
    """The plan with the formats that `choose_formats` chooses, and the scores as their reasons."""
    known = {site: spec for site, spec in plan.quantized if spec.share is None}
    strange = [
        Problem(
            what="the costs contain a weight that this plan doesn't quantize",
            where=site,
            fix=f"{did_you_mean(site, known)}; compute the costs with the same backend and keep_float",
            code="unknown-site",
        )
        for site in costs.sites
        if site not in known
    ]
    if strange:
        raise PlanError(strange)
    chosen = choose_formats(costs, bits=bits, size=size)
    budget = f"{bits:g} bits" if bits is not None else str(size)
    changes = {}
    for site, cost in chosen.items():
        others = [one for one in costs.sites[site] if one is not cost]
        compared = ", ".join(f"{one.penalty:.2g} as {one.format}" for one in others)
        why = f"budget of {budget}: score {cost.penalty:.2g}" + (f" ({compared})" if compared else "")
        changes[site] = replace(known[site], format=Format.parse(cost.format), why=why)
    return plan.with_sites(changes)
