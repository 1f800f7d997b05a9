"""What Bitwright costs when it does nothing, and what recording costs, as ratios to the plain model.

    python benchmarks/overhead.py

Limits: a prepared model with quantizers switched off ≤ 1.05x, capture ≤ 5x one forward (ResNet-20).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bitwright.attach import prepare, set_mode
from bitwright.backends import place
from bitwright.graph import capture
from bitwright.ptq import calibrate
from bitwright.version import __version__
from bitwright.zoo.resnet20 import ResNet20

LIMITS = {"switched_off_b64": 1.05, "switched_off_train_b64": 1.05, "capture_b1": 5.0, "capture_b64": 5.0}
RESULT = Path(__file__).parent / "results" / "overhead.json"


def interleaved(first: Callable[[], object], second: Callable[[], object], rounds: int) -> dict[str, float]:
    """Medians of both, in turns, and the median ratio of neighbours.

    CPU time of the one thread that works: other processes on the machine hardly count.
    """
    for run in (first, second):
        run()
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = ((0, first), (1, second)) if number % 2 == 0 else ((1, second), (0, first))
        for which, run in order:
            start = time.thread_time()
            run()
            times[which].append(time.thread_time() - start)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    return {
        "plain_ms": 1e3 * statistics.median(times[0]),
        "ours_ms": 1e3 * statistics.median(times[1]),
        "ratio": ratio,
    }


def train_step(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return run


def main(rounds: int, seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    plain = ResNet20().eval()
    prepared = copy.deepcopy(plain)
    one, many = torch.randn(1, 3, 32, 32), torch.randn(64, 3, 32, 32)
    prepare(prepared, place(capture(plain, one), "onnxruntime"))
    calibrate(prepared, [many])
    figures: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        figures["quantizing_b64"] = interleaved(lambda: plain(many), lambda: prepared(many), max(rounds // 3, 5))
        set_mode(prepared, "float")
        assert torch.equal(plain(many), prepared(many))
        figures["switched_off_b1"] = interleaved(lambda: plain(one), lambda: prepared(one), rounds * 5)
        figures["switched_off_b64"] = interleaved(lambda: plain(many), lambda: prepared(many), rounds)
        figures["capture_b1"] = interleaved(lambda: plain(one), lambda: capture(plain, one), rounds)
        figures["capture_b64"] = interleaved(lambda: plain(many), lambda: capture(plain, many), max(rounds // 2, 5))
    plain.train()
    prepared.train()
    figures["switched_off_train_b64"] = interleaved(
        train_step(plain, many), train_step(prepared, many), max(rounds // 2, 5)
    )
    return {
        "model": "ResNet-20 (CIFAR), float32, CPU time of 1 thread",
        "seed": seed,
        "rounds": rounds,
        "versions": {
            "bitwright": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": platform.processor() or platform.machine(),
        "limits": LIMITS,
        "figures": figures,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = main(arguments.rounds, arguments.seed)
    print(f"bitwright {__version__}, torch {torch.__version__}, seed {arguments.seed}, {report['model']}")
    late = []
    for name, figure in report["figures"].items():
        limit = LIMITS.get(name)
        note = "" if limit is None else f"  (limit {limit:.2f})"
        times = f"{figure['plain_ms']:9.3f} ms → {figure['ours_ms']:9.3f} ms"
        print(f"{name:24} {times}   {figure['ratio']:.3f}x{note}")
        if limit is not None and figure["ratio"] > limit:
            late.append(name)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    if late:
        raise SystemExit(f"over the limit: {', '.join(late)}")
