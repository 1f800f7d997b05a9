"""The reference runtime: an integer-only executor in NumPy."""

from bitwright.deployment.runtimes.reference.runtime import Reference

__all__ = [
    "Reference",
]
