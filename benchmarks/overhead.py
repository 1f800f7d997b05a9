"""What Bitwright costs when it does nothing, and what recording costs, as ratios to the plain model.

    python benchmarks/overhead.py [--runs 60]

Limits: a prepared model with quantizers switched off ≤ 1.05×, capture ≤ 5× one forward (ResNet-20).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import environment, save

import bitwright as bw
from bitwright.zoo.networks import ResNet20

LIMITS = {"off, batch 64": 1.05, "off, training, batch 64": 1.05, "capture, batch 1": 5.0, "capture, batch 64": 5.0}


def train_step(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()


def compare(plain: Callable[[], Any], ours: Callable[[], Any], runs: int) -> dict[str, float]:
    """Wall-time medians, in turns."""
    times = bw.measure_latency({"plain": plain, "ours": ours}, runs=runs)
    a, b = times["plain"].median_ms, times["ours"].median_ms
    return {"plain_ms": a, "ours_ms": b, "ratio": b / a}


def figures(runs: int) -> dict[str, dict[str, float]]:
    """All comparisons."""
    plain = ResNet20().eval()
    ours = copy.deepcopy(plain)
    one, many = torch.randn(1, 3, 32, 32), torch.randn(64, 3, 32, 32)
    bw.quantize(ours, [many])
    rows: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        rows["quantizing, batch 64"] = compare(partial(plain, many), partial(ours, many), max(runs // 3, 5))
        bw.set_mode(ours, "float")
        assert torch.equal(plain(many), ours(many))
        rows["off, batch 1"] = compare(partial(plain, one), partial(ours, one), runs * 5)
        rows["off, batch 64"] = compare(partial(plain, many), partial(ours, many), runs)
        rows["capture, batch 1"] = compare(partial(plain, one), partial(bw.capture, plain, one), runs)
        rows["capture, batch 64"] = compare(partial(plain, many), partial(bw.capture, plain, many), max(runs // 2, 5))
    plain.train()
    ours.train()
    rows["off, training, batch 64"] = compare(
        partial(train_step, plain, many), partial(train_step, ours, many), max(runs // 2, 5)
    )
    return rows


def main() -> None:
    """Run, keep the results, fail over the limits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = figures(options.runs)
    lines = ["# Overhead on ResNet-20, ratios to the plain model", "", "| | plain ms | ours ms | ratio | limit |"]
    lines.append("|---|---|---|---|---|")
    for name, row in rows.items():
        limit = LIMITS.get(name, "")
        lines.append(f"| {name} | {row['plain_ms']:.2f} | {row['ours_ms']:.2f} | {row['ratio']:.3f} | {limit} |")
    save("overhead", {"environment": environment(runs=options.runs), "results": rows}, "\n".join(lines))
    over = [name for name, limit in LIMITS.items() if rows[name]["ratio"] > limit]
    if over:
        raise SystemExit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
