"""Strategy 0: folded once and for all: from then on there is no norm, only the operator's weight and bias train.

The float keys stay, so the fold is computed at each step, but from numbers that nothing in training moves: μ, σ, γ
and β. The weight trains through the fixed factor γ/σ. A checkpoint that is loaded still brings its own.
"""

from __future__ import annotations

from torch import Tensor, nn

from bitwright.attach.folding.frozen import Frozen


class Once(Frozen):
    """Fold with everything of the norm fixed."""

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """γ and β as constants."""
        gamma, beta = super().affine()
        return (None if gamma is None else gamma.detach()), (None if beta is None else beta.detach())

    def attached(self) -> None:
        """Tell optimizers and DDP, which waits for the gradient of every parameter that wants one."""
        super().attached()
        self.trained = [p for p in self._own() if p.requires_grad]
        for parameter in self.trained:
            parameter.requires_grad_(False)

    def detached(self) -> None:
        """What trained before trains again."""
        for parameter in self.trained:
            parameter.requires_grad_(True)

    def _own(self) -> list[nn.Parameter]:
        return list(self.norm.parameters(recurse=False))
