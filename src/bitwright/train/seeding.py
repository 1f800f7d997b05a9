"""Random numbers without state: what a step draws depends on the seed and on which step it is, on nothing before.

So a run that is resumed in mid-epoch draws what an unbroken one would have drawn, without saving generators.
"""

from __future__ import annotations

import hashlib
import random

import numpy
import torch


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from a few words.

    >>> seed_of(0, "step", 1) == seed_of(0, "step", 1), seed_of(0, "step", 1) == seed_of(0, "step", 2)
    (True, False)
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_all(*parts: int | str) -> None:
    """Seed Python, NumPy and torch: augmentation code uses any of them."""
    seed = seed_of(*parts)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
