"""Whether LSQ+ moves zero points in the training of the reference leaderboard, and how far it is from LSQ if not.

    python benchmarks/leaderboard_zero_points.py

Part of `make leaderboard`; trains the 4-bit rows of seed 0 on the residual network by lsq and by lsqplus, and compares
zero points before and after, and weights after each step. Writes results/leaderboard_zero_points.json.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bitwright import GridConfig, TrainConfig, Trainer
from bitwright.backends import backend
from bitwright.bench.float_networks import FloatNetworks
from bitwright.bench.grid import RowTask
from bitwright.bench.grid_row import RowOutcome, gave_up, plan_of
from bitwright.core.task_store import open_study
from bitwright.quantizers import quantizers_of
from bitwright.training import Callback
from bitwright.training.run import TrainingRun
from bitwright.workload import evaluate

HERE = Path(__file__).parent
BACKENDS = ("snpe", "onnxruntime")


class Watched(Callback):
    """Zero points at the start and now, and weights after each step."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.weights: list[dict[str, Tensor]] = []

    def on_start(self, run: TrainingRun) -> None:
        self.before = zero_points(run.model)

    def on_step(self, run: TrainingRun) -> None:
        named = run.model.named_parameters()
        self.weights.append({name: p.detach().clone() for name, p in named if not name.endswith("zero_point")})


def zero_points(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        site: one.zero_point.detach().clone()
        for site, one in quantizers_of(model).items()
        if not one.spec.format.symmetric and not one.of
    }


def train(task: RowTask, starts: FloatNetworks) -> tuple[float, Watched, dict[str, float]]:
    start, watched = starts(task), Watched()
    plan, beyond = plan_of(task, backend(task.backend), start.graph, start.workload.name)
    workload = replace(start.workload, model=copy.deepcopy(start.workload.model))
    config = TrainConfig(seed=task.seed, quantizer_lr=task.algorithm.quantizer_lr, **task.training.model_dump())
    target = "academic" if beyond else task.backend
    model = Trainer(workload, precision=plan, backend=target, config=config, callbacks=[watched]).fit().model
    after = zero_points(model)
    moved = {site: float((after[site] - before).abs().max()) for site, before in watched.before.items()}
    return evaluate(workload, model)[workload.metric], watched, moved


def main() -> None:
    torch.set_num_threads(1)
    grid = GridConfig.load(HERE / "leaderboard.yaml")
    found = []
    study = open_study(None, "zero points", {}, resume=True, kind=RowOutcome, gave_up=gave_up)
    starts = FloatNetworks(HERE / "leaderboard.starts", study)
    for name in BACKENDS:
        tasks = {
            task.algorithm.label: task
            for task in grid.tasks()
            if (task.backend, task.bits, task.seed) == (name, 4, 0) and task.model.label == "residual-fashion-mnist"
        }
        (lsq, plain, _), (lsqplus, learned, moved) = (train(tasks[label], starts) for label in ("lsq", "lsqplus"))
        apart = [
            max(float((one[key] - other[key]).abs().max()) for key in one)
            for one, other in zip(plain.weights, learned.weights, strict=True)
        ]
        found.append(
            {
                "backend": name,
                "rows": [tasks["lsq"].key, tasks["lsqplus"].key],
                "accuracy": [lsq, lsqplus],
                "sites": len(moved),
                "moved": max(moved.values()),
                "steps": len(apart),
                "apart": [apart[0], apart[-1]],
            }
        )
        print(found[-1])
    study.close()
    (HERE / "results" / "leaderboard_zero_points.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
