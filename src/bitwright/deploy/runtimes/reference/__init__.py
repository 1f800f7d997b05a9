"""The integer-only executor: what targets without floats compute, in NumPy."""

from bitwright.deploy.runtimes.reference.runtime import Reference

__all__ = [
    "Reference",
]
