"""The numbers that the kit shows to what it checks."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0, positive: bool = False) -> Tensor:
    """Normal numbers with a few outliers; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.05, x * 3, x)
    return x.abs() if positive else x


def demand(holds: bool, who: str, what: str) -> None:
    """An AssertionError that says who fails at what; also under `python -O`."""
    if not holds:
        raise AssertionError(f"{who}: {what}")
