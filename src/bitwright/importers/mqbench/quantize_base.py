"""Quantizer classes that were written for MQBench, as quantizers of Bitwright.

Such a class derives from `QuantizeBase`, has `scale` and `zero_point`, and rounds in `forward(X)`. Import
`QuantizeBase` from this module instead of MQBench, and name the class in a subclass of `MqbenchQuantizer`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitwright.core.errors import FormatError
from bitwright.core.formats import Format
from bitwright.quantizers import Grid, Quantizer, grid_from_range, usable_scale, with_gradient_of

__all__ = ["MqbenchQuantizer", "QuantizeBase", "RangeObserver", "pot_quantization"]

_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
_NEAR = 1e-2  # of a step: the largest distance from the grid that rounding in float32 explains
_DEFAULT = Format.parse("int8/tensor/sym")


def pot_quantization(tensor: Tensor) -> Tensor:
    """The nearest power of two, with the gradient of the value itself."""
    return with_gradient_of(usable_scale(tensor, pot=True), tensor)


class RangeObserver(nn.Module):
    """The `activation_post_process` of such a class: the range that the site's observer of Bitwright has found."""

    min_val: Tensor
    max_val: Tensor

    def __init__(
        self,
        dtype: Any = torch.qint8,
        qscheme: Any = torch.per_tensor_symmetric,
        reduce_range: bool = False,
        quant_min: int = -128,
        quant_max: int = 127,
        ch_axis: int = -1,
        pot_scale: bool = False,
        format: Format = _DEFAULT,
    ) -> None:
        super().__init__()
        self.dtype, self.qscheme, self.reduce_range = dtype, qscheme, reduce_range
        self.quant_min, self.quant_max, self.ch_axis, self.pot_scale = quant_min, quant_max, ch_axis, pot_scale
        self.format = format
        self.adjust_sign = False
        self.register_buffer("min_val", torch.tensor([-1.0]))
        self.register_buffer("max_val", torch.tensor([1.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input: the range is known already."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and the zero point of the range."""
        grid = grid_from_range(self.min_val.reshape(-1), self.max_val.reshape(-1), self.format)
        return grid.scale.reshape(-1), grid.zero_point.reshape(-1)


class QuantizeBase(nn.Module):
    """The base class of quantizers in MQBench's style, with its attributes and methods.

    `observer_enabled[0]` is 1 during calibration and `fake_quant_enabled[0]` afterwards. `ada_sign` is always off,
    because calibration decides the sign and sets `quant_min` and `quant_max`.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, observer: Any = RangeObserver, **observer_kwargs: Any) -> None:
        super().__init__()
        self.activation_post_process = observer(**observer_kwargs)
        own = self.activation_post_process
        self.dtype, self.qscheme = own.dtype, own.qscheme
        self.quant_min, self.quant_max = own.quant_min, own.quant_max
        self.pot_scale, self.ch_axis, self.ada_sign = own.pot_scale, getattr(own, "ch_axis", -1), False
        self.bitwidth = int(math.log2(self.quant_max - self.quant_min + 1))
        self.is_per_channel = self.ch_axis != -1
        self.is_symmetric_quant = self.qscheme in _SYMMETRIC
        self.observer_enabled, self.fake_quant_enabled = [0], [1]
        self.register_buffer("scale", torch.tensor([1.0]))
        self.register_buffer("zero_point", torch.tensor([0.0]))

    def __setattr__(self, name: str, value: Any) -> None:
        """Let a subclass replace the buffers `scale` and `zero_point` by parameters."""
        if isinstance(value, nn.Parameter) and name in self.__dict__.get("_buffers", {}):
            del self._buffers[name]
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, also instead of a buffer."""
        self._buffers.pop(name, None)
        super().register_parameter(name, param)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and the zero point of the observed range."""
        found: tuple[Tensor, Tensor] = self.activation_post_process.calculate_qparams()
        return found


class MqbenchQuantizer(Quantizer):
    """A quantizer whose arithmetic and gradients are those of a class in MQBench's style.

    A subclass names it: ``class MyLsq(MqbenchQuantizer): quantize_base = MyFakeQuantize``. Its parameters are learned,
    and are part of checkpoints. The site's observer finds the range; `forward` with `observer_enabled` then sets the
    initial values. Set ``exportable = False`` if `forward` doesn't round to `scale` and `zero_point`.
    """

    quantize_base: ClassVar[type[QuantizeBase]] = QuantizeBase
    exportable = True
    traceable = False  # such classes read values with .item() and write through .data
    other_shapes = ((1,),)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Find out which state is learned."""
        super().__init_subclass__(**kwargs)
        plain, affine = (
            [name for name, _ in cls.quantize_base(observer=RangeObserver, qscheme=one).named_parameters(recurse=False)]
            for one in (torch.per_tensor_symmetric, torch.per_tensor_affine)
        )
        cls.learned = tuple(name for name in plain if name != "zero_point")
        cls.learned_if_asymmetric = tuple(name for name in affine if name not in cls.learned)
        cls.lengths = tuple(name for name in cls.learned if name == "scale")

    @classmethod
    def supports(cls, format: Format) -> bool:
        """Integers with one scale per tensor or channel."""
        return super().supports(format) and format.granularity in ("tensor", "channel")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {key: kwargs.pop(key) for key in list(kwargs) if key not in ("site", "kind", "port", "layout", "weight")}
        super().__init__(*args, **kwargs)
        format, channels = self.spec.format, self.layout.granularity == "channel"
        schemes = (
            (torch.per_channel_symmetric if channels else torch.per_tensor_symmetric)
            if format.symmetric
            else (torch.per_channel_affine if channels else torch.per_tensor_affine)
        )
        try:
            module = self.quantize_base(
                observer=RangeObserver,
                dtype=torch.qint8 if format.signed else torch.quint8,
                qscheme=schemes,
                quant_min=self.qmin,
                quant_max=self.qmax,
                ch_axis=self.layout.axis if channels else -1,
                pot_scale=format.pot,
                format=format,
                **own,
            )
        except TypeError as error:
            what = f"{self.quantize_base.__name__} can't be created: {error}"
            raise FormatError(what, where=self.site, fix="check its options", code="invalid-options") from error
        # No submodule: its state is that of this quantizer, which has no keys before calibration.
        self.__dict__["module"] = module
        self.sample: Tensor | None = None

    @property
    def module_(self) -> QuantizeBase:
        """The instance, with the current state."""
        module: QuantizeBase = self.__dict__["module"]
        self._set_codes(module)
        for name in self._names:
            place = module._parameters if name in module._parameters else module._buffers
            own = self._parameters[name] if name in self._parameters else self._buffers[name]
            held = place[name]
            assert own is not None
            assert held is not None
            # A view: gradients and changes reach ours. A checkpoint may have another shape than the class began with.
            shape = held.shape if own.numel() == held.numel() else (-1,)
            place[name] = own.reshape(shape)  # type: ignore[assignment]
        return module

    def _set_codes(self, module: QuantizeBase) -> None:
        """Tell the class and its observer the codes that calibration, or a checkpoint, has chosen."""
        own, adaptive = module.activation_post_process, self.spec.format.adasign and self.qmin == 0
        module.quant_min, module.quant_max = own.quant_min, own.quant_max = self.qmin, self.qmax
        own.format, own.adjust_sign = self.format, adaptive

    @property
    def _names(self) -> tuple[str, ...]:
        """The state that the class has at this site."""
        module: QuantizeBase = self.__dict__["module"]
        known = {**module._parameters, **module._buffers}
        every = (*self.learned, *self.learned_if_asymmetric, "scale", "zero_point")
        return tuple(name for name in dict.fromkeys(every) if name in known)

    def observe(self, x: Tensor) -> None:
        """Keep a batch, with which the class sets its initial values."""
        super().observe(x)
        self.sample = x.detach().to(torch.float32)

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Let the class set its initial values from the range of this grid."""
        module: QuantizeBase = self.__dict__["module"]
        self.qmin, self.qmax = grid.qmin, grid.qmax
        self._set_codes(module)
        own = module.activation_post_process
        own.min_val = ((grid.qmin - grid.zero_point) * grid.scale).reshape(-1)
        own.max_val = ((grid.qmax - grid.zero_point) * grid.scale).reshape(-1)
        if self.spec.format.symmetric:  # the range of the scale, whatever its lowest code is
            own.min_val = (-own.max_val if grid.qmin < 0 else torch.zeros_like(own.max_val)).clone()
        # Parameters get the shapes of this site; `forward` then sets their values.
        for name in ("scale", "zero_point"):
            value = (grid.scale if name == "scale" else grid.zero_point).detach().reshape(-1).clone()
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(value)
            else:
                module._buffers[name] = value
        module.observer_enabled, module.fake_quant_enabled = [1], [0]
        try:
            module(self._zeros() if self.sample is None else self.sample)
        finally:
            module.observer_enabled, module.fake_quant_enabled = [0], [1]
        for name in (*self.learned, *self.learned_if_asymmetric, "scale", "zero_point"):
            self._store(name, getattr(module, name) if name in self._names else torch.zeros_like(grid.scale))
        self.codes.copy_(torch.tensor([float(self.qmin), float(self.qmax)]))
        self.calibrated, self.sample = True, None

    def _zeros(self) -> Tensor:
        """An input of the smallest shape."""
        if self.layout.granularity == "tensor":
            return torch.zeros(1, device=self.codes.device)
        channels = max(1, self.scale.numel())
        return torch.zeros((1,) * self.layout.axis + (channels,), device=self.codes.device)

    def _forward(self, x: Tensor) -> Tensor:
        """Call the class, and keep what it stored."""
        module = self.module_
        result: Tensor = module(x)
        for name in ("scale", "zero_point"):
            if name in module._buffers and name in self._buffers:
                self._store(name, getattr(module, name))  # `forward` may have replaced it
        return result

    def _store(self, name: str, value: Tensor) -> None:
        value = value.detach()
        self.keep(name, value.reshape(()) if self.layout.granularity == "tensor" and value.numel() == 1 else value)

    def grid(self) -> Grid:
        """The grid with the effective scale. A class may compute it from other parameters in `forward`."""
        with torch.no_grad():
            self._forward(self._zeros())
            shape = () if self.layout.granularity == "tensor" else (-1,)
            scale = usable_scale(self.scale, pot=self.spec.format.pot).reshape(shape)
            zero = torch.clamp(torch.round(self.zero_point.detach()), self.qmin, self.qmax).reshape(shape)
            return Grid(scale, torch.zeros_like(zero) if self.spec.format.symmetric else zero, self.qmin, self.qmax)

    def quantize(self, x: Tensor) -> Tensor:
        """The result of the class. Its values are moved to the grid exactly, so that artefacts have the same ones."""
        result = self._forward(x)
        if not self.exportable:
            return result
        grid = self.grid()
        scale, zero = self.layout.spread(grid.scale, x), self.layout.spread(grid.zero_point, x)
        with torch.no_grad():
            steps = result.detach() / scale
            codes = torch.clamp(torch.round(steps) + zero, grid.qmin, grid.qmax)
            exact = (codes - zero) * scale
            far = not torch.compiler.is_compiling() and bool(((steps - torch.round(steps)).abs() > _NEAR).any())
        if far:
            raise FormatError(
                f"{self.quantize_base.__name__}.forward doesn't round to its scale and zero point",
                where=self.site,
                fix="set exportable = False in the subclass of MqbenchQuantizer",
                code="not-on-the-grid",
            )
        return with_gradient_of(exact, result)

    @torch.no_grad()
    def integers(self, x: Tensor) -> Tensor:
        """The codes of the class's own rounding."""
        grid, x = self.grid(), x.to(torch.float32)
        scale, zero = self.layout.spread(grid.scale, x), self.layout.spread(grid.zero_point, x)
        codes = torch.round(self.quantize(x) / scale) + zero
        return torch.clamp(codes, grid.qmin, grid.qmax).to(torch.int32)

    def _apply(self, fn: Any, recurse: bool = True) -> MqbenchQuantizer:
        super()._apply(fn, recurse)
        device = self.codes.device
        self.__dict__["module"].to(device)
        return self
