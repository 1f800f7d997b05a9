"""Measure models on this machine's runtimes; grids of trainings and their leaderboards."""

from bitwright.bench.deployment import Deployment, deploy, quantize_workload
from bitwright.bench.grid import GridConfig
from bitwright.bench.leaderboard import Leaderboard
from bitwright.bench.markdown import markdown
from bitwright.bench.rerun import Again, run_again
from bitwright.bench.run_grid import Told, run_grid
from bitwright.bench.runtime_comparison import benchmark

__all__ = [
    "Again",
    "Deployment",
    "GridConfig",
    "Leaderboard",
    "Told",
    "benchmark",
    "deploy",
    "markdown",
    "quantize_workload",
    "run_again",
    "run_grid",
]
