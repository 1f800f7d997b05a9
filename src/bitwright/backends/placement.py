"""Where a backend wants its quantizers: from a graph and a table to a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from bitwright.arguments import strict
from bitwright.backends.choices import Choices, patterns_of
from bitwright.backends.coverage import unlisted
from bitwright.backends.decisions import Decisions
from bitwright.backends.mistakes import mistakes
from bitwright.backends.sites import Sites
from bitwright.backends.table import BackendTable, backend
from bitwright.errors import PlanError, Problem
from bitwright.formats import Format
from bitwright.graph import Graph
from bitwright.plan import DEFAULT_STRATEGY, Plan, SiteSpec
from bitwright.registry import QUANTIZERS


@strict
def place(graph: Graph, target: str | BackendTable, *, model: str | None = None, **choices: Unpack[Choices]) -> Plan:
    """A uniform plan: every operator that the backend has a rule for, in its default (or the chosen) formats."""
    table = backend(target)
    keep = patterns_of(choices)
    if problems := mistakes({**choices, "keep_float": keep}, table, graph):
        raise PlanError(problems)
    weight_format = Format.parse(choices.get("weights") or table.weights.format)
    activation_format = Format.parse(choices.get("activations") or table.activations.format)
    quantizer = choices.get("quantizer") or _natural(activation_format, table.activations.quantizer)
    usual = _partner(quantizer) if choices.get("quantizer") else table.weights.quantizer
    weight_quantizer = choices.get("weight_quantizer") or _natural(weight_format, usual)
    problems = [
        QUANTIZERS.get(name).refusal(format, where="plan")
        for name, format in ((quantizer, activation_format), (weight_quantizer, weight_format))
        if QUANTIZERS.get(name).symmetric_only and not format.symmetric
    ]
    if problems:
        raise PlanError(problems)
    guard = table.guard if table.guard and (table.guard.when == "always" or choices.get("saturating")) else None
    activation = SiteSpec(
        format=activation_format,
        observer=choices.get("observer") or table.activations.observer,
        quantizer=quantizer,
    )
    weight = SiteSpec(
        format=weight_format,
        observer=choices.get("weight_observer") or table.weights.observer,
        quantizer=weight_quantizer,
    )
    edges = choices.get("edges")
    if edges is not None:
        problems = [
            Problem(
                what=f"{table.name} can't run this {role} format at the first and last operator",
                where="edges",
                value=str(format.with_bits(edges)),
                fix=f"use one of: {', '.join(choice.formats)}",
            )
            for role, format, choice in (
                ("weight", weight_format, table.weights),
                ("activation", activation_format, table.activations),
            )
            if not choice.allows(format.with_bits(edges))
        ]
        if problems:
            raise PlanError(problems)
    bn = DEFAULT_STRATEGY if (asked := choices.get("bn")) is None else asked
    decisions = Decisions(graph, table, keep, bn)
    sites = Sites(decisions, activation, weight, guard)
    plan = sites.plan(table.edges if edges is None else edges, narrower=edges is not None)
    if missing := list(unlisted(graph, plan)):
        raise PlanError(missing, title="the plan doesn't account for all of the model")
    # a plan finds its table again by what the user called it: a registered name, or the path of a file
    return replace(plan, backend=target if isinstance(target, str) else table.name, model=model)


def _natural(format: Format, usual: str) -> str:
    """The quantizer that a format has if nothing is said."""
    if format.minifloat is not None:
        return "minifloat"
    return "plain" if usual == "minifloat" else usual


def _partner(quantizer: str) -> str:
    """The quantizer of weights that goes with one of activations: mostly the same."""
    found: str | None = QUANTIZERS.get(quantizer).weight_partner
    return found or quantizer
