"""A named no-op that marks a site in an exported program; the artefact's writer puts real Q/DQ there."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("bitwright::site", mutates_args=())
def site_marker(x: Tensor, site: str) -> Tensor:
    """Marks that `x` passes the quantizer of `site`."""
    return x.clone()


@site_marker.register_fake
def _(x: Tensor, site: str) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bitwright::snapshot", mutates_args=())
def snapshot(x: Tensor) -> Tensor:
    """`x` as it is now; an operator of its own, which compilers keep instead of computing it again."""
    return x.clone()


@snapshot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
