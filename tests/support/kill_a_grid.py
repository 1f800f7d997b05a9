"""Run a grid in processes that are killed at random moments; print what became of it.

It forks, so that torch is imported once: python kill_a_grid.py FOLDER KILLS [STORE]
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from grid_workloads import algorithm, grid

from bitwright import GridConfig, Leaderboard, run_grid


def run(folder: Path, store: str | None = None) -> tuple[Leaderboard, list[str]]:
    """The leaderboard, and the rows that this process ran."""
    config = GridConfig.parse(
        grid(
            folder,
            algorithms=[algorithm("lsq"), algorithm("dsq")],
            backends=["academic", "tvm"],
            bits=[8, 4],
            store=store or str(folder / "grid.db"),
        ),
        where="grid",
        folder=folder,
    )
    own: list[str] = []
    board = run_grid(config, starts=folder / "starts", watch=lambda told: own.append(told.task.key))
    return board, own


def main(folder: Path, kills: int, store: str | None = None) -> None:
    generator, killed = random.Random(0), 0
    while killed < kills:
        child = os.fork()
        if child == 0:
            run(folder)
            os._exit(0)
        time.sleep(generator.uniform(0.1, 3.0))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break  # it came to its end before
        killed += 1
    board, own = run(folder, store)
    rows = [[row.id, row.status, row.accuracy, row.attempts] for row in board.rows]
    sys.stdout.write(json.dumps({"killed": killed, "rows": rows, "own": own}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
