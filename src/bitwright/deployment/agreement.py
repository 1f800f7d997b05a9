"""Agreement of output tensors: the runtime's with the simulation's, and both with the float model's."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log10
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.errors import ArtefactError

MIN_SQNR = 30.0
# Codes may differ by one if a sum is near a rounding boundary, and such flips propagate through a deep network. Real
# differences in arithmetic (saturation, another scale) cause a larger error than quantization itself.
MAX_SHARE = 0.5  # of the quantization error, for an output; a single site may differ by the whole quantization error


def decibels(signal: float, error: float) -> float:
    """The ratio of two energies in dB."""
    return inf if error == 0 else -inf if error == inf else 10 * log10(max(signal, 1e-300) / error)


def share_of(error: float, quantization: float) -> float:
    """The ratio of two errors, as amplitudes."""
    if error == 0:
        return 0.0
    return (error / quantization) ** 0.5 if quantization else inf


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Convert a tensor to NumPy; bfloat16 becomes float32, which has the same values."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """The agreement of one output between runtime and simulation."""

    name: str
    sqnr_db: float
    max_error: float
    cosine: float
    top1_agreement: float | None
    quantization_share: float
    """The runtime's deviation relative to the quantization error (simulation against float)."""

    @property
    def passed(self) -> bool:
        """Whether the deviation is small, absolutely or relative to the quantization error."""
        return self.sqnr_db >= MIN_SQNR or self.quantization_share <= MAX_SHARE


@dataclass
class AgreementSums:
    """Sums of one output over all batches."""

    signal: float = 0.0
    error: float = 0.0
    quantization: float = 0.0
    dot: float = 0.0
    other: float = 0.0
    exact: float = 0.0
    largest: float = 0.0
    agree: int = 0
    agree_with_float: int = 0
    rows: int = 0

    def add(self, simulated: NDArray[Any], real: NDArray[Any], exact: NDArray[Any]) -> None:
        """Add the outputs of one batch. Equal infinities count as agreement."""
        s, r, f = (a.astype(np.float64) for a in (simulated, real, exact))
        if s.ndim == 2 and s.shape[1] > 1:
            self.agree += int((s.argmax(1) == r.argmax(1)).sum())
            self.agree_with_float += int((s.argmax(1) == f.argmax(1)).sum())
            self.rows += s.shape[0]
        with np.errstate(over="ignore", invalid="ignore"):
            self._add(s, r, f)

    def _add(self, s: NDArray[np.float64], r: NDArray[np.float64], f: NDArray[np.float64]) -> None:
        error, quantization = _difference(r, s), _difference(s, f)
        s, r, f = (np.where(np.isfinite(a), a, 0.0) for a in (s, r, f))
        self.signal += float((s * s).sum())
        self.exact += float((f * f).sum())
        self.other += float((r * r).sum())
        self.dot += float((s * r).sum())
        self.error += float((error**2).sum())
        self.quantization += float((quantization**2).sum())
        self.largest = max(self.largest, float(np.abs(error).max(initial=0.0)))

    def result(self, name: str) -> OutputCheck:
        """Convert the sums to metrics."""
        return OutputCheck(
            name=name,
            sqnr_db=decibels(self.signal, self.error),
            max_error=self.largest,
            cosine=self.dot / max((self.signal * self.other) ** 0.5, 1e-300),
            top1_agreement=self.agree / self.rows if self.rows else None,
            quantization_share=share_of(self.error, self.quantization),
        )


def _difference(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """`one - other`, where equal infinities differ by 0."""
    return np.where(one == other, 0.0, one - other)


def refuse_nan(path: str, *, simulated: NDArray[Any], real: NDArray[Any], exact: NDArray[Any], runtime: str) -> None:
    """Raise an error if an output contains NaN, which can't agree; it names the first model that computed NaN."""
    has_nan = {
        name: bool(np.isnan(array).any())
        for name, array in (("float", exact), ("simulated", simulated), (runtime, real))
        if np.issubdtype(array.dtype, np.floating)
    }
    if not any(has_nan.values()):
        return
    if has_nan.get("float"):
        what, fix = "the float model returns NaN for these inputs", "fix the model or the inputs"
    elif has_nan.get("simulated"):
        what, fix = "the quantized model returns NaN where the float model doesn't", "keep the sites before it in float"
    else:
        what, fix = f"{runtime} returns NaN where the simulated model doesn't", "check with per_site=True for the site"
    raise ArtefactError(what, where=path or "output", fix=fix, code="nan-output")
