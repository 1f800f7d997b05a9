"""Quantizers in MQBench's style, as users of MQBench have written them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from bitwright.importers.mqbench import MqbenchQuantizer, QuantizeBase, pot_quantization


class LearnableFakeQuantize(QuantizeBase):
    """Learns the scale and the zero point; the observer gives the first ones."""

    def __init__(
        self, observer: Any, scale: float = 1.0, use_grad_scaling: bool = True, **observer_kwargs: Any
    ) -> None:
        super().__init__(observer, **observer_kwargs)
        self.use_grad_scaling = use_grad_scaling
        self.scale = Parameter(torch.tensor([scale]))
        self.zero_point = Parameter(torch.tensor([0.0]))
        self.register_buffer("eps", torch.tensor([torch.finfo(torch.float32).eps]))

    def forward(self, X: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1:
            self.activation_post_process(X.detach())
            scale, zero_point = self.activation_post_process.calculate_qparams()
            if self.ch_axis != -1:
                self.scale.data = torch.ones_like(scale)
                self.zero_point.data = torch.zeros_like(zero_point)
            self.scale.data.copy_(scale)
            self.zero_point.data.copy_(zero_point)
        else:
            self.scale.data.abs_()
            self.scale.data.clamp_(min=self.eps.item())
        if self.fake_quant_enabled[0] == 1:
            if self.is_symmetric_quant:
                self.zero_point.data.zero_()
            else:
                self.zero_point.data.clamp_(self.quant_min, self.quant_max)
            scale = pot_quantization(self.scale) if self.pot_scale else self.scale
            shape = [1] * X.dim()
            count = X.numel()
            if self.is_per_channel:
                shape[self.ch_axis] = X.shape[self.ch_axis]
                count //= X.shape[self.ch_axis]
            factor = (count * self.quant_max) ** -0.5 if self.use_grad_scaling else 1.0
            s, z = (_scaled(one, factor).reshape(shape) for one in (scale, _rounded(self.zero_point)))
            codes = torch.clamp(_rounded(X / s + z), self.quant_min, self.quant_max)
            X = (codes - z) * s
        return X


class PACTFakeQuantize(QuantizeBase):
    """Learns where the range ends; the scale follows from it in every forward."""

    def __init__(self, observer: Any, alpha: float = 6.0, **observer_kwargs: Any) -> None:
        super().__init__(observer, **observer_kwargs)
        self.register_parameter("alpha", Parameter(torch.tensor([float(alpha)])))
        if not self.is_symmetric_quant:
            self.register_parameter("n_alpha", Parameter(torch.tensor([-float(alpha)])))

    def forward(self, X: Tensor) -> Tensor:
        own = self.activation_post_process
        if self.observer_enabled[0] == 1:
            own(X.detach())
            self.scale, self.zero_point = self.calculate_qparams()
        if self.fake_quant_enabled[0] == 1:
            low = torch.zeros_like(self.alpha) if self.quant_min == 0 else -self.alpha
            low = low if self.is_symmetric_quant else self.n_alpha
            X = torch.where(self.alpha < X, self.alpha, X)
            X = torch.where(low > X, low, X)
            own.max_val.data.fill_(self.alpha.data[0])
            own.min_val.data.fill_(low.detach()[0])
            self.scale, self.zero_point = self.calculate_qparams()
            shape = [1] * X.dim()
            if self.is_per_channel:
                shape[self.ch_axis] = -1
            s, z = self.scale.reshape(shape), self.zero_point.reshape(shape)
            codes = torch.clamp(torch.round(X / s) + z, self.quant_min, self.quant_max)
            X = ((codes - z) * s - X).detach() + X
        return X


class FixedFakeQuantize(QuantizeBase):
    """Learns nothing; uses torch's functions."""

    def __init__(self, observer: Any, **observer_kwargs: Any) -> None:
        super().__init__(observer, **observer_kwargs)
        self.register_buffer("scale", torch.tensor([1.0]))
        self.register_buffer("zero_point", torch.tensor([0]))

    def forward(self, X: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1:
            self.activation_post_process(X.detach())
            scale, zero_point = self.calculate_qparams()
            if self.scale.shape != scale.shape:
                self.scale.resize_(scale.shape)
                self.zero_point.resize_(zero_point.shape)
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)
        if self.fake_quant_enabled[0] == 1:
            low, high = self.quant_min, self.quant_max
            if self.is_per_channel:
                zero_point = self.zero_point.int()
                X = torch.fake_quantize_per_channel_affine(X, self.scale, zero_point, self.ch_axis, low, high)
            else:
                scale, zero = self.scale.item(), int(self.zero_point.item())
                X = torch.fake_quantize_per_tensor_affine(X, scale, zero, low, high)
        return X


class HalfStep(QuantizeBase):
    """Has levels between those of its scale."""

    def forward(self, X: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1:
            self.scale, self.zero_point = self.calculate_qparams()
        shape = (-1, *(1,) * (X.dim() - 1)) if self.is_per_channel else (1,)
        s = self.scale.reshape(shape)
        steps = torch.clamp(_rounded(X / s - 0.5), self.quant_min, self.quant_max - 1)
        return (steps + 0.5) * s


def _rounded(x: Tensor) -> Tensor:
    return (x.round() - x).detach() + x


def _scaled(x: Tensor, factor: float) -> Tensor:
    return (x - x * factor).detach() + x * factor


class OurLsq(MqbenchQuantizer):
    quantize_base = LearnableFakeQuantize


class OurPact(MqbenchQuantizer):
    quantize_base = PACTFakeQuantize


class OurFixed(MqbenchQuantizer):
    quantize_base = FixedFakeQuantize


class OurHalfStep(MqbenchQuantizer):
    quantize_base = HalfStep
