"""Measure models on this machine's runtimes."""

from bitwright.bench.made import Made
from bitwright.bench.runtimes import compare_runtimes

__all__ = ["Made", "compare_runtimes"]
