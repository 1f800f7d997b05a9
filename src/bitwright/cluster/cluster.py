"""`cluster.yaml`: the kinds of devices, their number, links and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from bitwright.cluster.memory import RESERVE, MemoryLimit
from bitwright.core.arguments import reject_unknown, strict
from bitwright.core.documents import MOST_YAML, parse_yaml, read_text, reject_other_kind
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean
from bitwright.core.schemas import DeviceName, Strict, validated
from bitwright.profiling.device_profile import CollectiveCost, DeviceProfile


@strict
class Link(Strict):
    """The network link of a device."""

    latency_us: float = Field(default=0.0, ge=0, le=1e9, description="Latency of one message, in microseconds.")
    gbit_per_s: float = Field(ge=1e-6, le=1e9, description="Bandwidth, in gigabits per second.")

    @property
    def seconds(self) -> float:
        """Latency in seconds."""
        return self.latency_us * 1e-6

    @property
    def seconds_per_byte(self) -> float:
        """The inverse of the bandwidth."""
        return 8e-9 / self.gbit_per_s


def ring(world: int, link: Link) -> tuple[float, float]:
    """Seconds of latency and seconds per byte of a ring all-reduce.

    It has 2·(world - 1) rounds, and each sends a part of 1/world of the bytes.

    >>> latency, per_byte = ring(4, Link(latency_us=10, gbit_per_s=8))
    >>> f"{1e6 * latency:.0f} us, {1e9 * per_byte:.1f} ns"
    '60 us, 1.5 ns'
    """
    return 2 * (world - 1) * link.seconds, 2 * (world - 1) / world * link.seconds_per_byte


@strict
class Nodes(Strict):
    """Machines with several devices each, which a faster link connects."""

    devices: int = Field(ge=2, le=100_000, description="Devices of each machine.")
    link: Link = Field(description="The link within a machine. Other links are those between machines.")


class DeviceKind(Strict):
    """One kind of device."""

    profile: str | None = Field(
        default=None,
        description="The path of its DeviceProfile, relative to this file. `plan-cluster --profiles` overrides it.",
    )
    count: int = Field(default=1, ge=1, le=100_000)
    memory_gb: float | None = Field(
        default=None, ge=1e-6, le=1e6, description="Its memory in GB; by default that of the profile."
    )
    memory_reserve: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Share of its memory that plans leave free; by default that of the cluster.",
    )
    plan: str | None = Field(
        default=None,
        description="Its plan file, relative to this file; by default the section of the common plan for this kind.",
    )
    link: Link | None = Field(default=None, description="Its link; by default that of the cluster.")


@strict
class Cluster(Strict):
    """Devices that train one model together, synchronously. `Cluster.load` reads a `cluster.yaml`.

    >>> cluster = Cluster.of({"t4": 2, "a100": 1}, link=Link(gbit_per_s=10))
    >>> cluster.world, list(cluster.devices)
    (3, ['t4', 'a100'])
    """

    bitwright_cluster: Literal[1] = Field(description="Version of this schema.")
    link: Link | None = Field(default=None, description="The link of devices without their own link.")
    backend: str = Field(default="gloo", description="The backend whose measured collectives are used.")
    memory_reserve: float = Field(
        default=RESERVE,
        ge=0,
        lt=1,
        description="Share of each device's memory that plans leave free, because predictions have errors.",
    )
    nodes: Nodes | None = Field(default=None, description="Machines with several devices of one kind each.")
    all_reduce: Literal["ring", "hierarchical"] = Field(
        default="ring",
        description="`hierarchical` reduces within machines first, then between them; it needs `nodes`.",
    )
    devices: dict[DeviceName, DeviceKind] = Field(min_length=1)
    _folder: Path = PrivateAttr(default=Path())

    @model_validator(mode="after")
    def _whole_nodes(self) -> Cluster:
        if self.nodes is None:
            if self.all_reduce == "hierarchical":
                raise ValueError("all_reduce: hierarchical needs `nodes`")
            return self
        part = [name for name, kind in self.devices.items() if kind.count % self.nodes.devices]
        if part:
            raise ValueError(
                f"{', '.join(part)}: `count` must be a multiple of the {self.nodes.devices} devices of a node"
            )
        return self

    @property
    def folder(self) -> Path:
        """The folder of the cluster file, to which its paths are relative; the current folder without a file."""
        return self._folder

    @property
    def world(self) -> int:
        """The number of devices."""
        return sum(kind.count for kind in self.devices.values())

    @staticmethod
    def from_yaml(text: str, *, where: str = "cluster") -> Cluster:
        """Parse a cluster file; all problems are raised together."""
        data = parse_yaml(text, where=where)
        if not isinstance(data, dict):
            raise BitwrightError(
                "a cluster file must be a mapping",
                where=where,
                value="nothing" if data is None else data,
                fix="begin with `bitwright_cluster: 1`, then `devices:`; docs/predict.md has an example",
                code="not-a-mapping",
            )
        return validated(Cluster, data, title=f"{where} has problems")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a file."""
        reject_other_kind(
            path, what="a cluster file", fix="give the path of a cluster.yaml; docs/predict.md has an example"
        )
        text = read_text(path, what="the cluster", fix="give the path of a cluster.yaml", most=MOST_YAML)
        cluster = Cluster.from_yaml(text, where=str(path))
        cluster._folder = Path(path).parent
        return cluster

    @staticmethod
    def of(kinds: dict[str, int], **settings: Any) -> Cluster:
        """Create a cluster from the number of devices of each kind."""
        reject_unknown("Cluster.of", settings, Cluster.model_fields)
        devices = {name: DeviceKind(profile=f"{name}.json", count=count) for name, count in kinds.items()}
        return Cluster(bitwright_cluster=1, devices=devices, **settings)

    def only(self, devices: Mapping[str, DeviceKind]) -> Cluster:
        """The same cluster with these devices."""
        found = self.model_copy(update={"devices": dict(devices)})
        found._folder = self._folder
        return found

    def missing_plans(self) -> list[Problem]:
        """Return a problem for each plan file that the cluster names and that does not exist."""
        return [
            Problem(
                what="the plan file doesn't exist",
                where=f"{name}: {self.folder / kind.plan}",
                fix="write it, or remove `plan` to use the common plan",
                code="no-such-plan",
            )
            for name, kind in self.devices.items()
            if kind.plan is not None and not (self.folder / kind.plan).is_file()
        ]

    def profiles(
        self, folder: str | Path | None = None, given: Mapping[str, Path] | None = None
    ) -> dict[str, DeviceProfile]:
        """Load the profiles that the cluster names, or those of `given` instead; report all problems at once.

        Paths are relative to `folder`, by default the folder of the cluster file.
        """
        folder = self.folder if folder is None else Path(folder)
        paths = {name: folder / kind.profile for name, kind in self.devices.items() if kind.profile is not None}
        paths |= given or {}
        problems = [
            Problem(
                what="no such kind of device",
                where="profiles",
                value=name,
                fix=did_you_mean(name, self.devices),
                code="unknown-device-kind",
            )
            for name in paths
            if name not in self.devices
        ]
        problems += [
            Problem(
                what="this kind of device has no profile",
                where=name,
                fix=f"--profiles {name}=FILE, or `profile:`",
                code="profile-required",
            )
            for name in self.devices
            if name not in paths
        ]
        found: dict[str, DeviceProfile] = {}
        for name, path in paths.items():
            try:
                found[name] = DeviceProfile.load(path)
            except BitwrightError as error:
                problems += [replace(problem, where=f"{name}: {problem.where}") for problem in error.problems]
        if problems:
            raise PlanError(problems, title="the cluster's profiles have problems")
        return found

    def _over_links(self, operation: str, link: Link, world: int) -> tuple[float, float]:
        """Seconds of latency and seconds per byte of a collective over these links."""
        if operation != "all_reduce":
            return link.seconds, link.seconds_per_byte
        if self.nodes is None or self.all_reduce == "ring":
            return ring(world, link)  # one ring crosses each machine's link once
        inside = ring(min(self.nodes.devices, world), self.nodes.link)
        between = ring(max(1, world // self.nodes.devices), link)  # the devices of a machine share its link
        return inside[0] + between[0], inside[1] + between[1]

    def memory_limit(self, kind: str, profile: DeviceProfile) -> MemoryLimit | None:
        """The memory limit of a kind: from this file, otherwise from the profile; None if neither has one."""
        own = self.devices[kind]
        total = int(own.memory_gb * 1e9) if own.memory_gb is not None else profile.memory.limit
        reserve = own.memory_reserve if own.memory_reserve is not None else self.memory_reserve
        return None if total is None else MemoryLimit(total=total, reserve=reserve)

    def collective(self, operation: str, profiles: dict[str, DeviceProfile], world: int) -> CollectiveCost:
        """The cost of a collective: a ring over the slowest link, or the slowest measurement if there are no links."""
        if world < 2:
            return CollectiveCost(operation=operation, backend=self.backend, world=2, latency=0.0, per_byte=0.0)  # type: ignore[arg-type]
        measured = [
            cost
            for profile in profiles.values()
            for cost in profile.collectives
            if (cost.operation, cost.backend) == (operation, self.backend)
        ]
        links = [kind.link or self.link for kind in self.devices.values()]
        if all(link is not None for link in links):
            slowest = Link(
                latency_us=max(link.latency_us for link in links if link),
                gbit_per_s=min(link.gbit_per_s for link in links if link),
            )
            latency, per_byte = self._over_links(operation, slowest, world)
            return CollectiveCost(
                operation=operation,  # type: ignore[arg-type]
                backend=self.backend,
                world=world,
                latency=latency,
                per_byte=per_byte,
            )
        same = [cost for cost in measured if cost.world == world]
        if same:
            return max(same, key=lambda cost: cost.latency + cost.per_byte * 1e6)
        without = [name for name, link in zip(self.devices, links, strict=True) if link is None]
        sizes = sorted({cost.world for cost in measured})
        raise BitwrightError(
            f"unknown cost of {operation} among {world} devices: "
            + (
                "no profile contains a measurement"
                if not sizes
                else f"it was measured among {', '.join(map(str, sizes))}"
            ),
            where=f"cluster, {', '.join(without)}",
            fix=f"add a `link` to the cluster or to {', '.join(without)}, or profile a process group of this size "
            f"with {self.backend}",
            code="unknown-link",
        )
