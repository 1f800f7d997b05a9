"""Averaged weights: a slow copy of the model's state, to be looked at or kept in the place of the fast one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """average ← d·average + (1−d)·now after each step; d rises to its value, so the start is soon forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the state after `step` (from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        now = model.state_dict()
        for name, average in self.average.items():
            average.lerp_(now[name], 1 - decay)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Make the average the model's state."""
        state = model.state_dict()
        for name, tensor in self.average.items():
            state[name].copy_(tensor)

    @contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """The average in the model, for a while."""
        state = model.state_dict()
        before = {name: state[name].detach().clone() for name in self.average}
        self.put(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in before.items():
                    state[name].copy_(tensor)
