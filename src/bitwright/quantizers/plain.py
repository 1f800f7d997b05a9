"""The plain quantizer: round to the nearest code. The gradient is 1 where nothing is clipped."""

from __future__ import annotations

from torch import Tensor

from bitwright.quantizers.base import Quantizer
from bitwright.quantizers.rounding import round_to_grid


class Plain(Quantizer):
    """x̂ = (clamp(round(x/s) + z, n, p) − z)·s, ∂x̂/∂x = 1 inside the range and 0 outside."""

    own_kernels = True
    signed_scales = True

    def quantize(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Round to the grid."""
        return round_to_grid(x, self.grid(), self.layout, relu=relu, half=True, fused=self.compiled)

    def quantize_relu(self, x: Tensor) -> Tensor:
        return self.quantize(x, relu=True)
