"""Measure models on this machine's runtimes."""

from bitwright.bench.runtimes import compare_runtimes

__all__ = ["compare_runtimes"]
