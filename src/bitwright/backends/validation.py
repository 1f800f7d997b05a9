"""Validate choices for a plan, and a plan against what its backend can run."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from bitwright.backends.table import BackendTable
from bitwright.core.errors import FormatError, PlanError, Problem, did_you_mean
from bitwright.core.formats import Format
from bitwright.core.registry import OBSERVERS, QUANTIZERS
from bitwright.graph import Graph
from bitwright.plan import NO_FOLDING, STRATEGIES, Plan, known_strategies
from bitwright.plan.plan import is_pattern


class Choices(TypedDict, total=False):
    """Keywords of `make_plan`, `place` and `quantize`."""

    weights: str | None
    """Format of weights, e.g. "int4/group32/sym"."""
    activations: str | None
    """Format of activations, e.g. "uint8/tensor/asym"."""
    observer: str | None
    """How activation ranges are found."""
    weight_observer: str | None
    """How weight ranges are found."""
    quantizer: str | None
    """The arithmetic at activations, and at weights if nothing else is said; "plain" if not said."""
    weight_quantizer: str | None
    """The arithmetic at weights; if not said, what goes with `quantizer` (pact: dorefa)."""
    first_last_bits: int | None
    """Bits of the first and the last operator with a weight, and of what they read; by default the backend's."""
    keep_float: Iterable[str]
    """Patterns of operators that stay float."""
    fold: int | None
    """How batch norms are folded: -1 not at all, 0 to 4 by that strategy (docs/folding.md); 4 if not said."""
    saturating: bool | None
    """Whether the deploying machine's 8-bit products saturate; None asks this one."""


def patterns_of(choices: Choices) -> list[str]:
    """The patterns of `keep_float`; a single string is one pattern, not a list of letters."""
    given = choices.get("keep_float") or ()
    return [given] if isinstance(given, str) else list(given)


def refuse_beside_plan(choices: Mapping[str, Any]) -> None:
    """A plan has all choices in it: any that is given beside it would be ignored."""
    given = [name for name, value in choices.items() if value is not None and value != [] and value != ()]
    if given:
        raise PlanError(
            [
                Problem(
                    what="a plan already decides this, so this argument would be ignored",
                    where=name,
                    value=choices.get(name),
                    fix="change the plan, or leave out either `plan` or this argument",
                    code="ignored-argument",
                )
                for name in given
            ],
            title="arguments beside a plan",
        )


def mistakes(choices: Choices, table: BackendTable, graph: Graph) -> list[Problem]:
    """Once for each choice; a plan's own validation would say it for each site."""
    return [*_names(choices), *_formats(choices, table), *_patterns(choices, graph), *_folding(choices, table)]


def _names(choices: Choices) -> Iterator[Problem]:
    for where, name, registry in (
        ("observer", choices.get("observer"), OBSERVERS),
        ("weight_observer", choices.get("weight_observer"), OBSERVERS),
        ("quantizer", choices.get("quantizer"), QUANTIZERS),
        ("weight_quantizer", choices.get("weight_quantizer"), QUANTIZERS),
    ):
        if name is not None and name not in registry:
            fix = did_you_mean(name, registry.names())
            yield Problem(what=f"unknown {registry.kind}", where=where, value=name, fix=fix, code="unknown-name")


def _formats(choices: Choices, table: BackendTable) -> Iterator[Problem]:
    for role, text, choice in (
        ("weight", choices.get("weights"), table.weights),
        ("activation", choices.get("activations"), table.activations),
    ):
        try:
            format = Format.parse(text or choice.format)
        except FormatError as error:
            yield from error.problems
            continue
        if not choice.allows(format):
            what, fix = f"{table.name} can't run this {role} format", f"use one of: {', '.join(choice.formats)}"
            yield Problem(what=what, where="plan", value=str(format), fix=fix)


def _patterns(choices: Choices, graph: Graph) -> Iterator[Problem]:
    for pattern in choices.get("keep_float", ()):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in graph.by_name):
            what, fix = "the pattern of keep_float matches no operator", did_you_mean(pattern, graph.by_name)
            yield Problem(what=what, where="plan", value=pattern, fix=fix)


def _folding(choices: Choices, table: BackendTable) -> Iterator[Problem]:
    strategy = choices.get("fold")
    if strategy is None or strategy == NO_FOLDING:
        return
    if strategy not in STRATEGIES:
        yield Problem(what="unknown folding strategy", where="fold", value=strategy, fix=known_strategies(none=True))
    elif not table.fold:
        what = f"{table.name} runs batch norms as they are: none would be folded"
        yield Problem(what=what, where="fold", value=strategy, fix="leave fold out, or use another backend")


def fitting(plan: Plan, table: BackendTable, graph: Graph, *, name: str | None = None) -> Plan:
    """The plan, resolved for a model (`name`) that the backend shall run; raises with all problems of both kinds."""
    problems = plan.validate(graph)
    # patterns of a plan that can't be resolved have no sites that a format could be wrong for
    known = replace(plan, sites={key: spec for key, spec in plan.sites.items() if not is_pattern(key)})
    problems += check_plan(known if problems else plan.resolve(graph), table, graph)
    if problems:
        raise PlanError(problems, title=misfit(plan, name))
    return plan.resolve(graph)


def misfit(plan: Plan, name: str | None) -> str:
    """How a list of problems begins: a plan of another model is named as such."""
    if name is None or plan.model in (None, name):
        return "the plan has problems"
    return f"the plan has problems: it was made for {plan.model!r}, and this is {name!r}"


def check_plan(plan: Plan, table: BackendTable, graph: Graph | None = None) -> list[Problem]:
    """Every site whose format the target can't run; a graph tells which operands are weights."""
    roles = {} if graph is None else {op.site(port.name): port.role for op in graph.ops for port in op.ports}
    problems: list[Problem] = []
    for site, spec in plan.quantized:
        if spec.share is not None or spec.quantizer == "product":
            continue
        weight = site.endswith(":weight")
        choice = table.weights if weight else table.activations
        # an operand may be a weight (x @ w) or a constant that counts as data (positions): then either list will do
        unsure = roles.get(site, "weight") == "weight" and site.rpartition(":")[2].startswith("input")
        if not choice.allows(spec.format) and not (unsure and table.weights.allows(spec.format)):
            problems.append(
                Problem(
                    what=f"{table.name} can't run this format here",
                    where=site,
                    value=str(spec.format),
                    fix=f"use one of: {', '.join(choice.formats)}, float",
                )
            )
    return problems
