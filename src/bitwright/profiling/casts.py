"""What casts and quantizers cost by size: t = α·n + β, fitted, for sizes that no model has been measured with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bitwright.core.formats import Format
from bitwright.core.registry import QUANTIZERS
from bitwright.graph.operators import channel_axis, reduction_axis
from bitwright.plan import SiteSpec
from bitwright.profiling.device_profile import CastCost, Line
from bitwright.profiling.execution import Cast, is_quantizer
from bitwright.profiling.step import CLOCKS, Clock
from bitwright.profiling.timing import fit, interleaved
from bitwright.quantizers import Layout, Quantizer
from bitwright.quantizers.compiled import SMALL

# on both sides of where compiled code takes over, enough of them that some can be held out
_SIZES = (*(1 << k for k in range(10, 16)), 3 << 14, SMALL, 3 << 15, *(1 << k for k in range(18, 22)))
DTYPES = [Cast("input", "float32→bfloat16"), Cast("input", "bfloat16→float32")]


def measure_casts(casts: Iterable[Cast], clock: Clock, *, rounds: int = 7) -> list[CastCost]:
    """Each kind of cast once, forward and backward, over three orders of size.

    A quantizer that is made from others' (a bias from input and weight) has no cost by size of its own.
    """
    kinds = {cast.kind: cast for cast in casts if not is_quantizer(cast.kind) or _stands_alone(cast)}
    found = []
    for kind, cast in sorted(kinds.items()):
        runs = {size: _run(cast, size) for size in _SIZES}
        work: dict[tuple[int, str], Callable[[], float]] = {}
        for size, run in runs.items():
            work[(size, "forward")] = lambda run=run: run(CLOCKS[clock])[0]  # type: ignore[misc]
            work[(size, "backward")] = lambda run=run: run(CLOCKS[clock])[1]  # type: ignore[misc]
        seconds = interleaved(work, rounds=rounds, warm=3)
        forward, backward = (
            _lines([(size, seconds[(size, execution)]) for size in _SIZES], broken="fused" in kind)
            for execution in ("forward", "backward")
        )
        found.append(CastCost(kind=kind, forward=forward, backward=backward))
    return found


def _stands_alone(cast: Cast) -> bool:
    return "of" not in inspect.signature(QUANTIZERS.get(cast.kind.split()[0]).__init__).parameters


def _lines(points: list[tuple[int, float]], *, broken: bool) -> list[Line]:
    """One line, or two where compiled code takes over at a size."""
    parts = [(0, [p for p in points if p[0] < SMALL]), (SMALL, [p for p in points if p[0] >= SMALL])]
    lines = []
    for start, part in parts if broken else [(0, points)]:
        found = fit([(float(size), 1.0) for size, _ in part], [s for _, s in part])
        slope, fixed = found.coefficients
        lines.append(Line(per_element=slope, fixed=fixed, start=start, r2=found.r2, held_out=found.held_out))
    return lines


Run = Callable[[Callable[[], float]], tuple[float, float]]


def _run(cast: Cast, size: int) -> Run:
    if is_quantizer(cast.kind):
        return _quantizing(cast, size)
    source, target = (getattr(torch, name) for name in cast.kind.split("→"))
    x = torch.randn(size).to(source).requires_grad_()
    return _passes(x, lambda: x.to(target))


def _quantizing(cast: Cast, size: int) -> Run:
    name, text, *flags = cast.kind.split()
    format = Format.parse(text)
    kind, port = ("conv2d", cast.port) if cast.weight else ("relu", "output")
    axis = (channel_axis if format.granularity == "channel" else reduction_axis)(kind, port)
    guard = next((flag for flag in flags if flag == "int16-pairs"), None)
    spec = SiteSpec(format=format, quantizer=name, guard=guard)
    layout = Layout(format.granularity, axis, format.group)
    quantizer: Quantizer = QUANTIZERS.get(name)(
        spec, site="probe:input", kind=kind, port=port, layout=layout, weight=cast.weight
    )
    quantizer.compiled = "fused" in flags
    x = torch.randn(_shape(size, cast.weight))
    quantizer.observe(x)
    quantizer.update_grid()
    x.requires_grad_()
    also: dict[str, Any] = {"relu": True} if "relu" in flags else {}
    if "fold4" in flags:
        also["factor"] = torch.ones([x.shape[0]] + [1] * (x.dim() - 1), requires_grad=True)
    return _passes(x, lambda: quantizer(x, **also))


def _shape(size: int, weight: bool) -> tuple[int, ...]:
    return (16, size // 256, 4, 4) if weight else (16, size // 1024, 8, 8)


def _passes(x: Tensor, forward: Callable[[], Tensor]) -> Run:
    def run(read: Callable[[], float]) -> tuple[float, float]:
        t0 = read()
        y = forward()
        t1 = read()
        gradient = torch.ones_like(y)
        t2 = read()
        y.backward(gradient)
        return t1 - t0, read() - t2

    return run
