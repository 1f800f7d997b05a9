"""Operators that run in low precision, forward and backward."""

from bitwright.kernels.kernel import Kernel, kernel

__all__ = ["Kernel", "kernel"]
