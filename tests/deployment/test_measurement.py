"""Latencies are measured in turns, and nobody always comes after the same neighbour."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise

from bitwright.deployment import measure_latency


def test_all_take_turns_with_changing_neighbours() -> None:
    calls: list[str] = []
    result = measure_latency({name: partial(calls.append, name) for name in "abc"}, runs=20, warmup=1)
    rounds = [calls[i : i + 3] for i in range(3, len(calls), 3)]
    assert len(rounds) == 20
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert {(one, two) for turn in rounds for one, two in pairwise(turn)} >= {("a", "b"), ("b", "a"), ("c", "a")}
    assert all(latency.runs == 20 for latency in result.values())


def test_medians_tell_slow_from_fast() -> None:
    result = measure_latency({"fast": lambda: None, "slow": partial(time.sleep, 0.005)}, runs=7, warmup=0)
    assert result["slow"].median_ms >= 5
    assert result["slow"].p10_ms <= result["slow"].median_ms <= result["slow"].p90_ms
    assert result["fast"].median_ms < result["slow"].median_ms
