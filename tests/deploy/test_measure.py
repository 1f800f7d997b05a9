"""Latencies are measured in turns, and nobody always comes after the same neighbour."""

from __future__ import annotations

import time
from functools import partial

from bitwright.deploy import measure_latency


def test_turns_rotate() -> None:
    calls: list[str] = []
    result = measure_latency({name: partial(calls.append, name) for name in "abc"}, runs=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert all(latency.runs == 3 for latency in result.values())


def test_medians_tell_slow_from_fast() -> None:
    result = measure_latency({"fast": lambda: None, "slow": partial(time.sleep, 0.005)}, runs=7, warmup=0)
    assert result["slow"].median_ms >= 5
    assert result["slow"].p10_ms <= result["slow"].median_ms <= result["slow"].p90_ms
    assert result["fast"].median_ms < result["slow"].median_ms
