"""Batch norms folded into the operator before them, on the fly; one file for each strategy."""

from __future__ import annotations

from torch import nn

from bitwright.attach.folding.batch import Batch
from bitwright.attach.folding.corrected import Corrected
from bitwright.attach.folding.explicit import Explicit
from bitwright.attach.folding.fold import Fold
from bitwright.attach.folding.frozen import Frozen
from bitwright.attach.folding.once import Once
from bitwright.plan import FoldSpec

BY_STRATEGY: dict[int, type[Fold]] = {0: Once, 1: Frozen, 2: Batch, 3: Corrected, 4: Explicit}


def make_fold(spec: FoldSpec, norm: nn.Module, kind: str, site: str) -> Fold:
    """The fold that a plan's entry asks for; `site` is that of the folded bias."""
    return BY_STRATEGY[spec.strategy](norm, kind, site, sync=spec.sync)


__all__ = ["BY_STRATEGY", "Fold", "make_fold"]
