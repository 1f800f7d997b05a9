"""Check whether calibration data is varied enough for meaningful ranges."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitwright.core.errors import Problem
from bitwright.core.tensor_tree import batch_size, tensors_in


class CalibrationData:
    """Inspects calibration batches for missing variety."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.varied: set[str] = set()
        self.unequal = False
        self.samples = 0
        self.empty = 0

    def see(self, batch: Any) -> Any:
        """Inspect one batch and return it."""
        tensors = [(path, tensor) for path, tensor in tensors_in(batch) if tensor.dim()]
        self.empty += bool(tensors) and all(tensor.numel() == 0 for _, tensor in tensors)
        self.samples += batch_size(batch)
        for path, tensor in tensors:
            if tensor.numel() == 0:
                continue
            first = self.first.setdefault(path, tensor[:1].detach().clone())
            if path not in self.varied and bool((tensor != first.flatten()[0]).any()):
                self.varied.add(path)
            if not self.unequal and (tensor.shape[1:] != first.shape[1:] or bool((tensor != first).any())):
                self.unequal = True
        return batch

    def warnings(
        self,
        name: str = "the calibration data",
        *,
        fix: str = "calibrate with a few hundred samples of real data, with the preprocessing used in production",
        suffix: str = "calibration",
    ) -> tuple[Problem, ...]:
        """The problems of the data. Their codes end with `suffix`."""
        found = []
        if self.empty:
            what = f"{self.empty} batches of {name} are empty"
            found.append(Problem(what=what, fix="check the loader's batches", code=f"empty-{suffix}"))
        if self.first and not self.varied and any(tensor.numel() > 1 for tensor in self.first.values()):
            values = ", ".join(f"{path or 'input'} = {t.flatten()[0].item():g}" for path, t in self.first.items())
            what = f"all values of {name} are the same ({values}), so ranges are meaningless"
            found.append(Problem(what=what, fix=fix, code=f"constant-{suffix}"))
        elif self.samples > 1 and self.first and not self.unequal:
            what = f"all {self.samples} samples of {name} are identical"
            found.append(Problem(what=what, fix=fix, code=f"constant-{suffix}"))
        return tuple(found)
