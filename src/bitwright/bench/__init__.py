"""Measure models on this machine's runtimes; grids of trainings and their leaderboards."""

from bitwright.bench.grid import GridConfig
from bitwright.bench.leaderboard import Leaderboard
from bitwright.bench.rerun import Again, run_again
from bitwright.bench.run_grid import Told, run_grid
from bitwright.bench.runtime_comparison import benchmark

__all__ = [
    "Again",
    "GridConfig",
    "Leaderboard",
    "Told",
    "benchmark",
    "run_again",
    "run_grid",
]
