"""The conformance kit: the requirements for quantizers and observers."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, FormatError, UncalibratedError
from bitwright.core.formats import Format
from bitwright.plan import SiteSpec
from bitwright.quantizers import Layout, Observer, Quantizer, grid_from_range


def numbers(*shape: int, seed: int = 0, positive: bool = False) -> Tensor:
    """Normally distributed numbers with a few outliers, reproducible by seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.05, x * 3, x)
    return x.abs() if positive else x


def demand(holds: bool, who: str, what: str) -> None:
    """Raise an AssertionError unless `holds`, also under `python -O`."""
    if not holds:
        raise AssertionError(f"{who}: {what}")


_FORMATS = ("int8/channel/sym", "int4/channel/sym/adasign", "uint8/channel/asym", "int4/channel/sym/pot")


def check_observer(cls: type[Observer], **options: Any) -> None:
    """Check that `cls(format=…, **options)` behaves as an observer must; raise AssertionError otherwise."""
    demand(cls.merge in ("extremes", "mean"), cls.__name__, "doesn't define how to merge ranges of processes")
    for format in map(Format.parse, _FORMATS):
        who = f"{cls.__name__} at {format}"
        batches = [numbers(3, length, seed=length) for length in (400, 64, 1)]
        low, high = _seen(cls, format, options, batches)
        _check_range(who, low, high, rows=3)
        again = _seen(cls, format, options, batches)
        demand(torch.equal(low, again[0]) and torch.equal(high, again[1]), who, "the same data gives another range")
        for row in range(3):
            alone = _seen(cls, format, options, [batch[row : row + 1] for batch in batches])
            same = torch.allclose(torch.stack(alone)[:, 0], torch.stack([low, high])[:, row], rtol=1e-5, atol=1e-6)
            demand(same, who, "a row's range depends on other rows")
        if not cls.by_batch:
            pieces = _seen(cls, format, options, [piece for batch in batches for piece in batch.split(7, dim=1)])
            same = torch.allclose(torch.stack(pieces), torch.stack([low, high]), rtol=1e-5, atol=1e-6)
            demand(same, who, "the same data in other batches gives another range; set `by_batch`")
        wide = _seen(cls, format, options, [batch * 64 for batch in batches])
        demand(bool((wide[1] - wide[0] > 8 * (high - low)).all()), who, "the range doesn't follow the data")
        _check_copies(who, cls, format, options, batches)
        for name, batch in (("zeros", torch.zeros(2, 9)), ("one number", torch.full((1, 1), 0.5))):
            ends = _seen(cls, format, options, [batch])
            _check_range(f"{who}, {name}", *ends, rows=batch.shape[0])
            try:
                grid = grid_from_range(*ends, format, site=who)
            except BitwrightError as error:
                raise AssertionError(f"{who}: the range of {name} gives no grid: {error}") from error
            demand(bool((grid.scale > 0).all()), who, f"{name} give no positive scale")
    for value in (float("nan"), float("inf"), -float("inf")) if cls.shows_infinities else ():
        odd = numbers(2, 200)
        odd[0, 5] = value
        ends = _seen(cls, Format.parse("int8/channel/sym"), options, [odd, numbers(2, 64)])
        demand(not bool(torch.stack(ends).isfinite().all()), cls.__name__, f"{value} doesn't show in the range")
    ends = _seen(cls, Format.parse("int4/channel/sym/adasign"), options, [numbers(2, 200, positive=True)])
    demand(bool((ends[0] >= 0).all()), cls.__name__, "non-negative numbers get a negative lower end")


def _seen(cls: type[Observer], format: Format, options: dict[str, Any], batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    observer = cls(format=format, **options)
    for batch in batches:
        shown = batch.clone()
        observer.observe(shown)
        same = torch.allclose(shown, batch, rtol=0.0, atol=0.0, equal_nan=True)
        demand(same, cls.__name__, "observe changes the data")
    first = observer.range()
    second = observer.range()
    same = torch.allclose(torch.stack(first), torch.stack(second), rtol=0.0, atol=0.0, equal_nan=True)
    demand(same, cls.__name__, "calling range() changes it")
    return first


def _check_range(who: str, low: Tensor, high: Tensor, *, rows: int) -> None:
    for end in (low, high):
        demand(end.shape == (rows,), who, f"an end has the shape {tuple(end.shape)} instead of one number per row")
        demand(end.dtype == torch.float32, who, f"an end is {end.dtype}, not float32")
        demand(bool(torch.isfinite(end).all()), who, "an end isn't finite")
        demand(not end.requires_grad, who, "an end carries a gradient")
    demand(bool((low <= high).all()), who, "the lower end is above the upper end")


def _check_copies(
    who: str, cls: type[Observer], format: Format, options: dict[str, Any], batches: list[Tensor]
) -> None:
    observer = cls(format=format, **options)
    observer.observe(batches[0])
    copies = [copy.deepcopy(observer), pickle.loads(pickle.dumps(observer))]
    observer.observe(batches[1])
    for other in copies:
        other.observe(batches[1])
        same = all(torch.equal(a, b) for a, b in zip(observer.range(), other.range(), strict=True))
        demand(same, who, "a copy (deepcopy, pickle) gives another range")


_ACTIVATIONS = (
    "int8/tensor/sym",
    "int4/tensor/sym/adasign",
    "uint8/tensor/asym",
    "int4/tensor/sym/pot",
    "fp8e4m3",
    "mxint8",
    "int8/token/sym/dynamic",
    "uint8/tensor/asym/dynamic",
    "fp8e4m3/token/dynamic",
)
_WEIGHTS = (
    *("int8/channel/sym", "int4/tensor/sym", "int4/group4/sym", "int4/channel/asym", "int4/channel/sym/pot"),
    *("int4/group4/sym/full", "fp8e5m2/channel", "mxfp4e2m1"),
)


@dataclass
class _Case:
    """A quantizer at one site with one format, and numbers for it."""

    cls: type[Quantizer]
    format: Format
    weight: bool
    options: dict[str, Any]

    @property
    def who(self) -> str:
        return f"{self.cls.__name__} at {self.format} ({'weight' if self.weight else 'activation'})"

    def make(self) -> Quantizer:
        port = "weight" if self.weight else "input"
        axis = 1 if self.format.granularity in ("group", "token") else 0
        layout = Layout(self.format.granularity, axis, self.format.group)
        spec = SiteSpec(format=self.format)
        return self.cls(
            spec, site=f"kit:{port}", kind="linear", port=port, layout=layout, weight=self.weight, **self.options
        )

    def numbers(self, seed: int = 0) -> Tensor:
        return numbers(6, 64, seed=seed, positive=self.format.adasign)

    def calibrated(self, x: Tensor | None = None) -> Quantizer:
        quantizer = self.make()
        quantizer.observe(self.numbers() if x is None else x)
        quantizer.update_grid()
        return quantizer

    def demand(self, holds: bool, what: str) -> None:
        demand(holds, self.who, what)


@strict
def check_quantizer(cls: type[Quantizer], **options: Any) -> None:
    """Check that `cls(…, **options)` behaves as a quantizer must; raise AssertionError otherwise.

    Checks every format that the quantizer supports (its constructor raises no FormatError), for weights and
    activations. A quantizer that supports only dynamic formats is for activations only. The machine needs no compiler.
    One that isn't `traceable` need not compile.
    """
    for weight, formats in ((False, _ACTIVATIONS), (True, _WEIGHTS)):
        accepted = 0
        for format in formats:
            case = _Case(cls, Format.parse(format), weight, options)
            try:
                case.make()
            except FormatError:
                continue
            for check in (_uncalibrated, _values, _grid, _float32, _gradients, _state, _copies, _odd_numbers):
                check(case)
            if not accepted and cls.traceable:
                _compiles(case)
            accepted += 1
        only_dynamic = weight and not any(cls.supports(Format.parse(format)) for format in formats)
        demand(accepted > 0 or only_dynamic, cls.__name__, f"accepts none of the formats {', '.join(formats)}")


def _uncalibrated(case: _Case) -> None:
    quantizer = case.make()
    case.demand(not quantizer.state_dict(), "has state before calibration")
    if case.format.dynamic:
        return
    try:
        quantizer(case.numbers())
    except UncalibratedError:
        return
    case.demand(False, "quantizes before calibration instead of raising UncalibratedError")


def _values(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    kept = x.clone()
    out = quantizer(x)
    case.demand(out.shape == x.shape and out.dtype == x.dtype, "changes shape or dtype")
    case.demand(torch.equal(x, kept), "changes its input")
    case.demand(bool(torch.isfinite(out).all()), "returns numbers that aren't finite")
    case.demand(torch.equal(out, quantizer(x)), "returns other numbers in the second call")
    case.demand(torch.equal(out, case.calibrated()(x)), "returns other numbers after another calibration")
    most = max(len(row.unique()) for row in quantizer.layout.rows(out.detach()))
    codes = 2**case.format.bits
    case.demand(most <= codes, f"has {most} levels; {case.format.bits} bits allow {codes}")
    case.demand(most > 1, "returns the same number for all inputs")


def _grid(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    grid = quantizer.deployed_grid(x)
    case.demand(grid.scale.dtype == torch.float32, "has a grid that isn't float32")
    positive = grid.scale.abs() if case.format.full else grid.scale
    case.demand(bool((positive > 0).all()), "has a scale that isn't positive")
    if not quantizer.exportable:
        return
    _check_levels(case, quantizer, x)
    out = quantizer(x).detach()
    if torch.equal(quantizer.transform(out), out):
        if not case.format.dynamic:  # rounded values have another range, and so another grid
            case.demand(torch.equal(quantizer(out), out), "isn't idempotent: quantized values change")
        case.demand(bool((quantizer(torch.zeros_like(x)) == 0).all()), "has no code for zero")


def _check_levels(case: _Case, quantizer: Quantizer, x: Tensor) -> None:
    """Check that the exported values equal the computed ones, and that a power of two stays one."""
    grid, codes = quantizer.deployed_grid(x), quantizer.integers(x)
    within = int(codes.min()) >= quantizer.qmin and int(codes.max()) <= quantizer.qmax
    case.demand(within, "has codes beyond qmin and qmax")
    scale, zero_point = quantizer.layout.spread(grid.scale, x), quantizer.layout.spread(grid.zero_point, x)
    same = torch.equal(quantizer(x).detach(), (codes - zero_point) * scale)
    case.demand(same, "computes other values than (integers − zero point)·scale: the artefact would differ")
    case.demand(torch.equal(grid.zero_point, grid.zero_point.round()), "has a zero point that is not a code")
    if case.format.pot:
        mantissa, _ = torch.frexp(grid.scale)
        case.demand(bool((mantissa == 0.5).all()), "has a scale that is not a power of two")


def _float32(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    for dtype in (torch.float16, torch.bfloat16):
        low = x.to(dtype)
        expected = quantizer(low.float()).to(dtype)
        got = quantizer(low)
        case.demand(got.dtype == dtype, f"returns {got.dtype} for {dtype}")
        case.demand(torch.equal(got, expected), f"doesn't compute in float32 for {dtype} inputs")
        with torch.autocast("cpu", dtype=dtype):
            case.demand(torch.equal(quantizer(x), quantizer.quantize(x)), f"doesn't compute in float32 under {dtype}")
        quantizer = quantizer.to(dtype)
        kinds = {str(tensor.dtype) for tensor in quantizer.state_dict().values()}
        case.demand(kinds <= {"torch.float32"}, f"has state in {kinds} in a model of {dtype}")


def _gradients(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers().requires_grad_()
    quantizer(x * 1.5).square().sum().backward()
    case.demand(x.grad is not None and bool(torch.isfinite(x.grad).all()), "has a gradient that isn't finite")
    case.demand(x.grad is not None and bool((x.grad != 0).any()), "passes no gradient to its input")
    parameters = dict(quantizer.named_parameters())
    for name, parameter in parameters.items():
        finite = parameter.grad is not None and bool(torch.isfinite(parameter.grad).all())
        case.demand(finite, f"has no finite gradient of {name}")
    if parameters:
        torch.optim.SGD(parameters.values(), lr=1e-3).step()
        out = quantizer(x.detach())
        case.demand(bool(torch.isfinite(out).all()), "returns numbers that aren't finite after an optimizer step")
        if quantizer.exportable:
            _check_levels(case, quantizer, x.detach())


def _state(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.mul_(0.9)  # simulates training
    state = {name: tensor.clone() for name, tensor in quantizer.state_dict().items()}
    other = case.make()
    other.load_state_dict(state)
    case.demand(torch.equal(other(x), quantizer(x)), "computes other numbers after saving and loading its state")
    case.demand(other.state_dict().keys() == state.keys(), "has other state after loading")
    names = [name for name, _ in quantizer.named_parameters()]
    case.demand([name for name, _ in other.named_parameters()] == names, "has other parameters after loading")
    held = dict(quantizer.named_parameters())
    quantizer.observe(x)
    quantizer.update_grid()
    kept = all(held[name] is parameter for name, parameter in quantizer.named_parameters())
    case.demand(kept, "replaces parameters that an optimizer holds when it is calibrated again")


def _copies(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers(seed=1)
    for how, made in (("deepcopy", copy.deepcopy), ("pickle", _pickled)):
        try:
            other = made(quantizer)
        except Exception as error:
            raise AssertionError(f"{case.who}: can't be copied by {how}: {error}") from error
        case.demand(torch.equal(other(x), quantizer(x)), f"a copy by {how} computes other numbers")


def _pickled(quantizer: Quantizer) -> Any:
    return pickle.loads(pickle.dumps(quantizer))


def _odd_numbers(case: _Case) -> None:
    for name, seen in (("zeros", torch.zeros(6, 64)), ("tiny numbers", case.numbers() * 1e-30)):
        x = seen.clone().requires_grad_()
        out = case.calibrated(seen)(x)
        out.sum().backward()
        finite = bool(torch.isfinite(out).all()) and x.grad is not None and bool(torch.isfinite(x.grad).all())
        case.demand(finite, f"isn't finite when calibrated with {name}")
    quantizer = case.calibrated()
    quantizer.observe(torch.empty(0, 64))  # an empty batch has no effect
    case.demand(bool(torch.isfinite(quantizer(case.numbers() * 1e4)).all()), "isn't finite far outside its range")


def _compiles(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its internals; failures raise
        try:
            compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")(x)
            exported = torch.export.export(quantizer, (x,), strict=False).module()(x)
        except Exception as error:
            raise AssertionError(f"{case.who}: can't be compiled in one graph, or exported: {error}") from error
    case.demand(torch.allclose(compiled, quantizer(x), atol=1e-6), "computes other numbers when compiled")
    case.demand(torch.allclose(exported, quantizer(x), atol=1e-6), "computes other numbers when exported")
