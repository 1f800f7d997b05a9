"""What folded norms do to quantizers that rescale weights, with and without `Sized`, which keeps a weight's size.

    python benchmarks/leaderboard_folding.py

Part of `make leaderboard`; trains 8-bit rows of seed 0 with folded norms as rows are, without `Sized`, and with norms
as they are; APoT also without taking means out of filters. Each is evaluated as deployed, with the statistics of each
batch, and with running ones of 100 more batches; running σ is compared with the σ that it began with.
Writes results/leaderboard_folding.json.
"""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from bitwright import GridConfig, TrainConfig, Trainer
from bitwright.backends import backend
from bitwright.bench.float_networks import FloatNetworks
from bitwright.bench.grid import RowTask
from bitwright.bench.grid_row import RowOutcome, gave_up, plan_of
from bitwright.core.task_store import open_study
from bitwright.core.tensor_tree import as_call
from bitwright.quantizers import Layout
from bitwright.quantizers.levels import Sized
from bitwright.workload import evaluate

HERE = Path(__file__).parent
PLACES = (("residual-fashion-mnist", "tensorrt"), ("depthwise-cifar10", "tvm"))
ALGORITHMS = ("lsq", "pact", "dorefa", "qil", "apot")
BITS, SEED = 8, 0
WAYS = {"folded": 4, "folded, sizes lost": 4, "norms as they are": -1, "folded, means kept": 4}


def deviations(model: nn.Module) -> dict[str, float]:
    """Running σ by norm, mean of channels."""
    found = {}
    for name, norm in model.named_modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None:
            found[name] = float(torch.sqrt(norm.running_var + norm.eps).mean())
    return found


def run(task: RowTask, starts: FloatNetworks) -> dict[str, Any]:
    start = starts(task)
    plan, beyond = plan_of(task, backend(task.backend), start.graph, start.workload.name)
    workload = replace(start.workload, model=copy.deepcopy(start.workload.model))
    config = TrainConfig(
        seed=task.seed,
        quantizer_lr=task.algorithm.quantizer_lr,
        quantizer_decay=task.algorithm.quantizer_decay,
        drop_last=True,
        **task.training.model_dump(),
    )
    target = "academic" if beyond else task.backend
    model = Trainer(workload, precision=plan, backend=target, config=config).fit().model.eval()
    accuracy = evaluate(workload, model)[workload.metric]
    before, after = deviations(start.workload.model), deviations(model)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.train().momentum = 0.0  # statistics of the batch, and nothing of it is kept
    of_batches = evaluate(workload, lambda *inputs: model(*inputs))[workload.metric]
    settle(model, list(workload.calibration() if workload.calibration is not None else ()))
    settled = evaluate(workload, model)[workload.metric]
    grown = [after[name] / before[name] for name in before]
    return {
        "accuracy": accuracy,
        "statistics of batches": of_batches,
        "after more batches": settled,
        "sigma": [min(grown), max(grown)],
    }


@torch.no_grad()
def settle(model: nn.Module, batches: list[Any], steps: int = 100) -> None:
    """Statistics of 100 more batches, without training."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.train().momentum = 0.1
    for step in range(steps):
        args, kwargs = as_call(batches[step % len(batches)])
        model(*args, **kwargs)
    model.eval()


def scaled(layout: Layout, x: Tensor) -> Tensor:
    """APoT's standardised weight without its first half."""
    return x / layout.over(torch.std(layout.rows(x.detach()), dim=1, correction=0).clamp(min=1e-12), x)


def main() -> None:
    torch.set_num_threads(1)
    found = []
    study = open_study(None, "folding", {}, resume=True, kind=RowOutcome, gave_up=gave_up)
    starts = FloatNetworks(HERE / "leaderboard.starts", study)
    for way, bnfold in WAYS.items():
        grid = GridConfig.load(HERE / "leaderboard.yaml").model_copy(update={"bnfold": bnfold})
        for task in grid.tasks():
            place = (task.model.label, task.backend)
            if place not in PLACES or (task.bits, task.seed) != (BITS, SEED) or task.algorithm.label not in ALGORITHMS:
                continue
            if way == "folded, means kept" and task.algorithm.label != "apot":
                continue
            with ExitStack() as changed:
                if way == "folded, sizes lost":
                    changed.enter_context(patch.object(Sized, "preserves_magnitude", False))
                if way == "folded, means kept":
                    changed.enter_context(patch.object(Layout, "standardised", scaled))
                numbers = run(task, starts)
            row = {"model": place[0], "backend": place[1], "algorithm": task.algorithm.label, "way": way}
            found.append(row | numbers)
            print(found[-1], flush=True)
    study.close()
    (HERE / "results" / "leaderboard_folding.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
