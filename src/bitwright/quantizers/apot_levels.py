"""The levels of APoT: sums of powers of two."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def levels(bits: int) -> list[float]:
    """The 2^bits levels in [0, 1]: each two bits choose 0 or one of three powers; an odd bit, 0 or one power."""
    pairs = bits // 2
    third = 2 * pairs + bits % 2
    terms = [[0.0, 2.0**-j, 2.0 ** -(j + pairs), 2.0 ** -(j + third)] for j in range(1, pairs + 1)]
    if bits % 2:
        terms.append([0.0, 2.0**-third])
    sums = sorted({sum(chosen) for chosen in product(*terms)})
    return [value / sums[-1] for value in sums]


def nearest(x: Tensor, levels: list[float]) -> Tensor:
    """What is nearest to each number of [−1, 1] among the levels and their negatives."""
    known = torch.tensor(levels, device=x.device)
    return known[torch.bucketize(x.abs(), (known[1:] + known[:-1]) / 2)] * torch.sign(x)
