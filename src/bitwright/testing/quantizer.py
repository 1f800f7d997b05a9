"""`check_quantizer`: everything that the rest of Bitwright takes for granted about a quantizer."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwright.arguments import strict
from bitwright.attach import Layout, Quantizer
from bitwright.errors import FormatError, UncalibratedError
from bitwright.formats import Format
from bitwright.plan import SiteSpec
from bitwright.testing.data import demand, numbers

_ACTIVATIONS = (
    "int8/tensor/sym",
    "int4/tensor/sym/adasign",
    "uint8/tensor/asym",
    "int4/tensor/sym/pot",
    "fp8e4m3",
    "mxint8",
)
_WEIGHTS = (
    *("int8/channel/sym", "int4/tensor/sym", "int4/group4/sym", "int4/channel/asym", "int4/channel/sym/pot"),
    *("fp8e5m2/channel", "mxfp4e2m1"),
)


@dataclass
class _Case:
    """A quantizer at one site of one format, and numbers for it."""

    cls: type[Quantizer]
    format: Format
    weight: bool
    options: dict[str, Any]

    @property
    def who(self) -> str:
        return f"{self.cls.__name__} at {self.format} ({'weight' if self.weight else 'activation'})"

    def make(self) -> Quantizer:
        port = "weight" if self.weight else "input"
        axis = 1 if self.format.granularity == "group" else 0
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
        quantizer.settle()
        return quantizer

    def demand(self, holds: bool, what: str) -> None:
        demand(holds, self.who, what)


@strict
def check_quantizer(cls: type[Quantizer], **options: Any) -> None:
    """Raise AssertionError, with what is wrong, unless `cls(…, **options)` behaves as a quantizer must.

    Every format that the quantizer doesn't refuse (a FormatError from its constructor) is checked, at weights and at
    activations. Compiling needs no compiler on the machine.
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
            if not accepted:
                _compiles(case)
            accepted += 1
        demand(accepted > 0, cls.__name__, f"accepts none of the formats {', '.join(formats)}")


def _uncalibrated(case: _Case) -> None:
    quantizer = case.make()
    case.demand(not quantizer.state_dict(), "has state before it is calibrated")
    try:
        quantizer(case.numbers())
    except UncalibratedError:
        return
    case.demand(False, "quantizes before it is calibrated instead of raising UncalibratedError")


def _values(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    kept = x.clone()
    out = quantizer(x)
    case.demand(out.shape == x.shape and out.dtype == x.dtype, "changes shape or dtype")
    case.demand(torch.equal(x, kept), "writes into its input")
    case.demand(bool(torch.isfinite(out).all()), "gives numbers that aren't finite")
    case.demand(torch.equal(out, quantizer(x)), "gives other numbers the second time")
    case.demand(torch.equal(out, case.calibrated()(x)), "gives other numbers when calibrated anew")
    most = max(len(row.unique()) for row in quantizer.layout.rows(out.detach()))
    codes = 2**case.format.bits
    case.demand(most <= codes, f"has {most} levels; {case.format.bits} bits are {codes}")
    case.demand(most > 1, "gives one number for all")


def _grid(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    grid = quantizer.grid()
    case.demand(grid.scale.dtype == torch.float32, "has a grid that isn't float32")
    case.demand(bool((grid.scale > 0).all()), "has a scale that isn't positive")
    if not quantizer.exportable:
        return
    _check_levels(case, quantizer, x)
    out = quantizer(x).detach()
    if torch.equal(quantizer.transform(out), out):
        case.demand(torch.equal(quantizer(out), out), "isn't idempotent: its own levels move")
        case.demand(bool((quantizer(torch.zeros_like(x)) == 0).all()), "has no code for zero")


def _check_levels(case: _Case, quantizer: Quantizer, x: Tensor) -> None:
    """What is exported is what is computed; a power of two stays one."""
    grid, codes = quantizer.grid(), quantizer.integers(x)
    within = int(codes.min()) >= quantizer.qmin and int(codes.max()) <= quantizer.qmax
    case.demand(within, "has codes beyond qmin and qmax")
    scale, zero_point = quantizer.layout.spread(grid.scale, x), quantizer.layout.spread(grid.zero_point, x)
    same = torch.equal(quantizer(x).detach(), (codes - zero_point) * scale)
    case.demand(same, "computes other numbers than (integers − zero point)·scale: the artefact would differ")
    case.demand(torch.equal(grid.zero_point, grid.zero_point.round()), "has a zero point that is no code")
    if case.format.pot:
        mantissa, _ = torch.frexp(grid.scale)
        case.demand(bool((mantissa == 0.5).all()), "has a scale that is no power of two")


def _float32(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    for dtype in (torch.float16, torch.bfloat16):
        low = x.to(dtype)
        expected = quantizer(low.float()).to(dtype)
        got = quantizer(low)
        case.demand(got.dtype == dtype, f"gives {got.dtype} for {dtype}")
        case.demand(torch.equal(got, expected), f"doesn't compute in float32 when it gets {dtype}")
        with torch.autocast("cpu", dtype=dtype):
            case.demand(torch.equal(quantizer(x), quantizer.quantize(x)), f"doesn't compute in float32 under {dtype}")
        quantizer = quantizer.to(dtype)
        kinds = {str(tensor.dtype) for tensor in quantizer.state_dict().values()}
        case.demand(kinds == {"torch.float32"}, f"has state in {kinds} in a model of {dtype}")


def _gradients(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers().requires_grad_()
    quantizer(x * 1.5).square().sum().backward()
    case.demand(x.grad is not None and bool(torch.isfinite(x.grad).all()), "has a gradient that isn't finite")
    case.demand(x.grad is not None and bool((x.grad != 0).any()), "passes no gradient on")
    parameters = dict(quantizer.named_parameters())
    for name, parameter in parameters.items():
        finite = parameter.grad is not None and bool(torch.isfinite(parameter.grad).all())
        case.demand(finite, f"has no finite gradient of {name}")
    if parameters:
        torch.optim.SGD(parameters.values(), lr=1e-3).step()
        out = quantizer(x.detach())
        case.demand(bool(torch.isfinite(out).all()), "gives numbers that aren't finite after a step of the optimizer")
        if quantizer.exportable:
            _check_levels(case, quantizer, x.detach())


def _state(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.mul_(0.9)  # as training might
    state = {name: tensor.clone() for name, tensor in quantizer.state_dict().items()}
    other = case.make()
    other.load_state_dict(state)
    case.demand(torch.equal(other(x), quantizer(x)), "computes other numbers after its state was saved and loaded")
    case.demand(other.state_dict().keys() == state.keys(), "has other state after loading")
    names = [name for name, _ in quantizer.named_parameters()]
    case.demand([name for name, _ in other.named_parameters()] == names, "learns other things after loading")
    held = dict(quantizer.named_parameters())
    quantizer.observe(x)
    quantizer.settle()
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
    quantizer.observe(torch.empty(0, 64))  # a batch without anything in it says nothing
    case.demand(bool(torch.isfinite(quantizer(case.numbers() * 1e4)).all()), "isn't finite far outside its range")


def _compiles(case: _Case) -> None:
    quantizer, x = case.calibrated(), case.numbers()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own notes about its internals; failures raise
        try:
            compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")(x)
            exported = torch.export.export(quantizer, (x,), strict=False).module()(x)
        except Exception as error:
            raise AssertionError(f"{case.who}: can't be compiled in one graph, or exported: {error}") from error
    case.demand(torch.allclose(compiled, quantizer(x), atol=1e-6), "computes other numbers when compiled")
    case.demand(torch.allclose(exported, quantizer(x), atol=1e-6), "computes other numbers when exported")
