"""`Plan`: for each site its number format and the reason. The product that everything else makes or obeys."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.core.arguments import strict
from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.formats import Format
from bitwright.core.notebook import table
from bitwright.graph import Graph
from bitwright.graph.naming import site_name
from bitwright.plan.compute import ComputeSpec, resolved
from bitwright.plan.schema import DEFAULT_STRATEGY

_FLOAT = Format.parse("float")


@strict
@dataclass(frozen=True, kw_only=True)
class SiteSpec:
    """What happens at one site."""

    format: Format = _FLOAT
    observer: str = "minmax"
    observer_options: Mapping[str, Any] = field(default_factory=dict)
    quantizer: str = "plain"
    quantizer_options: Mapping[str, Any] = field(default_factory=dict)
    guard: str | None = None
    share: str | None = None
    why: str = ""

    @property
    def quantizes(self) -> bool:
        """Whether anything is done here."""
        return self.share is not None or not self.format.is_plain_float


def is_pattern(name: str) -> bool:
    """Whether a key of `sites` stands for several sites."""
    return any(mark in name for mark in "*?[")


@dataclass(frozen=True, kw_only=True)
class FoldSpec:
    """How one batch norm is folded: into which operator, by which strategy, with whose statistics."""

    into: str
    strategy: int = DEFAULT_STRATEGY
    sync: bool = False

    @property
    def short(self) -> str | FoldSpec:
        """The operator's name alone, if that says it all."""
        return self.into if self == FoldSpec(into=self.into) else self

    def __str__(self) -> str:
        strategy = "" if self.strategy == DEFAULT_STRATEGY else f", strategy={self.strategy}"
        return self.into + strategy + (", sync" if self.sync else "")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What differs on one kind of device."""

    sites: Mapping[str, SiteSpec] = field(default_factory=dict)
    compute: Mapping[str, ComputeSpec] = field(default_factory=dict)
    batch: int | None = None
    """Samples of each step on one such device; None: as many as on all."""
    channels_last: bool = False
    """Whether images are NHWC in memory: what was planned holds for that layout."""
    why: str = ""


@strict
@dataclass(frozen=True, kw_only=True)
class Plan:
    """A set of sites with their formats; immutable, `with_sites` makes a changed one.

    >>> spec = SiteSpec(format=Format.parse("int8/channel/sym"), why="fast here")
    >>> plan = Plan(sites={"conv1:weight": spec})
    >>> print(plan.to_yaml())
    bitwright: 1
    sites:
      conv1:weight:
        format: int8/channel/sym
        why: fast here
    <BLANKLINE>
    """

    sites: Mapping[str, SiteSpec] = field(default_factory=dict)
    fold: Mapping[str, str | FoldSpec] = field(default_factory=dict)
    float: Mapping[str, str] = field(default_factory=dict)
    compute: Mapping[str, ComputeSpec] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)
    backend: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        # one spelling for one meaning: plans that say the same are equal
        short = {norm: spec if isinstance(spec, str) else spec.short for norm, spec in self.fold.items()}
        object.__setattr__(self, "fold", short)

    @cached_property
    def folds(self) -> Mapping[str, FoldSpec]:
        """`fold` with all defaults filled in."""
        return {n: FoldSpec(into=spec) if isinstance(spec, str) else spec for n, spec in self.fold.items()}

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; all its problems are raised at once."""
        from bitwright.plan.files import load_plan

        return load_plan(Path(path))

    @staticmethod
    def from_yaml(text: str, *, where: str = "plan") -> Plan:
        """Read a plan from YAML text."""
        from bitwright.plan.files import parse_plan

        return parse_plan(text, where=where)

    def _repr_html_(self) -> str:
        rows = [
            *((name, spec.format, spec.why) for name, spec in self.quantized),
            *((name, spec.format, spec.why) for name, spec in self.compute.items()),
            *((name, "float", why) for name, why in self.float.items()),
        ]
        return table(["site", "format", "why"], rows, title=f"Plan for {self.backend or 'any backend'}")

    def to_yaml(self) -> str:
        """The same plan always gives the same text."""
        from bitwright.plan.files import dump_plan

        return dump_plan(self)

    def save(self, path: str | Path) -> Path:
        """Write the plan file, whole or not at all."""
        from bitwright.plan.files import save_plan

        return save_plan(self, Path(path))

    def with_sites(self, changes: Mapping[str, SiteSpec]) -> Plan:
        """A plan with these sites added or replaced."""
        return replace(self, sites={**self.sites, **changes})

    def for_device(self, kind: str) -> Plan:
        """The plan of one kind of device: the common sites with that device's own on top."""
        if kind not in self.devices:
            raise PlanError(
                [
                    Problem(
                        what="the plan has no such device",
                        where="devices",
                        value=kind,
                        fix=did_you_mean(kind, self.devices),
                    )
                ]
            )
        own = self.devices[kind].sites
        overridden = Lookup(own)
        common: dict[str, SiteSpec] = {}
        for key, spec in self.sites.items():
            if not is_pattern(key) and (overridden(key) is None or key in own):
                common[key] = own.get(key, spec)  # in its old place
            elif is_pattern(key) and key not in own:
                common[key] = spec
        # a later entry counts before an earlier one: the device's own come last
        compute = {k: v for k, v in self.compute.items() if k not in self.devices[kind].compute}
        compute.update(self.devices[kind].compute)
        return replace(self, sites={**common, **own}, compute=compute, devices={})

    @cached_property
    def has_patterns(self) -> bool:
        """Whether sites must still be resolved against a graph."""
        return any(is_pattern(name) for name in (*self.sites, *self.compute))

    @property
    def quantized(self) -> Iterator[tuple[str, SiteSpec]]:
        """The sites at which something happens."""
        return ((name, spec) for name, spec in self.sites.items() if spec.quantizes)

    @property
    def changes_models(self) -> bool:
        """Whether anything is quantized or computed in low precision: `prepare` stands around calls then."""
        return any(spec.low for spec in self.compute.values()) or any(True for _ in self.quantized)

    def resolve(self, graph: Graph) -> Plan:
        """Replace patterns by the sites that they match; raises with all problems if there are any."""
        from bitwright.plan.validate import validate

        problems = validate(self, graph)
        if problems:
            raise PlanError(problems)
        names = site_names(graph, self.folds)
        common = _resolved(Lookup(self.sites), names, graph)
        devices: dict[str, Device] = {}
        for kind, device in self.devices.items():
            own = Lookup(device.sites)
            sites = _resolved(Lookup(device.sites, self.sites), names, graph)
            # also what follows from the device's own sites: a tied weight may have another owner there
            kept = {n: spec for n, spec in sites.items() if own(n) is not None or spec != common.get(n)}
            devices[kind] = replace(device, sites=kept, compute=resolved([device.compute], graph))
        return replace(self, sites=common, compute=resolved([self.compute], graph), devices=devices)

    def validate(self, graph: Graph | None = None) -> list[Problem]:
        """All problems, each with site, value and fix; empty when the plan is good."""
        from bitwright.plan.validate import validate

        return validate(self, graph)

    def diff(self, other: Plan) -> list[Change]:
        """What changes from this plan to `other`."""
        from bitwright.plan.files import diff

        return diff(self, other)


def matching(pattern: str, names: list[str]) -> list[str]:
    """The names that a pattern or an exact name stands for."""
    if pattern in names:  # the name of a module may look like a pattern
        return [pattern]
    if is_pattern(pattern):
        return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    return []


class Lookup:
    """Which entry counts for a site: exact before patterns, later before earlier, layer by layer."""

    def __init__(self, *layers: Mapping[str, SiteSpec]) -> None:
        self.layers = [(sites, [key for key in reversed(list(sites)) if is_pattern(key)]) for sites in layers]

    def __call__(self, name: str) -> SiteSpec | None:
        """The entry of the site of that name, if it has one."""
        for sites, patterns in self.layers:
            if name in sites:
                return sites[name]
            for pattern in patterns:
                if fnmatch.fnmatchcase(name, pattern):
                    return sites[pattern]
        return None


def site_names(graph: Graph, folds: Mapping[str, FoldSpec]) -> list[str]:
    """All sites that a plan with these folds may name."""
    # an operator that takes in a norm has a bias, even if the module has none
    biases = {site_name(fold.into, "weight"): site_name(fold.into, "bias") for fold in folds.values()}
    names = [name for site, _, _ in graph.sites() for name in (site, biases.get(site)) if name is not None]
    return list(dict.fromkeys(names))


def weight_owners(known: Lookup, graph: Graph) -> dict[str, str]:
    """The site whose quantizer each quantized weight has: a tied weight's first use that is quantized.

    Other uses may stay float: a backend that multiplies by a tied weight in integers may look its rows up in
    float.
    """
    first: dict[str, str] = {}
    return {
        site: first.setdefault(parameter, site)
        for site, parameter in graph.weight_owner.items()
        if (spec := known(site)) is not None and spec.share is None and spec.quantizes
    }


def _resolved(known: Lookup, names: list[str], graph: Graph) -> dict[str, SiteSpec]:
    """The sites by exact name, in the order of the graph."""
    owners = weight_owners(known, graph)
    chosen: dict[str, SiteSpec] = {}
    for name in names:
        spec = known(name)
        if spec is None:
            continue
        if owners.get(name, name) != name:
            # A pattern met a tied weight: it has one quantizer, which its other uses share.
            spec = SiteSpec(share=owners[name], why=spec.why)
        shared = known(spec.share) if spec.share is not None else spec
        if shared is not None and (shared.quantizes or spec.share is None):
            chosen[name] = spec
    return chosen


@dataclass(frozen=True)
class Change:
    """One difference between two plans."""

    where: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.where}: {self.after}"
        if self.after is None:
            return f"- {self.where}: {self.before}"
        return f"~ {self.where}: {self.before} → {self.after}"


__all__ = ["Change", "ComputeSpec", "Device", "FoldSpec", "Plan", "SiteSpec"]
