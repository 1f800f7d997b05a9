"""Validate the state of quantizers on load, and track which weights a range was calibrated for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bitwright.core.errors import CalibrationError, Problem
from bitwright.quantizers.grid import LARGEST, SMALLEST, Grid, is_finite

if TYPE_CHECKING:
    from bitwright.quantizers.base import Quantizer


_FIX = "save the checkpoint again from a calibrated model, or calibrate this site again"
_RANKS = {"tensor": (0, 0), "channel": (1, 1), "group": (1, 64)}


def state_problems(quantizer: Quantizer, state: Mapping[str, Tensor]) -> list[Problem]:
    """All problems of a state for this quantizer. `state` has the names of the quantizer's state dict."""
    known = {**quantizer._parameters, **quantizer._buffers}
    wrong: list[tuple[str, str, object, str]] = [
        *((name, "is missing from the checkpoint", None, "state-incomplete") for name in known if name not in state),
        *(
            (name, "is not part of this quantizer's state", None, "state-unknown")
            for name in state
            if name not in known
        ),
    ]
    for name, value in state.items():
        if name in known:
            wrong += [(name, *found) for found in _tensor_problems(quantizer, name, value, state.get("scale"))]
    if not wrong:
        wrong = [(name, *found) for name, found in _grid_problems(quantizer, state)]
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
                fix="load finite weights, or train the model again",
                code="parameter-not-finite",
            )
        )
    return found


_Found = tuple[str, object, str]


def _tensor_problems(quantizer: Quantizer, name: str, value: Tensor, scale: Tensor | None) -> list[_Found]:
    """Problems of one tensor: dtype, shape, values."""
    if value.dtype != torch.float32:
        return [("is not float32", str(value.dtype), "state-dtype")]
    shape = tuple(value.shape)
    low, high = _RANKS[quantizer.layout.granularity]
    if name == "codes":
        fits = shape == (2,)
    elif name == "scale" or not isinstance(scale, Tensor):
        fits = low <= value.dim() <= high and value.numel() > 0
    else:
        fits = shape in (tuple(scale.shape), *quantizer.other_shapes)
    if not fits:
        return [("has an invalid shape", shape, "state-shape")]
    if not bool(value.isfinite().all()):
        return [("is not finite", _first_invalid(value, ~value.isfinite()), "state-not-finite")]
    if name == "codes":
        return [] if tuple(value.tolist()) in _codes(quantizer) else [("don't match the format", shape, "codes")]
    if name == "scale":
        # a learned scale is used as |s|, or with its sign in a full format
        bad = value == 0 if quantizer.learns(name) else _size(quantizer, value) < SMALLEST
        return [(_not_normal(quantizer), _first_invalid(value, bad), "scale-range")] if bool(bad.any()) else []
    return []


def _size(quantizer: Quantizer, scale: Tensor) -> Tensor:
    """The scales, without the sign that those of a full format may have."""
    return scale.abs() if quantizer.spec.format.full else scale


def _not_normal(quantizer: Quantizer) -> str:
    return "is not a normal number" if quantizer.spec.format.full else "is not a positive normal number"


def _codes(quantizer: Quantizer) -> set[tuple[float, float]]:
    """The code ranges that calibration can produce for the format."""
    format = quantizer.spec.format
    found = {(format.qmin, format.qmax)}
    if format.adasign:
        found.add((format.unsigned().qmin, format.unsigned().qmax))
    if quantizer.balanced and format.symmetric:
        found |= {(max(low, -high), high) for low, high in found}
    return {(float(low), float(high)) for low, high in found}


def _grid_problems(quantizer: Quantizer, state: Mapping[str, Tensor]) -> list[tuple[str, _Found]]:
    """Problems of the resulting grid."""
    probe: Quantizer = object.__new__(type(quantizer))  # leaves the quantizer itself unchanged
    probe.__dict__.update(quantizer.__dict__)
    probe.__dict__["_parameters"] = {name: state[name] for name in quantizer._parameters}
    probe.__dict__["_buffers"] = {name: state[name] for name in quantizer._buffers}
    low, high = (int(code) for code in state["codes"].tolist())
    probe.__dict__.update(qmin=low, qmax=high)
    with torch.no_grad():
        grid = probe.grid()
        odd = probe.invalid_state()
    found: list[tuple[str, _Found]] = (
        [] if odd is None else [(odd, ("is out of range", _first(state[odd]), "state-range"))]
    )
    scale, zero_point = grid.scale, grid.zero_point
    size = _size(quantizer, scale)
    if not bool(((size >= SMALLEST) & (size <= LARGEST)).all()):
        found.append(("scale", (_not_normal(quantizer), _first_invalid(scale, ~(size >= SMALLEST)), "scale-range")))
    ends = torch.maximum((low - zero_point).abs(), (high - zero_point).abs()) * size
    if not bool(ends.isfinite().all()):
        found.append(("scale", ("is so large that codes represent infinity", _first(scale), "scale-overflow")))
    inside = (zero_point >= low) & (zero_point <= high) & (zero_point == zero_point.round())
    if quantizer.spec.format.symmetric:
        inside &= zero_point == 0
    if not bool(inside.all()):
        found.append(
            ("zero_point", ("is not a code of the format", _first_invalid(zero_point, ~inside), "zero-point-range"))
        )
    return found


def _first_invalid(value: Tensor, where: Tensor) -> float:
    return _first(value[where]) if bool(where.any()) else _first(value)


def _first(value: Tensor) -> float:
    return float(value.reshape(-1)[0])


_SUMS = 64  # the number of sums in a fingerprint, along the memory order and across it
_SAME = 0.01  # relative to a weight's norm; rounding to bfloat16 changes it by 0.002
_SAMPLED = 8
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

Key = tuple[object, ...]


@dataclass
class _Known:
    version: Key
    mark: Tensor | None
    """Its fingerprint; None: not computed until its next use."""
    grid: Grid | None
    """Its own grid if it appeared after calibration; None: the grid of calibration."""


@dataclass
class Tracked:
    """The known weight tensors of one quantizer."""

    known: dict[Key, _Known] = field(default_factory=dict)
    fresh: bool = False
    """Whether the current tensor was not observed in this calibration."""
    calibrated: Grid | None = None
    """The grid of calibration, if another tensor has its own."""

    def refresh(self) -> None:
        """Accept the current values after an intentional change."""
        self.known = {key: _Known(one.version, None, one.grid) for key, one in self.known.items() if key[0] != "values"}

    def forget(self) -> None:
        """Associate ranges from another source with the next tensor."""
        self.known, self.calibrated = {}, None


def identify_weight(quantizer: Quantizer, x: Tensor) -> Problem | None:
    """Identify the weight that is about to be quantized; in eager mode only.

    During calibration, a new tensor is observed. Afterwards, a tensor with its own range uses it, a new tensor gets a
    range (and a warning is returned), and a known tensor with changed values is an error.
    """
    root = x if x._base is None else x._base
    stored = isinstance(root, nn.Parameter)
    if quantizer.of or not (stored or quantizer.weight) or type(x) not in _PLAIN or x.numel() == 0:
        return None
    tracked = quantizer.tracked
    mark = None if stored else _fingerprint(x)
    key: Key = ("memory", x.data_ptr(), x.shape, x.stride()) if stored else ("values", x.shape)
    entry = tracked.known.get(key)
    if quantizer.observing:
        _while_observing(quantizer, tracked, key, x, mark)
        return None
    if quantizer.training or (stored and root.grad is not None):  # weights change, and ranges are updated or learned
        tracked.forget()
        return None
    if entry is not None and stored and entry.version == _version(x):
        _use(quantizer, tracked, entry)
        return None
    mark = _fingerprint(x) if mark is None else mark
    if not tracked.known or (entry is not None and entry.mark is None):
        tracked.known[key] = _Known(_version(x), mark, None if entry is None else entry.grid)
        return None
    alike = next((one for one in tracked.known.values() if one.mark is not None and _same(one.mark, mark)), None)
    if alike is not None:  # moved, cast, or copied
        tracked.known[key] = one = _Known(_version(x), mark, alike.grid)
        _use(quantizer, tracked, one)
        return None
    return _handle_new_weight(quantizer, tracked, key, x, mark, changed=entry is not None and stored)


def _while_observing(quantizer: Quantizer, tracked: Tracked, key: Key, x: Tensor, mark: Tensor | None) -> None:
    if quantizer.observer is None:
        tracked.forget()
    mark = _fingerprint(x) if mark is None and key not in tracked.known else mark
    known = key in tracked.known and (mark is None or _same(tracked.known[key].mark, mark))
    tracked.fresh = not known
    if not known and mark is not None:
        tracked.known[key if key not in tracked.known else (*key, len(tracked.known))] = _Known(_version(x), mark, None)


def _use(quantizer: Quantizer, tracked: Tracked, entry: _Known) -> None:
    """Activate the tensor's own grid, if it has one."""
    if tracked.calibrated is not None:
        quantizer.set_grid(tracked.calibrated if entry.grid is None else entry.grid)


def _handle_new_weight(
    quantizer: Quantizer, tracked: Tracked, key: Key, x: Tensor, mark: Tensor, *, changed: bool
) -> Problem:
    if changed or quantizer.fold is not None or key[0] == "values" or not quantizer.ranges_weights:
        problem = Problem(
            what="the weight was changed or replaced after calibration, so its range is not valid",
            where=quantizer.site,
            value=tuple(x.shape),
            fix="calibrate(model, batches) again, or load a checkpoint that was saved with its ranges",
            code="weights-changed",
        )
        if quantizer.ranges_weights:
            raise CalibrationError(
                problem.what, where=problem.where, value=problem.value, fix=problem.fix, code=problem.code
            )
        tracked.known[key] = _Known(_version(x), mark, None)
        return problem
    tracked.calibrated = tracked.calibrated or _grid(quantizer)
    observer = quantizer.new_observer()
    wide = x.detach().to(torch.float32)
    observer.observe(quantizer.layout.rows(wide))
    quantizer.set_range(*observer.range(), x.shape, wide)
    tracked.known[key] = _Known(_version(x), mark, _grid(quantizer))
    return Problem(
        what="this operator reads a different weight than during calibration; the weight gets its own range, but "
        "activation ranges may not fit",
        where=quantizer.site,
        value=tuple(x.shape),
        fix="calibrate with inputs that select every weight",
        code="unseen-weight",
    )


def _grid(quantizer: Quantizer) -> Grid:
    """The current grid in new tensors: the quantizer overwrites its own."""
    grid = quantizer.grid()
    return replace(grid, scale=grid.scale.clone(), zero_point=grid.zero_point.clone())


def _version(x: Tensor) -> Key:
    """A key that changes with the tensor: torch's version counter and some values (`.data` writes aren't counted).

    On a GPU, reading values would synchronize at every operator, so only the version counter is used.
    """
    if x.device.type != "cpu" or not x.is_contiguous():
        return (x._version,)
    step = max(1, x.numel() // _SAMPLED)
    return (x._version, *x.detach().view(-1)[::step][:_SAMPLED].tolist())


@torch.no_grad()
def _fingerprint(x: Tensor) -> Tensor:
    """Maximum, norm, and partial sums of a weight: distinguishes weights, but is not exact after a cast."""
    flat = x.detach().reshape(-1).to(torch.float32)
    rest = -flat.numel() % _SUMS
    grid = torch.nn.functional.pad(flat, (0, rest)).view(_SUMS, -1) if rest else flat.view(_SUMS, -1)
    across = torch.nn.functional.pad(flat, (0, rest)).view(-1, _SUMS) if rest else flat.view(-1, _SUMS)
    parts = (flat.norm().view(1), flat.abs().max().view(1), grid.sum(1), across.sum(0))
    return torch.cat(parts).cpu()


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is None:
        return True
    size = float(torch.maximum(a[0], b[0]))
    largest = float(torch.maximum(a[1], b[1]))
    near = abs(float(a[0] - b[0])) <= _SAME * size and abs(float(a[1] - b[1])) <= _SAME * largest
    return near and float((a[2:] - b[2:]).norm()) <= 2 * _SAME * size
