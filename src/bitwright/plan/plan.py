"""`Plan`: the number format of each site, with the reason."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.core.arguments import strict
from bitwright.core.display import Summarized, Table
from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.formats import Format
from bitwright.core.formatting import counted
from bitwright.core.schemas import device_name, not_blank
from bitwright.graph import Graph
from bitwright.graph.graph import site_name
from bitwright.plan.schema import DEFAULT_STRATEGY, ComputeSpec, resolve_compute

_FLOAT = Format.parse("float")


@strict
@dataclass(frozen=True, kw_only=True)
class SiteSpec:
    """The format and quantizer of one site.

    >>> spec = SiteSpec(format=Format.parse("int4/group32/sym"), observer="mse", why="the head tolerates it")
    >>> spec.format.bits
    4
    """

    format: Format = _FLOAT
    observer: str = "minmax"
    observer_options: Mapping[str, Any] = field(default_factory=dict)
    quantizer: str = "plain"
    quantizer_options: Mapping[str, Any] = field(default_factory=dict)
    guard: str | None = None
    axis: int | None = None
    """The axis of groups, at an operator that selects weights of experts; others have an axis of their own."""
    share: str | None = None
    why: str = ""

    @property
    def quantizes(self) -> bool:
        """Whether the site has a quantizer."""
        return self.share is not None or not self.format.is_plain_float


def is_pattern(name: str) -> bool:
    """Whether a key of `sites` is a pattern."""
    return any(mark in name for mark in "*?[")


@dataclass(frozen=True, kw_only=True)
class FoldSpec:
    """How one batch norm is folded: into which operator, with which strategy and statistics."""

    into: str
    strategy: int = DEFAULT_STRATEGY
    sync: bool = False

    @property
    def short(self) -> str | FoldSpec:
        """The operator's name if all other values are defaults."""
        return self.into if self == FoldSpec(into=self.into) else self

    def __str__(self) -> str:
        strategy = "" if self.strategy == DEFAULT_STRATEGY else f", strategy={self.strategy}"
        return self.into + strategy + (", sync" if self.sync else "")


@dataclass(frozen=True, kw_only=True)
class Device:
    """The differences of one device type."""

    sites: Mapping[str, SiteSpec] = field(default_factory=dict)
    compute: Mapping[str, ComputeSpec] = field(default_factory=dict)
    batch: int | None = None
    """Samples per step on one such device. None: the same number as on all devices."""
    channels_last: bool = False
    """Whether the plan was made for images in channels-last memory format."""
    why: str = ""


@strict
@dataclass(frozen=True, kw_only=True)
class Plan(Summarized):
    """A set of sites with their formats. Immutable; `with_sites` returns a changed copy.

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
        # normalize, so that equivalent plans are equal
        short = {norm: spec if isinstance(spec, str) else spec.short for norm, spec in self.fold.items()}
        object.__setattr__(self, "fold", short)
        problems = list(self._name_problems())
        if problems:
            raise PlanError(problems)

    def _name_problems(self) -> Iterator[Problem]:
        """Problems of names that a plan file can't contain."""
        names: list[tuple[str, Callable[[str], str], Iterable[str]]] = [
            ("model", not_blank, [] if self.model is None else [self.model]),
            ("backend", not_blank, [] if self.backend is None else [self.backend]),
            ("sites", not_blank, self.sites),
            ("float", not_blank, self.float),
            ("compute", not_blank, self.compute),
            ("devices", device_name, self.devices),
        ]
        for where, check, found in names:
            for name in found:
                try:
                    check(name)
                except ValueError as error:
                    yield Problem(what=str(error), where=where, value=name, code="invalid-name")

    @cached_property
    def folds(self) -> Mapping[str, FoldSpec]:
        """`fold` with all default values filled in."""
        return {n: FoldSpec(into=spec) if isinstance(spec, str) else spec for n, spec in self.fold.items()}

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file. All problems are raised at once."""
        from bitwright.plan.files import load_plan

        return load_plan(Path(path))

    @staticmethod
    def from_yaml(text: str, *, where: str = "plan") -> Plan:
        """Read a plan from YAML text."""
        from bitwright.plan.files import parse_plan

        return parse_plan(text, where=where)

    def to_dict(self) -> dict[str, Any]:
        """The content of the plan file as plain data."""
        from bitwright.plan.files import plan_data

        return plan_data(self)

    def __repr__(self) -> str:
        content = {
            "quantized sites": sum(1 for _ in self.quantized),
            "low-precision operators": len(self.compute),
            "in float": len(self.float),
            "device types": len(self.devices),
        }
        listed = ", ".join(f"{count} {what}" for what, count in content.items() if count)
        name = f"Plan {self.model}" if self.model else "Plan"
        return f"<{name} for {self.backend or 'any backend'}: {listed or 'empty'}>"

    def summary(self) -> Iterator[Table | str]:
        """The format of each site, and the reason."""
        rows = [
            *((name, spec.format, spec.why) for name, spec in self.quantized),
            *((name, spec.format, spec.why) for name, spec in self.compute.items()),
            *((name, "float", why) for name, why in self.float.items()),
        ]
        yield Table(["site", "format", "why"], rows, title=f"Plan for {self.backend or 'any backend'}")
        yield self.counts_text

    @property
    def trains_kernels(self) -> bool:
        """Whether training runs low-precision kernels for this plan, rather than quantizers."""
        return bool(self.compute or self.devices) or not any(True for _ in self.quantized)

    @property
    def counts_text(self) -> str:
        """How many sites and operators have low precision."""
        low = sum(spec.is_low_precision for spec in self.compute.values())
        computed = f"{counted(low, 'operator')} computed in low precision, " if low else ""
        return (
            f"{computed}{counted(len(list(self.quantized)), 'quantized site')}, {len(self.float)} entries left in float"
        )

    def to_yaml(self) -> str:
        """The plan as YAML. Equal plans give equal text."""
        from bitwright.plan.files import dump_plan

        return dump_plan(self)

    def save(self, path: str | Path) -> Path:
        """Write the plan file atomically."""
        from bitwright.plan.files import save_plan

        return save_plan(self, Path(path))

    def with_sites(self, changes: Mapping[str, SiteSpec]) -> Plan:
        """A copy with these sites added or replaced."""
        return replace(self, sites={**self.sites, **changes})

    def for_device(self, kind: str) -> Plan:
        """The plan of one device type: the common sites, overridden by those of the device."""
        if kind not in self.devices:
            raise PlanError(
                [
                    Problem(
                        what="the plan has no such device type",
                        where="devices",
                        value=kind,
                        fix=did_you_mean(kind, self.devices),
                        code="unknown-device",
                    )
                ]
            )
        own = self.devices[kind].sites
        overridden = Lookup(own)
        common: dict[str, SiteSpec] = {}
        for key, spec in self.sites.items():
            if not is_pattern(key) and (overridden(key) is None or key in own):
                common[key] = own.get(key, spec)  # keeps its position
            elif is_pattern(key) and key not in own:
                common[key] = spec
        # later entries override earlier ones, so those of the device come last
        compute = {k: v for k, v in self.compute.items() if k not in self.devices[kind].compute}
        compute.update(self.devices[kind].compute)
        return replace(self, sites={**common, **own}, compute=compute, devices={})

    @cached_property
    def has_patterns(self) -> bool:
        """Whether sites have to be resolved against a graph."""
        return any(is_pattern(name) for name in (*self.sites, *self.compute))

    @property
    def quantized(self) -> Iterator[tuple[str, SiteSpec]]:
        """The sites with a quantizer."""
        return ((name, spec) for name, spec in self.sites.items() if spec.quantizes)

    @property
    def changes_models(self) -> bool:
        """Whether any operator is quantized or runs in low precision."""
        return any(spec.is_low_precision for spec in self.compute.values()) or any(True for _ in self.quantized)

    def resolve(self, graph: Graph) -> Plan:
        """Replace patterns by the sites they match. All problems are raised at once."""
        from bitwright.plan.validation import validate

        problems = validate(self, graph)
        if problems:
            raise PlanError(problems)
        names = site_names(graph, self.folds)
        common = _resolved(Lookup(self.sites), names, graph)
        devices: dict[str, Device] = {}
        for kind, device in self.devices.items():
            own = Lookup(device.sites)
            sites = _resolved(Lookup(device.sites, self.sites), names, graph)
            # includes sites that the device's entries affect: a tied weight may have another owner on this device
            kept = {n: spec for n, spec in sites.items() if own(n) is not None or spec != common.get(n)}
            devices[kind] = replace(device, sites=kept, compute=resolve_compute([device.compute], graph))
        return replace(self, sites=common, compute=resolve_compute([self.compute], graph), devices=devices)

    def validate(self, graph: Graph | None = None) -> list[Problem]:
        """All problems, with site, value and fix. Empty if the plan is valid."""
        from bitwright.plan.validation import validate

        return validate(self, graph)

    def diff(self, other: Plan) -> list[Change]:
        """The changes from this plan to `other`."""
        from bitwright.plan.files import diff

        return diff(self, other)


def matching(pattern: str, names: list[str]) -> list[str]:
    """The names that match a pattern or an exact name."""
    if pattern in names:  # a module's name may contain pattern characters
        return [pattern]
    if is_pattern(pattern):
        return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    return []


class Lookup:
    """Finds a site's entry. In each layer, exact names override patterns and later entries override earlier ones."""

    def __init__(self, *layers: Mapping[str, SiteSpec]) -> None:
        self.layers = [(sites, [key for key in reversed(list(sites)) if is_pattern(key)]) for sites in layers]

    def __call__(self, name: str) -> SiteSpec | None:
        """The entry of the site with this name, or None."""
        for sites, patterns in self.layers:
            if name in sites:
                return sites[name]
            for pattern in patterns:
                if fnmatch.fnmatchcase(name, pattern):
                    return sites[pattern]
        return None


def site_names(graph: Graph, folds: Mapping[str, FoldSpec]) -> list[str]:
    """All valid site names for a plan with these folds."""
    # an operator with a folded norm has a bias, even if its module has none
    biases = {site_name(fold.into, "weight"): site_name(fold.into, "bias") for fold in folds.values()}
    names = [name for site, _, _ in graph.sites() for name in (site, biases.get(site)) if name is not None]
    return list(dict.fromkeys(names))


def weight_owners(known: Lookup, graph: Graph) -> dict[str, str]:
    """For each quantized weight, the site with its quantizer: the first quantized use of a tied weight.

    Other uses may stay in float. For example, a backend may run a linear layer in integers and use the tied weight as a
    float embedding.
    """
    first: dict[str, str] = {}
    return {
        site: first.setdefault(parameter, site)
        for site, parameter in graph.weight_owner.items()
        if (spec := known(site)) is not None and spec.share is None and spec.quantizes
    }


def _resolved(known: Lookup, names: list[str], graph: Graph) -> dict[str, SiteSpec]:
    """The sites by exact name, in graph order."""
    owners = weight_owners(known, graph)
    chosen: dict[str, SiteSpec] = {}
    for name in names:
        spec = known(name)
        if spec is None:
            continue
        if owners.get(name, name) != name:
            # A pattern matches a tied weight: its uses share one quantizer.
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
