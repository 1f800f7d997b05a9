"""Where a run's tensors are, and how images lie in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.graph.tree import map_tensors


@dataclass(frozen=True, kw_only=True)
class Placing:
    """A device, and a layout of images."""

    device: torch.device
    channels_last: bool

    def model(self, model: nn.Module) -> nn.Module:
        """The same module, put there in place."""
        model = model.to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def __call__(self, value: Any) -> Any:
        """All tensors in a value."""
        if self.device.type == "cpu" and not self.channels_last:
            return value
        return map_tensors(value, self._tensor)

    def _tensor(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device, non_blocking=True)
        if self.channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor
