"""Straight lines with non-negative coefficients, and how good they are at sizes that they haven't seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """Coefficients, R², and the largest relative error at sizes that a fit of the others had not seen."""

    coefficients: tuple[float, ...]
    r2: float
    held_out: float | None


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], *, hold_out: int = 3) -> Fit:
    """Least squares in which an error counts by the root of the time: small sizes count, and large ones more.

    That is how times spread on a machine that stands still now and then.

    How far it can be trusted is seen by holding every `hold_out`-th size out; what is given is fitted to all.

    >>> found = fit([(n, 1.0) for n in range(1, 10)], [2.0 * n + 1.0 for n in range(1, 10)])
    >>> [round(c, 6) for c in found.coefficients], round(found.r2, 6)
    ([2.0, 1.0], 1.0)
    """
    x, y = np.asarray(rows, float), np.asarray(seconds, float)
    held = np.zeros(len(y), bool)
    if len(y) > 2 * x.shape[1]:
        held[1::hold_out] = True
    error = float(np.max(np.abs(x[held] @ _solve(x[~held], y[~held]) / y[held] - 1))) if held.any() else None
    coefficients = _solve(x, y)
    rest = y - x @ coefficients
    spread = float(np.sum((y - y.mean()) ** 2))
    return Fit(tuple(map(float, coefficients)), 1.0 - float(np.sum(rest**2)) / spread if spread else 1.0, error)


def _solve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls  # takes most of a second; only a profile that is made waits for it

    weights = 1.0 / np.sqrt(np.maximum(y, 1e-12))
    scaled = x * weights[:, None]
    sizes = np.maximum(np.abs(scaled).max(axis=0), 1e-300)  # elements and a constant differ by many orders
    solution: np.ndarray = nnls(scaled / sizes, y * weights)[0] / sizes
    return solution
