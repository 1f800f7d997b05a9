"""A workload whose speed is known: the forward pass sleeps for each sample, on some ranks and steps longer."""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bitwright import Cluster, ClusterReplanner, DriftSettings, Workload
from bitwright.cluster import Link

BATCH = 16


class Paced(nn.Module):
    """Two layers. `seconds` per sample are slept in training, times the factor of the current forward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.factor, self.calls = seconds, 1.0, 0
        self.slow: range = range(0)
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            time.sleep(len(x) * self.seconds * (self.factor if self.calls in self.slow else 1.0))
            self.calls += 1
        out: Tensor = self.second(F.relu(self.first(x)))
        return out


def workload(seconds: float = 0.0, samples: int = 1000) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=generator)
    y = x[:, :3].argmax(1)
    torch.manual_seed(0)
    return Workload(
        name="paced",
        model=Paced(seconds),
        inputs=(x[:1],),
        evaluation=lambda: [(x[:200], y[:200])],
        training=lambda: TensorDataset(x, y),
        loss=F.cross_entropy,
    )


def replanner(work: Workload, kinds: str = "a,b", **settings: float) -> ClusterReplanner:
    """A planner with profiles from a data sheet: far from the truth, until steps are measured."""
    from bitwright import profile

    device = profile(work, published="nvidia-t4", kernels=["int8"], batch=BATCH)
    names = dict.fromkeys(kinds.split(","), 1)
    cluster = Cluster.of(names, link=Link(latency_us=50, gbit_per_s=10))
    scores = {"first": {"int8": 0.1}, "second": {"int8": 0.2}}
    chosen = DriftSettings(**settings)  # type: ignore[arg-type]
    return ClusterReplanner(cluster, scores, profiles=dict.fromkeys(names, device), settings=chosen)


def main_workload() -> Workload:
    """For the command line."""
    return workload(float(os.environ.get("PACED_SECONDS", "0")))
