"""Find all problems of a plan before any long computation."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bitwright.core.errors import BitwrightError, Problem, did_you_mean
from bitwright.core.registry import BACKENDS, KERNELS, OBSERVERS, QUANTIZERS, Registry
from bitwright.graph import Graph, Op
from bitwright.graph.graph import SiteName
from bitwright.graph.operators import channel_axis, reduction_axis
from bitwright.plan.plan import Lookup, Plan, SiteSpec, is_pattern, matching, site_names, weight_owners
from bitwright.plan.schema import FLOAT, GRADIENTS, SCALES, STRATEGIES, WITHOUT_BATCH, ComputeSpec, known_strategies

GUARDS = ("int16-pairs",)


def validate(plan: Plan, graph: Graph | None = None) -> list[Problem]:
    """Problems of names and options; with a graph, also of sites, patterns and shapes."""
    problems: list[Problem] = []
    # a path refers to the user's table, which is checked when it is loaded
    if plan.backend is not None and not plan.backend.endswith((".yaml", ".yml")):
        problems += _unknown(BACKENDS, plan.backend, "backend")
    layers: list[tuple[str, list[Mapping[str, SiteSpec]]]] = [("", [plan.sites])]
    layers += [(f"devices.{kind} ", [d.sites, plan.sites]) for kind, d in plan.devices.items()]
    for prefix, sites in layers:
        for key, spec in sites[0].items():
            problems += _entry(prefix + key, key, spec)
            problems += _share(prefix + key, spec, sites)
        if graph is not None:
            problems += _against(graph, sites, site_names(graph, plan.folds), prefix)
    problems += _compute(plan.compute, plan.sites, graph, "")
    for kind, device in plan.devices.items():
        problems += _compute(device.compute, {**plan.sites, **device.sites}, graph, f"devices.{kind} ")
    problems += _strategies(plan)
    if graph is not None:
        problems += _folds(plan, graph)
        parameters = {name for parameter in graph.parameters for name in parameter.names}
        for name in plan.float:
            if name not in graph.by_name and name not in parameters:
                problems.append(_no_operator("float", name, graph))
    return problems


def _unknown(registry: Registry, name: str, where: str) -> Iterator[Problem]:
    if name not in registry:
        yield Problem(
            what=f"unknown {registry.kind}",
            where=where,
            value=name,
            fix=did_you_mean(name, registry.names()),
            code="unknown-name",
        )


def _entry(where: str, key: str, spec: SiteSpec) -> Iterator[Problem]:
    """Problems that don't depend on other entries or the model."""
    yield from _unknown(OBSERVERS, spec.observer, where)
    yield from _unknown(QUANTIZERS, spec.quantizer, where)
    yield from _options(spec, where)
    if spec.guard is not None and spec.guard not in GUARDS:
        yield Problem(
            what="unknown guard",
            where=where,
            value=spec.guard,
            fix=did_you_mean(spec.guard, GUARDS),
            code="unknown-guard",
        )
    if spec.format.is_float and not spec.format.is_plain_float:
        yield Problem(
            what="this version can't simulate this number format",
            where=where,
            value=str(spec.format),
            fix="use an integer format, a small float format (fp8e4m3, mxfp4e2m1, …) or float",
            code="unsupported-format",
        )
    elif spec.quantizes and spec.share is None and spec.quantizer in QUANTIZERS:
        known = QUANTIZERS.get(spec.quantizer)
        if not known.supports(spec.format):
            yield known.mismatch(spec.format, where=where)
    if not is_pattern(key) and (wrong := _not_a_site(key)) is not None:
        yield Problem(what=wrong.what, where=where, value=key, fix=wrong.fix, code=wrong.code)


def _not_a_site(key: str) -> Problem | None:
    try:
        SiteName.parse(key)
    except BitwrightError as error:
        return error.problems[0]
    return None


def _share(where: str, spec: SiteSpec, layers: list[Mapping[str, SiteSpec]]) -> Iterator[Problem]:
    if spec.share is None:
        return
    shared = Lookup(*layers)(spec.share)
    if shared is None or shared.share is not None:
        owners = [n for sites in layers for n, s in sites.items() if s.share is None and s.quantizes]
        yield Problem(
            what="shares the quantizer of a site that has no quantizer",
            where=where,
            value=spec.share,
            fix=did_you_mean(spec.share, owners),
            code="unknown-site",
        )


def _against(graph: Graph, layers: list[Mapping[str, SiteSpec]], names: list[str], prefix: str) -> Iterator[Problem]:
    """Problems of the first layer's entries that depend on the model."""
    own, known = Lookup(layers[0]), Lookup(*layers)
    owners = weight_owners(known, graph)
    for key, spec in layers[0].items():
        where = prefix + key
        found = matching(key, names)
        if not found and (is_pattern(key) or _not_a_site(key) is None):
            what = "the pattern matches no site" if is_pattern(key) else "the model has no such site"
            yield Problem(what=what, where=where, value=key, fix=did_you_mean(key, names), code="unknown-site")
        for name in found:
            if own(name) is not spec:  # overridden by another entry
                continue
            yield from _fits(name, spec, graph, prefix)
            owner = owners.get(name, name)
            if owner != name and not is_pattern(key):
                yield Problem(
                    what="this weight is tied and has one quantizer, at its first quantized use",
                    where=where,
                    value=str(spec.format),
                    fix=f"set the format at {owner!r} (and `share: {owner}` here)",
                    code="tied-weight",
                )


def _options(spec: SiteSpec, where: str) -> Iterator[Problem]:
    if spec.observer in OBSERVERS and spec.observer_options:
        try:
            OBSERVERS.get(spec.observer)(format=spec.format, **spec.observer_options)
        except (TypeError, BitwrightError) as error:
            yield Problem(
                what=f"invalid options of the observer {spec.observer}: {error}",
                where=where,
                value=dict(spec.observer_options),
                fix="remove the option or correct its value",
                code="invalid-options",
            )
    if spec.quantizer in QUANTIZERS and spec.quantizer_options:
        try:
            inspect.signature(QUANTIZERS.get(spec.quantizer)).bind_partial(**spec.quantizer_options)
        except TypeError as error:
            yield Problem(
                what=f"invalid options of the quantizer {spec.quantizer}: {error}",
                where=where,
                value=dict(spec.quantizer_options),
                fix="remove the option",
                code="invalid-options",
            )


def _fits(name: str, spec: SiteSpec, graph: Graph, prefix: str) -> Iterator[Problem]:
    """Whether the tensor at this site can be divided into channels or groups."""
    grain = spec.format.granularity
    op, port_name = _split(name, graph)
    port = op.port(port_name) if port_name != "output" else op.outputs[0]
    if spec.format.dynamic and port_name in ("weight", "bias"):
        yield Problem(
            what="weights have stored scales; only activations can be dynamic",
            where=prefix + name,
            value=str(spec.format),
            fix="use int8/channel/sym",
            code="dynamic-weight",
        )
        return
    if grain == "tensor" or port is None:  # None: the bias of a folded norm
        return
    axis = (channel_axis if grain == "channel" else reduction_axis)(op.kind, port_name)
    if spec.axis is not None and grain == "group":
        axis = spec.axis
    if grain == "token" and op.kind.startswith("conv"):
        yield Problem(
            what=f"{op.kind} adds values of different tokens, so their scales can't differ",
            where=prefix + name,
            value=str(spec.format),
            fix=f"use {replace(spec.format, granularity='tensor')}, or float",
            code="no-token-axis",
        )
    elif not -len(port.shape) <= axis < len(port.shape):
        yield Problem(
            what=f"a tensor of shape {list(port.shape)} has no axis for scales per {grain}",
            where=prefix + name,
            value=str(spec.format),
            fix="use tensor",
            code="no-channel-axis",
        )
    elif grain == "group" and port.shape[axis] % spec.format.group:
        divisors = [d for d in (16, 32, 64, 128, 256) if port.shape[axis] % d == 0]
        yield Problem(
            what=f"group size {spec.format.group} doesn't divide {port.shape[axis]} elements",
            where=prefix + name,
            value=str(spec.format),
            fix=f"use group{divisors[-1]}" if divisors else "use channel",
            code="group-size",
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
        code="unknown-operator",
    )


def _strategies(plan: Plan) -> Iterator[Problem]:
    for norm, fold in plan.folds.items():
        if fold.strategy not in STRATEGIES:
            yield Problem(
                what="unknown folding strategy",
                where=f"fold.{norm}",
                value=fold.strategy,
                fix=known_strategies(),
                code="unknown-folding-strategy",
            )
        elif fold.sync and fold.strategy in WITHOUT_BATCH:
            yield Problem(
                what="this folding strategy uses no batch statistics, so there is nothing to synchronize",
                where=f"fold.{norm}",
                value=fold.strategy,
                fix="remove `sync`, or use strategy 2, 3 or 4",
                code="fold-without-statistics",
            )


def _folds(plan: Plan, graph: Graph) -> Iterator[Problem]:
    for norm, fold in plan.folds.items():
        before = fold.into
        missing = [name for name in (norm, before) if name not in graph.by_name]
        if missing:
            for name in missing:
                yield _no_operator("fold", name, graph)
            continue
        op = graph.by_name[norm]
        port = op.port("input")
        if op.kind != "batch_norm" or port is None or [s.name for s in port.sources] != [before]:
            yield Problem(
                what="only a batch norm that directly follows the operator can be folded into it",
                where="fold",
                value=f"{norm}: {before}",
                fix="remove this entry",
                code="fold-not-possible",
            )


def _compute(
    compute: Mapping[str, ComputeSpec], sites: Mapping[str, Any], graph: Graph | None, prefix: str
) -> Iterator[Problem]:
    """All problems of one section."""
    for key, spec in compute.items():
        where = f"{prefix}compute.{key}"
        if spec.is_low_precision and spec.format not in KERNELS:
            fix = did_you_mean(spec.format, [*KERNELS.names(), FLOAT])
            yield Problem(what="unknown kernel", where=where, value=spec.format, fix=fix, code="unknown-kernel")
            continue
        wrong = [name for name in spec.backward if name not in GRADIENTS]
        if wrong:
            fix = f"use some of: {', '.join(GRADIENTS)}"
            yield Problem(
                what="unknown product of the backward pass",
                where=where,
                value=wrong[0],
                fix=fix,
                code="unknown-product",
            )
        if spec.scales not in SCALES:
            fix = f"use one of: {', '.join(SCALES)}"
            yield Problem(
                what="unknown granularity of scales", where=where, value=spec.scales, fix=fix, code="unknown-scales"
            )
        quantized = [site for site, one in sites.items() if site.rpartition(":")[0] == key and one.quantizes]
        if spec.is_low_precision and quantized:
            yield Problem(
                what="the operator has a kernel and a simulated quantizer",
                where=where,
                value=quantized[0],
                fix="remove the site or the kernel",
                code="kernel-and-quantizer",
            )
        if graph is not None:
            yield from _compute_against(key, spec, graph, where)


def _compute_against(key: str, spec: ComputeSpec, graph: Graph, where: str) -> Iterator[Problem]:
    found = [op for op in graph.ops if op.name == key or fnmatch.fnmatchcase(op.name, key)]
    if not found:
        yield Problem(
            what="matches no operator of the model",
            where=where,
            value=key,
            fix=did_you_mean(key, graph.by_name),
            code="unknown-operator",
        )
    elif spec.is_low_precision:
        kernel = KERNELS.get(spec.format)
        reasons = [(kernel.refuses_named if op.name == key else kernel.refuses)(op, spec) for op in found]
        if all(reasons):
            yield Problem(
                what=str(reasons[0]),
                where=where,
                value=spec.format,
                fix="keep it in float",
                code="kernel-not-applicable",
            )
