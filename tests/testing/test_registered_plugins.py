"""Everything that is registered, built-in or plugin, passes the kit."""

from __future__ import annotations

import pytest
import torch

from bitwright.core.registry import OBSERVERS, QUANTIZERS
from bitwright.testing import check_observer, check_quantizer

# A bias has no range of its own: its grid is the product of two others'. tests/deployment checks it.
WITHOUT_RANGE = {"product"}


@pytest.mark.parametrize("name", sorted(set(QUANTIZERS.names()) - WITHOUT_RANGE))
def test_quantizer(name: str) -> None:
    torch.set_num_threads(1)
    check_quantizer(QUANTIZERS.get(name))


@pytest.mark.parametrize("name", OBSERVERS.names())
def test_observer(name: str) -> None:
    torch.set_num_threads(1)
    check_observer(OBSERVERS.get(name))
