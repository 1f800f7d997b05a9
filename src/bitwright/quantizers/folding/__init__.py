"""Batch norms folded into the operator before them, on the fly; one file for each strategy."""

from __future__ import annotations

from torch import nn

from bitwright.plan import FoldSpec
from bitwright.quantizers.folding.fold import Fold
from bitwright.quantizers.folding.strategies import BatchFold, CorrectedFold, ExplicitFold, FrozenFold, StaticFold

BY_STRATEGY: dict[int, type[Fold]] = {0: StaticFold, 1: FrozenFold, 2: BatchFold, 3: CorrectedFold, 4: ExplicitFold}


def make_fold(spec: FoldSpec, norm: nn.Module, kind: str, site: str) -> Fold:
    """The fold that a plan's entry asks for; `site` is that of the folded bias."""
    return BY_STRATEGY[spec.strategy](norm, kind, site, sync=spec.sync)


__all__ = ["BY_STRATEGY", "Fold", "make_fold"]
