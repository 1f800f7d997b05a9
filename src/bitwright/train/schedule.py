"""The learning rate as a function of the step: nothing to save, nothing to get out of step."""

from __future__ import annotations

from math import cos, pi

from bitwright.train.config import TrainConfig


def rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The share of the peak learning rate at `step` (from 0).

    >>> [round(rate(TrainConfig(epochs=2, warmup=0.5), step, 4), 3) for step in range(8)]
    [0.333, 0.667, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    """
    warm = round(config.warmup * steps_per_epoch)
    if step < warm:
        return (step + 1) / (warm + 1)
    if config.schedule == "constant":
        return 1.0
    total = config.epochs * steps_per_epoch
    return 0.5 * (1 + cos(pi * (step - warm) / max(total - warm, 1)))
