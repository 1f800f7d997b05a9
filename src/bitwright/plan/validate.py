"""All problems of a plan at once, before any long work starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bitwright.errors import BitwrightError, Problem, UnknownName, did_you_mean
from bitwright.graph import Graph, Op
from bitwright.graph.functions import reduction_axis
from bitwright.graph.naming import SiteName
from bitwright.plan.plan import Plan, SiteSpec, is_pattern, matching
from bitwright.registry import BACKENDS, OBSERVERS, QUANTIZERS, Registry

GUARDS = ("int16-pairs",)


def validate(plan: Plan, graph: Graph | None = None) -> list[Problem]:
    """Problems of names and options; with a graph also of sites, patterns and shapes."""
    problems: list[Problem] = []
    # a path is a table of the user's own, read (and checked) where it is used
    if plan.backend is not None and not plan.backend.endswith((".yaml", ".yml")):
        problems += _unknown(BACKENDS, plan.backend, "backend")
    problems += _sites(plan.sites, plan.sites, graph, "")
    for kind, device in plan.devices.items():
        problems += _sites(device.sites, {**plan.sites, **device.sites}, graph, f"devices.{kind} ")
    if graph is not None:
        problems += _folds(plan, graph)
        for name in plan.float:
            if name not in graph.by_name:
                problems.append(_no_operator("float", name, graph))
    return problems


def _unknown(registry: Registry, name: str, where: str) -> Iterator[Problem]:
    if name not in registry:
        yield Problem(
            what=f"unknown {registry.kind}", where=where, value=name, fix=did_you_mean(name, registry.names())
        )


def _sites(
    sites: Mapping[str, SiteSpec], known: Mapping[str, SiteSpec], graph: Graph | None, prefix: str
) -> Iterator[Problem]:
    names = [name for name, _, _ in graph.sites()] if graph is not None else []
    for key, spec in sites.items():
        where = prefix + key
        yield from _unknown(OBSERVERS, spec.observer, where)
        yield from _unknown(QUANTIZERS, spec.quantizer, where)
        yield from _options(spec, where)
        if spec.guard is not None and spec.guard not in GUARDS:
            yield Problem(
                what="unknown guard", where=where, value=spec.guard, fix=did_you_mean(spec.guard, GUARDS)
            )
        if spec.format.is_float and not spec.format.is_plain_float:
            yield Problem(
                what="this number format can't be simulated by this version",
                where=where,
                value=str(spec.format),
                fix="use an integer format or float",
            )
        if spec.share is not None and (spec.share not in known or known[spec.share].share is not None):
            yield Problem(
                what="shares the quantizer of a site that has none of its own",
                where=where,
                value=spec.share,
                fix=did_you_mean(
                    spec.share, [n for n, s in known.items() if s.share is None and s.quantizes]
                ),
            )
        if not is_pattern(key):
            try:
                SiteName.parse(key)
            except BitwrightError as error:
                yield Problem(what=error.problems[0].what, where=where, value=key, fix=error.problems[0].fix)
                continue
        if graph is None:
            continue
        found = matching(key, names)
        if not found:
            what = "the pattern matches no site" if is_pattern(key) else "the model has no such site"
            yield Problem(what=what, where=where, value=key, fix=did_you_mean(key, names))
        for name in found:
            yield from _fits(name, spec, graph, prefix)


def _options(spec: SiteSpec, where: str) -> Iterator[Problem]:
    if spec.observer in OBSERVERS and spec.observer_options:
        try:
            OBSERVERS.get(spec.observer)(format=spec.format, **spec.observer_options)
        except (TypeError, BitwrightError) as error:
            yield Problem(
                what=f"wrong options of the observer {spec.observer}: {error}",
                where=where,
                value=dict(spec.observer_options),
            )


def _fits(name: str, spec: SiteSpec, graph: Graph, prefix: str) -> Iterator[Problem]:
    op, port_name = _split(name, graph)
    owner = graph.weight_owner.get(name, name)
    if owner != name and not is_pattern(name) and spec.share is None and spec.quantizes:
        yield Problem(
            what="this weight is tied: it has one quantizer, at its first use",
            where=prefix + name,
            value=str(spec.format),
            fix=f"put the format at {owner!r} (and `share: {owner}` here)",
        )
    if spec.format.granularity != "group":
        return
    port = op.port(port_name)
    shape = port.shape if port is not None else op.outputs[0].shape
    length = shape[reduction_axis(op.kind, port_name)] if shape else 1
    if length % spec.format.group:
        divisors = [d for d in (16, 32, 64, 128, 256) if length % d == 0]
        yield Problem(
            what=f"groups of {spec.format.group} don't divide {length} elements",
            where=prefix + name,
            value=str(spec.format),
            fix=f"use group{divisors[-1]}" if divisors else "use channel",
        )


def _split(site: str, graph: Graph) -> tuple[Op, str]:
    name, _, port = site.rpartition(":")
    return graph.by_name[name], port


def _no_operator(where: str, name: str, graph: Graph) -> Problem:
    return Problem(
        what="the model has no such operator",
        where=where,
        value=name,
        fix=did_you_mean(name, graph.by_name),
    )


def _folds(plan: Plan, graph: Graph) -> Iterator[Problem]:
    for norm, before in plan.fold.items():
        missing = [name for name in (norm, before) if name not in graph.by_name]
        if missing:
            for name in missing:
                yield _no_operator("fold", name, graph)
            continue
        op = graph.by_name[norm]
        port = op.port("input")
        if op.kind != "batch_norm" or port is None or [s.name for s in port.sources] != [before]:
            yield Problem(
                what="only a batch norm that reads that operator's output can be folded into it",
                where="fold",
                value=f"{norm}: {before}",
                fix="remove this line",
            )


__all__ = ["GUARDS", "UnknownName", "validate"]
