"""mse: move operators to float by the error of their inputs."""

from __future__ import annotations

from bitwright.tuning.search import Asking, Search
from bitwright.tuning.strategies.fallback import worst_first


def mse(search: Search) -> Asking:
    """Operators by the mean squared error between float and quantized activations, worst first."""
    yield from worst_first(search, search.by_mse())
