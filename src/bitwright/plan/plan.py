"""`Plan`: for each site its number format and the reason. The product that everything else makes or obeys."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.errors import PlanError, Problem, did_you_mean
from bitwright.formats import Format
from bitwright.graph import Graph
from bitwright.graph.naming import SiteName


@dataclass(frozen=True, kw_only=True)
class SiteSpec:
    """What happens at one site."""

    format: Format = Format.parse("float")
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
class Device:
    """What differs on one kind of device."""

    sites: Mapping[str, SiteSpec] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A set of sites with their formats; immutable, `with_sites` makes a changed one.

    >>> plan = Plan(sites={"conv1:weight": SiteSpec(format=Format.parse("int8/channel/sym"), why="fast here")})
    >>> print(plan.to_yaml())
    bitwright: 1
    sites:
      conv1:weight:
        format: int8/channel/sym
        why: fast here
    <BLANKLINE>
    """

    sites: Mapping[str, SiteSpec] = field(default_factory=dict)
    fold: Mapping[str, str] = field(default_factory=dict)
    float: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)
    backend: str | None = None
    model: str | None = None

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
        return replace(self, sites={**self.sites, **self.devices[kind].sites}, devices={})

    @cached_property
    def has_patterns(self) -> bool:
        """Whether sites must still be resolved against a graph."""
        return any(is_pattern(name) for name in self.sites)

    @property
    def quantized(self) -> Iterator[tuple[str, SiteSpec]]:
        """The sites at which something happens."""
        return ((name, spec) for name, spec in self.sites.items() if spec.quantizes)

    def resolve(self, graph: Graph) -> Plan:
        """Replace patterns by the sites that they match; raises with all problems if there are any."""
        from bitwright.plan.validate import validate

        problems = validate(self, graph)
        if problems:
            raise PlanError(problems)
        names = [name for name, _, _ in graph.sites()]
        return replace(
            self,
            sites=_resolved(self.sites, names, graph),
            devices={
                kind: replace(device, sites=_resolved(device.sites, names, graph))
                for kind, device in self.devices.items()
            },
        )

    def validate(self, graph: Graph | None = None) -> list[Problem]:
        """All problems, each with site, value and fix; empty when the plan is good."""
        from bitwright.plan.validate import validate

        return validate(self, graph)

    def diff(self, other: Plan) -> list[Change]:
        """What changes from this plan to `other`."""
        from bitwright.plan.diff import diff

        return diff(self, other)


def matching(pattern: str, names: list[str]) -> list[str]:
    """The names that a pattern or an exact name stands for."""
    if is_pattern(pattern):
        return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    return [pattern] if pattern in names else []


def _resolved(sites: Mapping[str, SiteSpec], names: list[str], graph: Graph) -> dict[str, SiteSpec]:
    chosen: dict[str, SiteSpec] = {}
    for key, spec in sites.items():
        if is_pattern(key):
            for name in matching(key, names):
                # A tied weight has one quantizer, at its first use, which its other uses share.
                owner = graph.weight_owner.get(name, name)
                chosen[name] = spec if owner == name or not spec.quantizes else SiteSpec(share=owner)
    chosen.update({key: spec for key, spec in sites.items() if not is_pattern(key)})
    chosen = {
        name: spec
        for name, spec in chosen.items()
        if spec.share is None or (spec.share in chosen and chosen[spec.share].quantizes)
    }
    order = {name: position for position, name in enumerate(names)}
    return dict(sorted(chosen.items(), key=lambda item: order.get(item[0], len(order))))


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


__all__ = ["Change", "Device", "Plan", "SiteName", "SiteSpec", "is_pattern", "matching"]
