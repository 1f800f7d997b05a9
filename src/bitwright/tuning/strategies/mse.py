"""mse: move operators to float by the error of their inputs."""

from __future__ import annotations

from bitwright.tuning.search import CandidateGenerator, Search, worst_first


def mse(search: Search) -> CandidateGenerator:
    """Operators by the mean squared error between float and quantized activations, worst first."""
    yield from worst_first(search, search.by_mse())
