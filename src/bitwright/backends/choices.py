"""The choices for a plan, and their validation against a backend."""

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
from bitwright.plan import NO_FOLDING, STRATEGIES, known_strategies


class Choices(TypedDict, total=False):
    """Keyword arguments of `make_plan`, `place` and `quantize`."""

    weights: str | None
    """Format of weights, e.g. "int4/group32" (groups with the best grid that the target can store)."""
    activations: str | None
    """Format of activations, e.g. "uint8/tensor/asym"."""
    group: int | None
    """Values along the reduction axis that share one scale of a weight, instead of the granularity of `weights`."""
    head_bits: int | None
    """Bits of the weights of the head, which predicts tokens. Default: 8 if a named precision has fewer."""
    observer: str | None
    """Observer of activation ranges."""
    weight_observer: str | None
    """Observer of weight ranges."""
    quantizer: str | None
    """Quantizer of activations, and of weights unless `weight_quantizer` is given. Default: "plain"."""
    weight_quantizer: str | None
    """Quantizer of weights. Default: the one that belongs to `quantizer` (pact: dorefa)."""
    first_last_bits: int | None
    """Bits of the first and last operator with a weight, and of their inputs. Default: the backend's value."""
    keep_float: Iterable[str]
    """Patterns of operators that stay in float."""
    fold: int | None
    """Batch-norm folding: -1 for none, 0 to 4 for a strategy (docs/folding.md). Default: 4."""
    saturating: bool | None
    """Whether 8-bit products saturate on the deployment machine. None: test this machine."""


def patterns_of(choices: Choices) -> list[str]:
    """The patterns of `keep_float`. A string is one pattern."""
    given = choices.get("keep_float") or ()
    return [given] if isinstance(given, str) else list(given)


def reject_choices_with_plan(choices: Mapping[str, Any]) -> None:
    """Reject choices that are given together with a plan, because they would have no effect."""
    given = [name for name, value in choices.items() if value is not None and value != [] and value != ()]
    if given:
        raise PlanError(
            [
                Problem(
                    what="the plan already defines this, so the argument would have no effect",
                    where=name,
                    value=choices.get(name),
                    fix="change the plan, or remove either `plan` or this argument",
                    code="ignored-argument",
                )
                for name in given
            ],
            title="arguments that conflict with a plan",
        )


def weight_format(choices: Choices, table: BackendTable) -> Format:
    """The format of weights."""
    format, group = table.weights.parse(choices.get("weights") or table.weights.format), choices.get("group")
    if group is not None and group < 1:
        what, fix = "a group must have at least one value", "use group=32"
        raise PlanError([Problem(what=what, where="group", value=group, fix=fix, code="invalid-value")])
    if group is None:
        return format
    if format.minifloat is None and format.symmetric and not format.is_float:
        return table.weights.parse(f"{format.name}/group{group}")  # with every code where the target can store it
    return replace(format, granularity="group", group=group)


def choice_problems(choices: Choices, table: BackendTable, graph: Graph) -> list[Problem]:
    """Problems of the choices, each reported once rather than for each site."""
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
            format = weight_format(choices, table) if role == "weight" else choice.parse(text or choice.format)
            heads = choices.get("head_bits")
            head = format.with_bits(heads) if heads is not None and role == "weight" else format
        except FormatError as error:
            yield from error.problems
            continue
        if not choice.allows(format):
            what, fix = f"{table.name} can't run this {role} format", f"use one of: {', '.join(choice.formats)}"
            yield Problem(what=what, where="plan", value=str(format), fix=fix, code="unsupported-format")
        elif not choice.allows(head):
            what, fix = f"{table.name} can't run this format of the head", f"use one of: {', '.join(choice.formats)}"
            yield Problem(what=what, where="head_bits", value=str(head), fix=fix, code="unsupported-format")


def _patterns(choices: Choices, graph: Graph) -> Iterator[Problem]:
    for pattern in choices.get("keep_float", ()):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in graph.by_name):
            what, fix = "this keep_float pattern matches no operator", did_you_mean(pattern, graph.by_name)
            yield Problem(what=what, where="plan", value=pattern, fix=fix, code="unknown-operator")


def _folding(choices: Choices, table: BackendTable) -> Iterator[Problem]:
    strategy = choices.get("fold")
    if strategy is None or strategy == NO_FOLDING:
        return
    if strategy not in STRATEGIES:
        yield Problem(
            what="unknown folding strategy",
            where="fold",
            value=strategy,
            fix=known_strategies(none=True),
            code="unknown-folding-strategy",
        )
    elif not table.fold:
        yield Problem(
            what=f"{table.name} runs batch norms as separate operators, so they can't be folded",
            where="fold",
            value=strategy,
            fix="remove fold, or use another backend",
            code="fold-not-supported",
        )
