"""Benchmarks: one model on all runtimes; grids of trainings and their leaderboards."""

from bitwright.bench.grid import GridConfig
from bitwright.bench.leaderboard import Leaderboard
from bitwright.bench.run_grid import Rerun, RowProgress, rerun_rows, run_grid
from bitwright.bench.runtime_comparison import benchmark

__all__ = [
    "GridConfig",
    "Leaderboard",
    "Rerun",
    "RowProgress",
    "benchmark",
    "rerun_rows",
    "run_grid",
]
