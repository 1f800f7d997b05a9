"""Latency of several callables in one run: interleaved, so that a noisy machine disturbs all of them alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds of one callable."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    runs: int


def measure_latency(
    calls: Mapping[Name, Callable[[], Any]],
    *,
    runs: int = 50,
    warmup: int = 5,
    progress: Callable[[int], None] | None = None,
) -> dict[Name, Latency]:
    """Time each of `calls` `runs` times, taking turns in a shuffled (seeded) order.

    Who comes right after whom matters: the threads of a session go on spinning for a while after its run.
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
            progress(done + 1)
    return {name: _latency(values) for name, values in times.items()}


def _latency(values: list[float]) -> Latency:
    deciles = quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return Latency(median_ms=median(values), p10_ms=deciles[0], p90_ms=deciles[-1], runs=len(values))
