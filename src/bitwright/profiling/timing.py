"""Interleaved repetitions, a reference workload, timer overhead, and linear fits of times."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bitwright.profiling.cost_key import is_loss
from bitwright.profiling.step_timer import Key, Sample, StepTimer

Name = TypeVar("Name")


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would be counted as work of the measured code."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def interleaved(
    work: Mapping[Name, Callable[[], float]], *, rounds: int, warm: int = 2, most: float = 20.0
) -> dict[Name, float]:
    """Run all pieces of work in turn and return the typical seconds of each. Stop after `most` seconds in total."""
    taken: dict[Name, list[float]] = {name: [] for name in work}
    with gc_disabled():
        spent = 0.0
        for number in range(rounds + warm):
            for name, run in work.items():
                seconds = run()
                spent += seconds
                if number >= warm or rounds == 0:
                    taken[name].append(seconds)
            if spent > most and number >= warm + 2:
                break
    return {name: typical(values) for name, values in taken.items()}


def middle_half(values: Iterable[Name], key: Callable[[Name], Any] | None = None) -> list[Name]:
    """Return the values without the lowest and the highest quarter.

    >>> middle_half([9, 1, 2, 4, 3, 100, 5, 6])
    [3, 4, 5, 6]
    """
    ordered = sorted(values, key=key)  # type: ignore[type-var, arg-type]
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def typical(values: Iterable[float]) -> float:
    """The mean of the middle half. Outliers don't count, but pauses that occur every other time do."""
    return statistics.fmean(middle_half(values))


@cache
def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(16, 16, 32, 32, generator=generator)
    kernel = torch.randn(16, 16, 3, 3, generator=generator)
    return image, kernel, torch.randn(1 << 18, generator=generator)


@torch.no_grad()
def yardstick(clock: Callable[[], float]) -> float:
    """Seconds of a fixed reference workload: a convolution and some passes over memory."""
    image, kernel, flat = _tensors()
    start = clock()
    for _ in range(2):
        F.relu(F.conv2d(image, kernel, padding=1))
        (flat * 0.5).add_(1.0).round_()
    return clock() - start


@dataclass(frozen=True, kw_only=True)
class TimerOverhead:
    """The overhead of the timer in seconds: per forward call, per backward call, and of the loss.

    It consists of clock readings, name lookups and cache misses. It is small compared with operators of a millisecond,
    but a tenth of a step whose operators take 30 µs.
    """

    forward: float = 0.0
    backward: float = 0.0
    loss: float = 0.0


def timer_overhead(timer: StepTimer, sample: Sample, plain: Mapping[str, float]) -> TimerOverhead:
    """Compare the sum of a timed step, as a prediction computes it, with the phases of a plain step."""
    host, batches = timer.host, timer.settings.accumulate
    loss = sum(seconds for (text, _), seconds in sample.forward.items() if is_loss(text))
    operators = {key: seconds for key, seconds in sample.forward.items() if not is_loss(key[0])}
    between = host.between(sample.operators, sample.hooked, prepared=timer.prepared)
    started = batches * host.start(sample.operators // batches)
    forward = sum(operators.values()) + between - plain["forward"]
    backward = sum(sample.backward.values()) + started - plain["backward"]
    return TimerOverhead(
        forward=_per_call(operators, sample.calls, forward),
        backward=_per_call(sample.backward, sample.calls, backward),
        loss=(loss - plain["loss"]) / batches,
    )


def _per_call(times: Mapping[Key, float], calls: Mapping[Key, int], over: float) -> float:
    """Distribute `over` equally among the calls, but no call gives more than its own time.

    >>> _per_call({("a", ""): 6.0, ("b", ""): 1.0}, {("a", ""): 2, ("b", ""): 1}, 5.0)
    2.0
    """
    left, level = sum(calls[key] for key in times), 0.0
    for level, count in sorted((times[key] / calls[key], calls[key]) for key in times):
        if left * level >= over:
            return over / left
        over -= level * count
        left -= count
    return level


@dataclass(frozen=True)
class Fit:
    """Coefficients, R², and the largest relative error at held-out sizes."""

    coefficients: tuple[float, ...]
    r2: float
    held_out: float | None


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], *, hold_out: int = 3) -> Fit:
    """Non-negative least squares, with errors weighted by the square root of the time.

    This weighting matches the spread of times on a machine with occasional pauses. The held-out error comes from a fit
    without every `hold_out`-th size; the result is fitted to all sizes.

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
    from scipy.optimize import nnls  # imported here because it takes most of a second

    weights = 1.0 / np.sqrt(np.maximum(y, 1e-12))
    scaled = x * weights[:, None]
    sizes = np.maximum(np.abs(scaled).max(axis=0), 1e-300)  # columns differ by orders of magnitude
    solution: np.ndarray = nnls(scaled / sizes, y * weights)[0] / sizes
    return solution
