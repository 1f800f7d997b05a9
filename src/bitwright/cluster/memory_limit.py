"""How much of a device's memory plans may use. A reserve covers prediction errors: a process that exceeds the memory is
killed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RESERVE = 0.07
"""Share of a device's memory that plans leave free. Most processes peaked at up to 5 % above their prediction."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The memory of a device and the share of it that plans leave free.

    >>> limit = MemoryLimit(total=10 * 10**9, reserve=0.07)
    >>> limit.usable, limit.holds(9_300_000_000), limit.holds(9_300_000_001)
    (9300000000, True, False)
    >>> print(limit)
    9.3 GB (10 GB less 7 % in reserve)
    """

    total: int
    """All bytes of the device."""
    reserve: float = RESERVE
    """A share between 0 and 1."""

    @property
    def usable(self) -> int:
        """Bytes that a process may use according to its prediction."""
        return self.total - round(self.total * self.reserve)

    def holds(self, process: int) -> bool:
        """Whether a process with this predicted peak fits."""
        return process <= self.usable

    def __str__(self) -> str:
        if not self.reserve:
            return size(self.total)
        return f"{size(self.usable)} ({size(self.total)} less {100 * self.reserve:.3g} % in reserve)"


def describe_limits(limits: Mapping[str, MemoryLimit | None]) -> str:
    """Describe the memory limit of each kind of device; kinds with the same limit share an entry."""
    alike: dict[str, list[str]] = {}
    for name, limit in limits.items():
        alike.setdefault("unknown" if limit is None else str(limit), []).append(name)
    reserved = any(limit is not None and limit.reserve for limit in limits.values())
    why = "; predictions are some percent wrong (memory_reserve in cluster.yaml)" if reserved else ""
    return ", ".join(f"{' and '.join(names)} {text}" for text, names in alike.items()) + why


def size(bytes: int) -> str:
    """Format bytes as megabytes or gigabytes.

    >>> size(9_300_000_000), size(4_200_000)
    ('9.3 GB', '4.2 MB')
    """
    return f"{bytes / 1e9:.3g} GB" if bytes >= 1e7 else f"{bytes / 1e6:.3g} MB"
