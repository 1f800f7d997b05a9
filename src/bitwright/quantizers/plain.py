"""The plain quantizer: round to the nearest code; the gradient passes where nothing is clipped."""

from __future__ import annotations

from torch import Tensor

from bitwright.attach import Quantizer, round_to_grid


class Plain(Quantizer):
    """x̂ = (clamp(round(x/s) + z, n, p) − z)·s, ∂x̂/∂x = 1 inside the range and 0 outside."""

    own_kernels = True

    def quantize(self, x: Tensor, *, relu: bool = False) -> Tensor:
        """Round to the grid."""
        scale, zero_point = self.layout.spread(self.scale, x), self.layout.spread(self.zero_point, x)
        return round_to_grid(x, scale, zero_point, self.qmin, self.qmax, relu=relu, half=True, fused=self.compiled)

    def quantize_relu(self, x: Tensor) -> Tensor:
        """In one pass."""
        return self.quantize(x, relu=True)
