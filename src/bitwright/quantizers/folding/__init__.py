"""Fold batch norms into the preceding operator at run time."""

from __future__ import annotations

from torch import nn

from bitwright.plan import FoldSpec
from bitwright.quantizers.folding.fold import Fold
from bitwright.quantizers.folding.strategies import BatchFold, CorrectedFold, ExplicitFold, FrozenFold, StaticFold

BY_STRATEGY: dict[int, type[Fold]] = {0: StaticFold, 1: FrozenFold, 2: BatchFold, 3: CorrectedFold, 4: ExplicitFold}


def make_fold(spec: FoldSpec, norm: nn.Module, kind: str, site: str) -> Fold:
    """Create the fold of a plan's entry. `site` is the site of the folded bias."""
    return BY_STRATEGY[spec.strategy](norm, kind, site, sync=spec.sync)


__all__ = ["BY_STRATEGY", "Fold", "make_fold"]
