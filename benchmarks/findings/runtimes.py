"""Simulated against measured: how far runtimes are from what was trained, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import mean
from typing import Any

from bitwright import Leaderboard
from findings.words import TWINS, say, table


def gaps(board: Leaderboard, causes: dict[str, Any]) -> Iterator[str]:
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
    yield from saturation(causes["saturation"])
    yield from addition(causes["add"])
    yield from ties(causes["ties"])


def saturation(found: list[dict[str, Any]]) -> Iterator[str]:
    """What guards at the first and the last layer do."""
    lines = [
        [
            f"{one['model']}, {one['algorithm']}, {one['bits']} bits",
            "yes" if one["guarded"] else "no",
            f"{one['accuracy']:.2f}",
            f"{one['gap']:+.2f}",
            f"{one['decibels']:.0f} dB",
        ]
        for one in found
    ]
    before, now = (max(abs(one["gap"]) for one in found if one["guarded"] is guarded) for guarded in (False, True))
    yield say(
        f"Until November 2026 OpenVINO's largest gap was {before:.1f} points, and the cause was ours. Rows with 4 and",
        "2 bits have 8 at the first and the last layer, the only ones that OpenVINO runs in integers there; without",
        "VNNI, which `make leaderboard` does without, two 8-bit products are added in an int16 that saturates. Plans",
        "with 8 bits raise weight scales until no such sum can overflow (the guard `int16-pairs`); plans with fewer",
        "bits forgot these two layers. Three of the rows with the largest gaps, trained without and with the guard",
        "(openvino, seed 0; leaderboard_gaps.py):",
    )
    yield from table(["row", "guard", "simulated", "gap", "the outputs agree to"], lines, words=2)
    yield say(
        f"With it the largest of these gaps is {now:.2f}. ONNX Runtime's kernels are its own; nothing held them to",
        "AVX2 on the machine that ran this, which has VNNI, and it had no such gaps.",
    )


def addition(found: dict[str, Any]) -> Iterator[str]:
    """Which codes are behind an add that is fused with a convolution."""
    yield say(
        "What is left at 8 bits is, in the row that we looked into, a rounding that OpenVINO leaves out. A convolution",
        "whose output is added to something is computed in one kernel with the add, and its sum isn't rounded to codes",
        f"in between, as plan and artefact say. Of {found['codes']:,} codes behind that add (depthwise-cifar10,",
        f"dsq, {found['site']}) {100 * found['unlike rounded']:.1f} % are other ones than with that rounding (by at",
        f"most {found['largest']}), and {100 * found['unlike unrounded']:.4f} % other ones than without it. So the",
        "runtime is the more exact of the two; it just isn't what was trained.",
    )


def ties(found: dict[str, Any]) -> Iterator[str]:
    """Which codes differ where every number is on a coarse grid."""
    others = (
        "all of them such ties"
        if not found["differ elsewhere"]
        else f"{100 * found['differ elsewhere']:.3f} % elsewhere than at such ties"
    )
    yield say(
        "What is left at 2 bits is DoReFa's. Its ranges are fixed, so that an add has steps on one side that are half",
        "of those on the other, and many sums lie in the middle between two codes: which is taken depends on the last",
        f"bit of a float. Of {found['codes']:,} sums (depthwise-cifar10, {found['site']})",
        f"{100 * found['ties']:.0f} % are such ties; {100 * found['differ']:.1f} % of all codes differ, {others}.",
        "Neither is wrong: so much is left open by such a model.",
    )


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
