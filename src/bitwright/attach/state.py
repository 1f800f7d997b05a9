"""What a quantizer's state may be: checkpoints come from disks and from other programs.

A scale that is NaN, zero or infinite would run, and even be exported; everything behind it would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bitwright.attach.grid import LARGEST, SMALLEST, is_finite
from bitwright.errors import Problem

if TYPE_CHECKING:
    from bitwright.attach.quantizer import Quantizer

_FIX = "save the checkpoint again from a calibrated model, or calibrate this site again"
_RANKS = {"tensor": (0, 0), "channel": (1, 1), "group": (1, 64)}


def state_problems(quantizer: Quantizer, state: Mapping[str, Tensor]) -> list[Problem]:
    """Everything that is wrong with a state for this quantizer; `state` has the names of its own state dict."""
    known = {**quantizer._parameters, **quantizer._buffers}
    wrong: list[tuple[str, str, object, str]] = [
        *((name, "is missing from the checkpoint", None, "state-incomplete") for name in known if name not in state),
        *((name, "is no state of this quantizer", None, "state-unknown") for name in state if name not in known),
    ]
    for name, value in state.items():
        if name in known:
            wrong += [(name, *found) for found in _about(quantizer, name, value, state.get("scale"))]
    if not wrong:
        wrong = [(name, *found) for name, found in _about_grid(quantizer, state)]
    return [
        Problem(what=f"{name} {what}", where=quantizer.site, value=value, fix=_FIX, code=code)
        for name, what, value, code in wrong
    ]


def parameter_problems(sites: Iterable[str], named: Iterable[tuple[str, Tensor]]) -> list[Problem]:
    """NaN in the parameters of a model, and infinity in those of operators with quantized `sites`."""
    operators = {site.rpartition(":")[0] for site in sites}
    found = []
    for name, tensor in named:
        if not tensor.is_floating_point() or tensor.is_meta or tensor.element_size() < 2 or is_finite(tensor):
            continue
        has_nan = bool(tensor.isnan().any())
        if not has_nan and name.rpartition(".")[0] not in operators:
            continue
        found.append(
            Problem(
                what=f"{'NaN' if has_nan else 'infinity'} in a parameter",
                where=name,
                fix="load weights that are finite, or train the model again",
                code="parameter-not-finite",
            )
        )
    return found


_Found = tuple[str, object, str]


def _about(quantizer: Quantizer, name: str, value: Tensor, scale: Tensor | None) -> list[_Found]:
    """One tensor by itself: its dtype, its shape, its numbers."""
    if value.dtype != torch.float32:
        return [("is not float32", str(value.dtype), "state-dtype")]
    shape = tuple(value.shape)
    low, high = _RANKS[quantizer.layout.granularity]
    if name == "codes":
        fits = shape == (2,)
    elif name == "scale" or not isinstance(scale, Tensor):
        fits = low <= value.dim() <= high and value.numel() > 0
    else:
        fits = shape == tuple(scale.shape)
    if not fits:
        return [("has an impossible shape", shape, "state-shape")]
    if not bool(value.isfinite().all()):
        return [("is not finite", _odd(value, ~value.isfinite()), "state-not-finite")]
    if name == "codes":
        return [] if tuple(value.tolist()) in _codes(quantizer) else [("are not those of the format", shape, "codes")]
    if name == "scale":
        bad = value == 0 if quantizer.learns(name) else value < SMALLEST  # arithmetic uses |s| of a learned scale
        return [("is not a positive normal number", _odd(value, bad), "scale-range")] if bool(bad.any()) else []
    return []


def _codes(quantizer: Quantizer) -> set[tuple[float, float]]:
    """What calibration can have made of the format's codes."""
    format = quantizer.spec.format
    found = {(format.qmin, format.qmax)}
    if format.adasign:
        found.add((format.unsigned().qmin, format.unsigned().qmax))
    if quantizer.balanced and format.symmetric:
        found |= {(max(low, -high), high) for low, high in found}
    return {(float(low), float(high)) for low, high in found}


def _about_grid(quantizer: Quantizer, state: Mapping[str, Tensor]) -> list[tuple[str, _Found]]:
    """The grid that follows from all of it."""
    probe: Quantizer = object.__new__(type(quantizer))  # nothing of the quantizer itself changes
    probe.__dict__.update(quantizer.__dict__)
    probe.__dict__["_parameters"] = {name: state[name] for name in quantizer._parameters}
    probe.__dict__["_buffers"] = {name: state[name] for name in quantizer._buffers}
    low, high = (int(code) for code in state["codes"].tolist())
    probe.__dict__.update(qmin=low, qmax=high)
    with torch.no_grad():
        grid = probe.grid()
        odd = probe.odd_state()
    found: list[tuple[str, _Found]] = (
        [] if odd is None else [(odd, ("is out of range", _first(state[odd]), "state-range"))]
    )
    scale, zero_point = grid.scale, grid.zero_point
    if not bool(((scale >= SMALLEST) & (scale <= LARGEST)).all()):
        found.append(("scale", ("is not a positive normal number", _odd(scale, ~(scale >= SMALLEST)), "scale-range")))
    ends = torch.maximum((low - zero_point).abs(), (high - zero_point).abs()) * scale
    if not bool(ends.isfinite().all()):
        found.append(("scale", ("is so large that codes stand for infinity", _first(scale), "scale-overflow")))
    inside = (zero_point >= low) & (zero_point <= high) & (zero_point == zero_point.round())
    if quantizer.spec.format.symmetric:
        inside &= zero_point == 0
    if not bool(inside.all()):
        found.append(("zero_point", ("is not a code of the format", _odd(zero_point, ~inside), "zero-point-range")))
    return found


def _odd(value: Tensor, where: Tensor) -> float:
    return _first(value[where]) if bool(where.any()) else _first(value)


def _first(value: Tensor) -> float:
    return float(value.reshape(-1)[0])
