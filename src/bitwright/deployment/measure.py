"""Latency of several callables, measured in alternation, so that disturbances affect all of them equally."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, TypeVar

from bitwright.core.arguments import Amount, Count, strict
from bitwright.core.progress import Progress

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latency of one callable in milliseconds: the median (p50) and other percentiles."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    p99_ms: float
    runs: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Latency:
        """Percentiles of measured milliseconds, interpolated between the measurements.

        >>> Latency.of([1.0, 2.0, 4.0])
        Latency(median_ms=2.0, p10_ms=1.2, p90_ms=3.6, p99_ms=3.96, runs=3)
        """
        cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else [times[0]] * 99
        return cls(median_ms=median(times), p10_ms=cuts[9], p90_ms=cuts[89], p99_ms=cuts[98], runs=len(times))


@strict
def measure_latency(
    calls: Mapping[Name, Callable[[], Any]],
    *,
    runs: Count = 50,
    warmup: Amount = 5,
    progress: Progress | None = None,
) -> dict[Name, Latency]:
    """Time each of `calls` `runs` times, in alternation and in a shuffled (seeded) order.

    The order is shuffled because a call affects the next one: threads of a session keep spinning after its run.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[Name, list[float]] = {name: [] for name in calls}
    order, shuffler = list(calls.items()), random.Random(0)
    for done in range(runs):
        shuffler.shuffle(order)
        for name, call in order:
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
        if progress is not None:
            progress(done + 1, runs, "timing")
    return {name: Latency.of(values) for name, values in times.items()}
