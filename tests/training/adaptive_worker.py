"""One of two ranks of an adaptive run, in which rank 1 is slower for a while."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import two_ranks
from paced import BATCH, replanner, workload

from bitwright import TrainConfig, Trainer


def main(rank: int) -> dict[str, Any]:
    work = workload(0.003)
    planner = replanner(work)
    if rank == 1:
        work.model.factor, work.model.slow = 3.0, range(20, 50)
    config = TrainConfig(epochs=3, batch=BATCH, lr=0.05, log_steps=1)
    out = Path(os.environ["ADAPTIVE_OUT"])
    result = Trainer(work, adaptive=planner, kind="a,b", config=config, out=out, resume="auto", device="cpu").fit()
    return {"notes": result.notes, "steps": result.steps, "calls": work.model.calls}


if __name__ == "__main__":
    two_ranks.work(main)
