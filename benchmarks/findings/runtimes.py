"""Simulated against measured: how far runtimes are from what was trained, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import mean

from bitwright import Leaderboard
from findings.words import TWINS, say, table


def gaps(board: Leaderboard) -> Iterator[str]:
    found = [row.device for row in board.rows if row.device is not None and row.device.gap is not None]
    kinds = dict.fromkeys(
        (row.device.runtime, row.bits) for row in board.rows if row.device and row.device.gap is not None
    )
    lines = []
    for runtime, bits in kinds:
        own = [r.device.gap for r in board.rows if r.device and (r.device.runtime, r.bits) == (runtime, bits)]
        values = [gap for gap in own if gap is not None]
        same = sum(gap == 0 for gap in values)
        lines.append([runtime, bits, len(values), same, f"{mean(values):+.3f}", f"{max(values, key=abs):+.2f}"])
    yield "\n## Simulated and measured"
    yield from table(["runtime", "bits", "models", "the same accuracy", "mean gap", "largest"], lines)
    yield say(
        f"{len(found)} models of seed 0 were exported and run here, on 2,000 images each (one image is 0.05 points).",
        "The paper reports gaps below 0.1 point for TensorRT and SNPE at 8 bits; neither runs here, so their rows are",
        "simulated only.",
    )
    yield from large_gaps(board)


def large_gaps(board: Leaderboard, least: float = 0.5) -> Iterator[str]:
    """Where a runtime is far from the simulation, and what the other one does with the same weights there."""
    ran = {
        (r.backend, r.algorithm, r.bits, r.model, r.seed): r.device.gap
        for r in board.rows
        if r.device is not None and r.device.gap is not None
    }
    large = {key: gap for key, gap in ran.items() if abs(gap) >= least}
    if not large:
        return
    count = Counter((key[0], key[2], key[1]) for key in large)
    words = ", ".join(f"{name} at {bits} bits on {runtime} {n}" for (runtime, bits, name), n in count.most_common())
    twin = [ran[other] for key in large for other in [(_twin(key[0]), *key[1:])] if other in ran]
    yield say(
        f"{len(large)} of {len(ran)} gaps are {least} points or more: {words}.",
        f"On the other of the two runtimes the same rows have gaps of at most {max(map(abs, twin)):.2f}."
        if twin
        else "",
    )


def _twin(backend: str) -> str:
    return TWINS[1 - TWINS.index(backend)] if backend in TWINS else ""
