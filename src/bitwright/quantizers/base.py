"""The base class of quantizers: calibration, forward, and float32 state in models of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitwright.core.errors import CalibrationError, FormatError, Problem, RangeDiverged, UncalibratedError
from bitwright.core.formats import Format
from bitwright.core.registry import OBSERVERS
from bitwright.plan import SiteSpec
from bitwright.quantizers.compiled import is_worthwhile, quantize_compiled
from bitwright.quantizers.export_sites import site_marker
from bitwright.quantizers.folding import Fold
from bitwright.quantizers.grid import Grid, Layout, grid_from_range, guarded_scale, is_finite
from bitwright.quantizers.observers.base import Observer
from bitwright.quantizers.state import Tracked, state_problems


class Quantizer(nn.Module):
    """The arithmetic at one site. A subclass defines the rounding (`quantize`) and what is learned.

    State: `scale`, `zero_point` (float32) and `codes` (lowest, highest). An uncalibrated quantizer has no state, and
    quantizing raises an error.
    """

    scale: Tensor
    zero_point: Tensor
    codes: Tensor

    def __init__(self, spec: SiteSpec, *, site: str, kind: str, port: str, layout: Layout, weight: bool) -> None:
        super().__init__()
        if not self.supports(spec.format):
            wrong = self.mismatch(spec.format, where=site)
            raise FormatError(wrong.what, where=site, value=wrong.value, fix=wrong.fix, code=wrong.code)
        if self.symmetric_only and not spec.format.symmetric:
            problem = self.refusal(spec.format, where=site)
            raise FormatError(problem.what, where=site, value=problem.value, fix=problem.fix, code=problem.code)
        self.spec = spec
        self.site = site
        self.kind = kind
        self.port = port
        self.layout = layout
        self.weight = weight
        self.calibrated = False
        self.observing = False
        self.following = False  # whether ranges are also observed in training, see `bitwright.training`
        self.replayed = False  # whether a checkpointed function runs again: it was observed in the first run
        self.enabled = True
        self.marking = False
        self.compiled = False  # set by `compile_arithmetic`
        self.tap: Callable[[str, Quantizer, Tensor], None] | None = None  # called with each input
        self.stand_in: Callable[[Tensor], Tensor] | None = None  # replaces `quantize` during a PTQ step
        self.qmin, self.qmax = spec.format.qmin, spec.format.qmax
        self.observer: Observer | None = None
        self.fold: Fold | None = None  # the fold that scales this weight first
        self.of: list[str] = []  # sites of the quantizers that this one is derived from,
        self.parts: tuple[Quantizer, ...] = ()  # and the quantizers, set by `prepare`
        self.tracked = Tracked()  # the weights that the range belongs to
        self.saw = False  # whether an input was observed since the last range
        self.observed_shape = torch.Size()
        self.zeros: Tensor | None = None  # rows that contain only zeros: any scale of at least `finest` is valid
        self.finest = 0.0  # with a smaller scale, the following bias would exceed int32
        self._seen: Tensor | None = None  # the values, if a guard needs them
        self.register_buffer("codes", torch.tensor([float(self.qmin), float(self.qmax)]))
        self.keep("zero_point", torch.zeros(()))
        self.keep("scale", torch.ones(()))
        for name in (*self.learned, *self.learned_if_asymmetric):
            if name not in ("scale", "zero_point"):
                self.keep(name, torch.ones(()))  # calibration sets the value

    # -- overridden by subclasses --------------------------------------------------------------------------

    learned: ClassVar[tuple[str, ...]] = ()
    """The names of learned state (Parameters). Other state is in buffers."""

    learned_if_asymmetric: ClassVar[tuple[str, ...]] = ()
    """State that is learned only if the format has a zero point, and is a buffer otherwise."""

    balanced: ClassVar[bool] = False
    """Whether symmetric signed codes end at −p instead of −p − 1."""

    lengths: ClassVar[tuple[str, ...]] = ()
    """Learned state that is proportional to the values (a scale, an end of the range)."""

    weight_partner: ClassVar[str | None] = None
    """The weight quantizer that belongs to this one, if this one supports only activations."""

    own_kernels: ClassVar[bool] = False
    """Whether `quantize` itself calls compiled kernels if `self.compiled` is set. Otherwise `quantize` is compiled."""

    traceable: ClassVar[bool] = True
    """Whether torch.compile and torch.export can trace `quantize`."""

    other_shapes: ClassVar[tuple[tuple[int, ...], ...]] = ()
    """Shapes that learned state may have in addition to the shape of the scale."""

    symmetric_only: ClassVar[bool] = False
    """Whether its levels are symmetric around zero. Then formats with a zero point are rejected."""

    minifloats: ClassVar[bool] = False
    """Whether it supports only small floating-point formats."""

    signed_scales: ClassVar[bool] = False
    """Whether it supports `full` formats, which have negative scales."""

    @classmethod
    def supports(cls, format: Format) -> bool:
        """Whether this kind of format is supported: integers with stored scales, or small floats."""
        kind = (format.minifloat is not None) == cls.minifloats and not format.dynamic
        return kind and (cls.signed_scales or not format.full)

    @classmethod
    def mismatch(cls, format: Format, *, where: str) -> Problem:
        """The problem of a format that this kind of quantizer doesn't support."""
        if cls.minifloats:
            fix = "use fp8e4m3, mxfp4e2m1, … here"
        elif format.minifloat is not None:
            fix = "use an integer format, or quantizer: minifloat"
        elif format.dynamic:
            fix = "use quantizer: dynamic, or a format without dynamic"
        elif format.full:
            fix = "use quantizer: plain or lsq, or a format without full"
        else:
            fix = "use a format with dynamic (int8/token/sym/dynamic), or quantizer: plain"
        what = f"{cls.__name__} doesn't support this format"
        return Problem(what=what, where=where, value=str(format), fix=fix, code="unsupported-format")

    @classmethod
    def refusal(cls, format: Format, *, where: str) -> Problem:
        """The problem of an asymmetric format. Its fix suggests a symmetric one."""
        near = replace(format, name=f"int{format.bits}", signed=True, symmetric=True)
        fix = f"use {near}, or {replace(near, adasign=True)}"
        return Problem(
            what=f"{cls.__name__} supports only symmetric formats",
            where=where,
            value=str(format),
            fix=fix,
            code="unsupported-format",
        )

    def learns(self, name: str) -> bool:
        """Whether this state is learned at this site."""
        return name in self.learned or (name in self.learned_if_asymmetric and not self.spec.format.symmetric)

    def quantize(self, x: Tensor) -> Tensor:
        """`x` (float32) rounded to the grid, with the quantizer's gradient."""
        raise NotImplementedError

    def quantize_relu(self, x: Tensor) -> Tensor:
        """`quantize(relu(x))`. Override it to compute both in one pass."""
        return self.quantize(torch.relu(x))

    def quantize_folded(self, weight: Tensor, factor: Tensor) -> Tensor | None:
        """`quantize(weight·factor)/factor` in one pass; None if not supported."""
        return None

    def transform(self, x: Tensor) -> Tensor:
        """The value that is rounded: `x`, or a transformed weight."""
        return x

    @property
    def exportable(self) -> bool:
        """Whether QuantizeLinear and DequantizeLinear with `grid()` are equivalent to `quantize`."""
        return True

    def grid(self) -> Grid:
        """The current grid, which is exported."""
        return Grid(self.scale.detach(), self.zero_point.detach(), self.qmin, self.qmax)

    def grid_for(self, x: Tensor) -> Grid:
        """The grid for these values: coarser if training moved a weight beyond its guard.

        If it became coarser only at deployment, norms would have learned the statistics of another weight.
        """
        grid = self.grid()
        if self.spec.guard is None:
            return grid
        with torch.no_grad():
            weight = self.transform(x.detach())
            scale = guarded_scale(self.spec.guard, grid.scale, weight, kind=self.kind, layout=self.layout)
        return replace(grid, scale=scale)

    def deployed_grid(self, x: Tensor) -> Grid:
        """The grid of the artefact for these values: `grid()`, or that of `x` if scales are computed at run time."""
        return self.grid_for(x) if self.spec.format.dynamic else self.grid()

    # -- implementation ------------------------------------------------------------------------------------

    @torch.no_grad()
    def keep(self, name: str, value: Tensor) -> None:
        """Store state in float32, reusing a tensor that an optimizer, DDP or a compiled graph may hold."""
        value = value.detach().to(torch.float32).clone()
        learns = self.learns(name)
        known = (self._parameters if learns else self._buffers).get(name)
        if known is not None and known.shape == value.shape:
            known.copy_(value)
        elif not learns:
            self.register_buffer(name, value)
        else:
            self.register_parameter(name, nn.Parameter(value))
            self._hook(name)

    def _hook(self, name: str) -> None:
        parameter = self._parameters.get(name)
        if name in self.lengths and parameter is not None:
            parameter.register_hook(self._in_units)

    def _in_units(self, gradient: Tensor) -> Tensor:
        """The gradient of a scale of a folded weight w·f, converted as if it were a scale of w.

        A scale s of w·f is proportional to f, and its gradient is inversely proportional. Without the conversion,
        channels with a small γ/σ would make large steps and those with a large one would hardly move. With u = s/f, the
        scale of w: Δs = f·Δu = −η·f²·∂L/∂s.
        """
        if self.fold is None:
            return gradient
        squares = self.fold.unit().to(gradient.dtype).square()
        return gradient * (squares if squares.shape == gradient.shape else squares.mean())

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register hooks again: a copy has other parameters."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in self._parameters:
            self._hook(name)

    @property
    def format(self) -> Format:
        """The current format. Calibration replaces an adaptive sign."""
        planned = self.spec.format
        return planned.unsigned() if planned.adasign and self.qmin == 0 else planned

    @property
    def ranges_weights(self) -> bool:
        """Whether the grid of a weight is its observed range: not learned, and not of a transformed weight."""
        return not self.learned and type(self).transform is Quantizer.transform

    @property
    def ready(self) -> bool:
        """Whether the quantizer has a grid, or computes one from each input."""
        return self.calibrated or self.spec.format.dynamic

    def forward(
        self, x: Tensor, site: str | None = None, *, relu: bool = False, factor: Tensor | None = None
    ) -> Tensor:
        """Observe, quantize, mark, or return `x`. `site` is set if several sites share this quantizer.

        With `relu`, this applies to relu(x). With a `factor`, it applies to x·factor, and the result is divided by it.
        """
        # all steps may be fused into one pass
        whole = self.enabled and not (self.marking or self.observing or self.following or self.stand_in is not None)
        if factor is not None:
            folded = self.quantize_folded(x, factor) if whole and self.ready else None
            if folded is None:
                apart: Tensor = self(x * factor, site) / factor
                return apart
            if self.tap is not None:  # the tap must not change values or gradients
                self.tap(site or self.site, self, (x * factor).detach())
            return folded
        whole = whole and self.tap is None
        if relu and not whole:
            x, relu = torch.relu(x), False
        if self.marking:
            marked: Tensor = site_marker(x, site or self.site)
            return marked
        if self.tap is not None:
            self.tap(site or self.site, self, x)
        if self.observing:
            self.observe(x)
        elif self.following and self.training and not self.replayed:
            self.follow(x)
        if not self.enabled:
            return x
        if not self.ready:
            raise UncalibratedError(
                "this quantizer is not calibrated",
                where=self.site,
                fix="calibrate(model, batches) with data that reaches this site, or load a checkpoint",
                code="uncalibrated",
            )
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._quantize(x, relu=relu)
        return self._quantize(x, relu=relu)

    def _quantize(self, x: Tensor, *, relu: bool) -> Tensor:
        wide = x.to(torch.float32)
        if self.stand_in is not None:
            return self.stand_in(torch.relu(wide) if relu else wide).to(x.dtype)
        if self.compiled and self.traceable and not self.own_kernels and is_worthwhile(x):
            return quantize_compiled(self, wide, relu=relu).to(x.dtype)
        return (self.quantize_relu(wide) if relu else self.quantize(wide)).to(x.dtype)

    def observe(self, x: Tensor) -> None:
        """Pass `x` to the observer. A weight is observed once, because it doesn't change during calibration."""
        if x.numel() == 0:  # an input without boxes, tokens, … has no range
            return
        if self.spec.format.dynamic:  # there is no range to record
            self.observed_shape = x.shape
            if not is_finite(x.detach().to(torch.float32)):
                raise self._not_finite(x)
            return
        if self.observer is None:
            self.observer = self.new_observer()
            self.weight = self.weight or isinstance(x, nn.Parameter)
        elif self.weight and not self.tracked.fresh:
            return
        assert self.observer is not None
        self.tracked.fresh = False
        x = x.detach().to(torch.float32)
        if x.shape != self.observed_shape:  # setting a module's attribute is slow
            self.layout.check(x.shape, site=self.site)
            self.observed_shape = x.shape
        if self.spec.guard is not None:
            self._seen = x
        finite = self.observer.shows_infinities or is_finite(x)
        if finite:
            self.observer.observe(self.layout.rows(x))
            finite = not self.observer.shows_infinities or all(is_finite(end) for end in self.observer.range())
        if not finite:
            raise self._not_finite(x)

    def _not_finite(self, x: Tensor) -> CalibrationError:
        kind = "NaN" if bool(torch.isnan(x).any()) else "infinity"
        return CalibrationError(
            f"{kind} in the {'weight' if self.weight else 'calibration data'}",
            where=self.site,
            fix="fix the data, or keep this site in float (format: float)",
            code="not-finite",
        )

    @torch.no_grad()
    def follow(self, x: Tensor) -> None:
        """Observe in a training step with traceable operations only. `update_grid` reads the result later."""
        assert self.observer is not None
        if x.numel() == 0:
            return
        x = x.detach().to(torch.float32)
        self.saw = True
        self.observed_shape = x.shape
        self._seen = x if self.spec.guard is not None else None
        self.observer.observe(self.layout.rows(x))

    def new_observer(self) -> Observer:
        """Create the observer of this site's spec."""
        observer: Observer = OBSERVERS.get(self.spec.observer)(format=self.spec.format, **self.spec.observer_options)
        return observer

    @torch.no_grad()
    def keep_guard(self, values: Tensor) -> bool:
        """Raise the scale if training moved a weight beyond its guard. Return whether this was necessary."""
        if self.spec.guard is None:
            return False
        grid = self.grid()
        scale = guarded_scale(
            self.spec.guard, grid.scale, self.transform(values.to(torch.float32)), kind=self.kind, layout=self.layout
        )
        moved = bool((scale > grid.scale).any())
        if moved:
            self.set_grid(Grid(scale, grid.zero_point, grid.qmin, grid.qmax))
        return moved

    @torch.no_grad()
    def update_grid(self) -> None:
        """Compute the grid from the observed range; a dynamic format has none."""
        if self.spec.format.dynamic:
            return
        if self.observer is None:
            raise UncalibratedError(
                "no calibration batch reached this site",
                where=self.site,
                fix="calibrate with inputs that take this path, or keep this site in float (format: float)",
                code="uncalibrated",
            )
        self.update_grid_from(*self.observer.range(), self.observed_shape)

    @torch.no_grad()
    def update_grid_from(self, low: Tensor, high: Tensor, shape: torch.Size) -> None:
        """Compute the grid from a range, observed here or merged from several processes."""
        if self.following and not bool((low.isfinite() & high.isfinite()).all()):
            raise RangeDiverged(
                "the input of this site became infinite or NaN in training",
                where=self.site,
                fix="lower the learning rate, clip gradients, or keep this site in float (format: float)",
                code="not-finite",
            )
        self.set_range(low, high, shape, self._seen)
        self.saw = False
        if self.weight and self.following:
            self.observer = self.new_observer()  # the range of a weight is that of its current values
        self._seen = None

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor, shape: torch.Size, values: Tensor | None = None) -> None:
        """Compute the grid from ranges per row."""
        grid = grid_from_range(low, high, self.spec.format, site=self.site)
        scale = self.layout.fold(grid.scale, shape)
        self.zeros, self.finest = self.layout.fold((low == 0) & (high == 0), shape), 0.0
        if self.spec.guard is not None and values is not None:
            rounded = self.transform(values)
            scale = guarded_scale(self.spec.guard, scale, rounded, kind=self.kind, layout=self.layout)
        self.set_grid(Grid(scale, self.layout.fold(grid.zero_point, shape), grid.qmin, grid.qmax))

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Use this grid."""
        self.keep("scale", grid.scale)
        self.keep("zero_point", grid.zero_point)
        self.qmin, self.qmax = grid.qmin, grid.qmax
        if self.balanced and self.spec.format.symmetric:
            self.qmin = max(self.qmin, -self.qmax)
        self.codes.copy_(torch.tensor([float(self.qmin), float(self.qmax)]))
        self.calibrated = True

    def gradient_scale(self, x: Tensor) -> float:
        """LSQ's 1/√(M·p) with M elements of `x` per scale. It makes learned scales move at the rate of weights."""
        return 1.0 / sqrt(x.numel() / self.scale.numel() * self.qmax)

    @torch.no_grad()
    def integers(self, x: Tensor) -> Tensor:
        """The codes of `x` (int32)."""
        x = x.to(torch.float32)
        grid = self.deployed_grid(x)
        x = self.transform(x)
        scale, zero_point = self.layout.spread(grid.scale, x), self.layout.spread(grid.zero_point, x)
        return torch.clamp(torch.round(x / scale) + zero_point, grid.qmin, grid.qmax).to(torch.int32)

    # -- float32 in models of any dtype ----------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantizer:
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype:
                return moved
            return tensor.to(moved.device)  # for .half() and similar calls: change the device, not the dtype

        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        if self.observer is not None:  # move it with the model
            seen = vars(self.observer)
            seen.update({name: keep_float32(value) for name, value in seen.items() if isinstance(value, Tensor)})
        return self

    def invalid_state(self) -> str | None:
        """The name of state with an invalid value that the arithmetic would silently replace."""
        return None

    # -- checkpoints: an uncalibrated quantizer has no keys, so a float checkpoint loads strictly ----------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.calibrated:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {name.removeprefix(prefix): state_dict[name] for name in state_dict if name.startswith(prefix)}
        if not any(name in given for name in (*self._parameters, *self._buffers)):
            return
        problems = state_problems(self, given)
        if problems:
            error_msgs += map(str, problems)
            return
        for name, ours in [*self._parameters.items(), *self._buffers.items()]:
            saved = state_dict.get(prefix + name)
            if saved is not None and ours is not None and saved.shape != ours.shape:
                self.keep(name, saved.to(ours.device))  # shapes are unknown before calibration
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.qmin, self.qmax = (int(code) for code in self.codes.tolist())
        self.tracked.forget()
        self.calibrated = True

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{self.site}, {self.format}, calibrated={self.calibrated}"
