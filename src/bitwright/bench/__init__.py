"""Benchmarks: one model on all runtimes; grids of trainings and their leaderboards."""

from bitwright.bench.benchmark import benchmark
from bitwright.bench.grid import GridConfig
from bitwright.bench.grid_run import Rerun, RowProgress, rerun_rows, run_grid
from bitwright.bench.leaderboard import Leaderboard

__all__ = [
    "GridConfig",
    "Leaderboard",
    "Rerun",
    "RowProgress",
    "benchmark",
    "rerun_rows",
    "run_grid",
]
