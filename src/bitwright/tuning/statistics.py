"""What may be said from a part of the data, and whether two models really differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

ERROR = 1e-3
"""How likely a candidate that would pass is given up on a part of the data, at most, for each candidate."""


def hopeless(hits: int, looked_at: int, samples: int, required: int, error: float = ERROR) -> bool:
    """Whether a model with `hits` on a random part of the data can be given up.

    The part is drawn without replacement, so the number of hits in it has a hypergeometric distribution. If the model
    had the `required` hits on all `samples`, so few hits in the part would have at most the probability `error`. This
    is exact: no normal approximation, no independence of samples.

    >>> hopeless(40, 64, 1000, 900), hopeless(56, 64, 1000, 900)
    (True, False)
    """
    if required <= 0:
        return False
    if required > samples:
        return True
    from scipy.stats import hypergeom  # takes most of a second, also here below

    return bool(hypergeom.cdf(hits, samples, required, looked_at) <= error)


def required_hits(required_percent: float, samples: int) -> int:
    """The fewest hits whose percentage is good enough.

    >>> required_hits(90.0, 1000), required_hits(89.95, 1000)
    (900, 900)
    """
    hits = max(0, math.floor(required_percent * samples / 100) - 1)
    while 100.0 * hits / samples < required_percent:
        hits += 1
    return hits


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two classifiers on the same samples."""

    only_float: int
    """Samples that only the float model gets right."""
    only_quantized: int
    p_value: float
    """McNemar's test, exact: how likely so uneven a split of the differing samples is if both are equally good."""


def mcnemar(only_float: int, only_quantized: int) -> Paired:
    """Exact (binomial) form.

    >>> round(mcnemar(2, 10).p_value, 4)
    0.0386
    """
    from scipy.stats import binomtest

    differing = only_float + only_quantized
    p_value = float(binomtest(only_float, differing).pvalue) if differing else 1.0
    return Paired(only_float=only_float, only_quantized=only_quantized, p_value=p_value)
