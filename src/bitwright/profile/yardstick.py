"""A small fixed piece of work: how fast is this machine just now, compared with when it was profiled?"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(16, 16, 32, 32, generator=generator)
    kernel = torch.randn(16, 16, 3, 3, generator=generator)
    return image, kernel, torch.randn(1 << 18, generator=generator)


@torch.no_grad()
def yardstick(clock: Callable[[], float]) -> float:
    """Seconds of a convolution and a few passes over memory, as models have them."""
    image, kernel, flat = _tensors()
    start = clock()
    for _ in range(2):
        F.relu(F.conv2d(image, kernel, padding=1))
        (flat * 0.5).add_(1.0).round_()
    return clock() - start
