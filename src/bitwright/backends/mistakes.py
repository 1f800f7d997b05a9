"""What is wrong with the choices for a plan: names, formats, patterns, folding; all of it at once."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from bitwright.backends.choices import Choices
from bitwright.backends.table import BackendTable
from bitwright.errors import FormatError, Problem, did_you_mean
from bitwright.formats import Format
from bitwright.graph import Graph
from bitwright.plan import NO_FOLDING, STRATEGIES, known_strategies
from bitwright.registry import OBSERVERS, QUANTIZERS


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
    bn = choices.get("bn")
    if bn is None or bn == NO_FOLDING:
        return
    if bn not in STRATEGIES:
        yield Problem(what="unknown folding strategy", where="bn", value=bn, fix=known_strategies(none=True))
    elif not table.fold:
        what = f"{table.name} runs batch norms as they are: none would be folded"
        yield Problem(what=what, where="bn", value=bn, fix="leave bn out, or use another backend")
