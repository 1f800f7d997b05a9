"""What a step of quantization-aware training costs, as a ratio to the float model's step.

    python benchmarks/step_time.py [--steps 40] [--skip-whole]

ResNet-20, batches of 64 of 3x32x32, forward + backward + SGD, one core. LSQ, 8 bits, per-channel weights, per-tensor
activations, in two placements: `onnxruntime` (norms folded by strategy 4, outputs quantized) and `academic` (inputs
and weights of convolutions and linears). All variants take their steps in turns; a ratio is the median over the turns
of one variant's time by that of the float model in the same turn.

- eager: compared with the eager float model; `compiled arithmetic` is `compile_arithmetic(model)`;
- whole: each model under torch.compile(fullgraph=True), compared with the float model under torch.compile.

Peers (benchmarks/step_time_peers.py; extra `bench`) train in the same turns, eagerly and under torch.compile (with
graph breaks, where they need them), if they are installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import step_time_peers
import torch
from common import environment, save
from torch import nn

import bitwright as bw
from bitwright.quantizers import compile_arithmetic
from bitwright.zoo.networks import ResNet20

GOALS = {"onnxruntime, compiled arithmetic": 1.25, "onnxruntime, whole": 1.10}
BATCH = (64, 3, 32, 32)


def quantized(target: str) -> nn.Module:
    """ResNet-20 with LSQ, calibrated, ready to train."""
    torch.manual_seed(0)
    model = ResNet20().eval()
    inputs = torch.randn(BATCH)
    bw.quantize(model, [inputs], backend=target, quantizer="lsq", weights="int8/channel/sym")
    return model.train()


def stepper(model: nn.Module) -> Callable[[], None]:
    """One step of training, always on the same batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, generator=generator)
    y = torch.randint(0, 10, (BATCH[0],), generator=generator)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def peers() -> dict[str, nn.Module]:
    """Other libraries' models, W8A8 and ready to train, where they are installed (extra `bench`)."""
    found: dict[str, nn.Module] = {}
    for name, problem in step_time_peers.available().items():
        if problem is not None:
            print(f"{name}: {problem}")
            continue
        with step_time_peers.quiet():
            torch.manual_seed(0)
            model = step_time_peers.PEERS[name](ResNet20(), torch.randn(BATCH))
            model.train()
        found[name] = model
    return found


def compare(models: dict[str, nn.Module], steps: int) -> dict[str, dict[str, float]]:
    """Steps in turns; the first model is the one that others are compared with."""
    steppers = {name: stepper(model) for name, model in models.items()}
    first: dict[str, float] = {}
    for name, step in steppers.items():
        start = time.perf_counter()
        step()
        first[name] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(steps + 3):
        for name, step in steppers.items():
            start = time.perf_counter()
            step()
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    reference = next(iter(times.values()))
    return {
        name: {
            "median_ms": statistics.median(taken) * 1e3,
            "ratio": statistics.median(b / a for a, b in zip(reference, taken, strict=True)),
            "ratio_of_fastest": min(taken) / min(reference),
            "first_step_s": first[name],
        }
        for name, taken in times.items()
    }


def whole(model: nn.Module) -> Any:
    """The model under torch.compile."""
    return torch.compile(model, fullgraph=True)


def compiled_peers() -> dict[str, nn.Module]:
    """Those that torch.compile takes, graph breaks allowed; the others are named with the reason."""
    found: dict[str, nn.Module] = {}
    for name, model in peers().items():
        compiled: Any = torch.compile(model)
        try:
            stepper(compiled)()
        except Exception as error:
            print(f"{name} can't be trained under torch.compile: {step_time_peers.reason(error)[:200]}")
        else:
            found[f"{name}, whole"] = compiled
    return found


def figures(steps: int, *, skip_whole: bool) -> dict[str, dict[str, float]]:
    """All comparisons."""
    eager: dict[str, nn.Module] = {"float": ResNet20().train()}
    for target in ("onnxruntime", "academic"):
        eager[target] = quantized(target)
        eager[f"{target}, compiled arithmetic"] = quantized(target)
        compile_arithmetic(eager[f"{target}, compiled arithmetic"])
    eager |= peers()
    rows = compare(eager, steps)
    if not skip_whole:
        compiled = {"float, whole": whole(ResNet20().train())}
        compiled |= {f"{target}, whole": whole(quantized(target)) for target in ("onnxruntime", "academic")}
        compiled |= compiled_peers()
        rows |= compare(compiled, steps)
    return rows


def main() -> None:
    """Run and keep the results; over a goal is said, not hidden."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip-whole", action="store_true", help="not the models under torch.compile: minutes less")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = figures(options.steps, skip_whole=options.skip_whole)
    lines = ["# A step of training, ResNet-20, batch 64, one core, ratios to the float model", ""]
    lines += ["| | median ms | ratio | ratio of fastest steps | goal | first step s |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['median_ms']:.1f} | {row['ratio']:.3f} | {row['ratio_of_fastest']:.3f} | "
            f"{GOALS.get(name, '')} | {row['first_step_s']:.1f} |"
        )
    facts = environment(steps=options.steps, peers=step_time_peers.versions())
    save("step_time", {"environment": facts, "results": rows}, "\n".join(lines))
    over = [name for name, goal in GOALS.items() if name in rows and rows[name]["ratio"] > goal]
    if over:
        raise SystemExit(f"over the goal: {', '.join(over)}")


if __name__ == "__main__":
    main()
