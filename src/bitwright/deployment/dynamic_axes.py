"""Verify that a batch axis is really dynamic: `torch.export` traces one size; this module runs others and compares.

A program can keep the batch symbolic and still be wrong for other sizes: `x.split(2)` becomes a fixed number of slices,
and a branch on `x.shape[0]` keeps only one side. The exported program therefore runs with other sizes and is compared
with the model.
"""

from __future__ import annotations

import inspect
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.backends import DEFAULT_RUNTIME
from bitwright.core.errors import BitwrightError
from bitwright.core.tensor_tree import as_array, call_copied, eval_mode, map_tensors, tensors_in
from bitwright.deployment.parity import AgreementSums
from bitwright.deployment.runtimes.base import Runtime, open_runtime
from bitwright.quantizers import find_attachment, in_mode
from bitwright.quantizers.preparation import QuantizationMode

_LARGE = 1 << 16  # a larger limit comes from torch (32-bit indexes), not from the model's code
_EXACT_DB = 60.0  # minimum agreement of the float program with the float model,
_SPREAD_DB = (
    15.0  # or that of the traced size minus this, for half precision and outputs that are mostly rounding error
)
_SEARCHED = 256  # the largest size that is tried to violate a condition of the program
_TOLERATED = 10**-1.5  # the artefact's deviation relative to the output, at any size
_NO_WORSE = 4.0  # maximum error relative to that of the traced size


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A dynamic size of a program, and the number of rows of each input tensor for it."""

    size: int
    """The traced size."""
    upper: int | None
    """The largest size that the program's constraints allow; None if there is no limit."""
    rows: tuple[Callable[[int], int] | None, ...]
    """For each input tensor, the number of rows for a size; None if the tensor doesn't have this axis."""

    def resized(self, nest: Any, size: int) -> Any:
        """The same inputs with this size; samples are repeated or dropped."""
        rows = iter(self.rows)

        def resize(tensor: Tensor) -> Tensor:
            count = next(rows)
            if count is None:
                return tensor
            return tensor[torch.arange(count(size), device=tensor.device) % tensor.shape[0]]

        return map_tensors(nest, resize)

    def sizes(self) -> tuple[int, ...]:
        """Sizes to try: 1 and 2, which are often special cases in code, and a larger odd one."""
        beyond = self.size + 1 + self.size % 2 if self.upper is None else self.upper + 1
        return tuple(size for size in dict.fromkeys([1, 2, beyond]) if size != self.size)


def free_axes(program: torch.export.ExportedProgram, nest: Any) -> list[Axis]:
    """The dynamic first axes of a program's inputs, the batch first; empty if the batch is fixed."""
    names = set(program.graph_signature.user_inputs)
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    tensors = [tensor for _, tensor in tensors_in(nest)]
    if len(shapes) != len(tensors):
        return []
    firsts = [sympy.sympify(str(shape[0])) if len(shape) else None for shape in shapes]
    batch = next((first for first in firsts if first is not None), None)
    if batch is None or not batch.free_symbols:
        return []
    limits = {str(symbol): limit for symbol, limit in program.range_constraints.items()}
    # inputs with equal numbers of rows share the batch axis, even if torch.export found no relation between them
    together: dict[int, list[Any]] = {}
    known = [sorted(first.free_symbols, key=str) for first in firsts if first is not None]
    for symbol in dict.fromkeys(one for symbols in known for one in symbols):
        plain = [tensor.shape[0] for first, tensor in zip(firsts, tensors, strict=True) if first == symbol]
        together.setdefault(int(plain[0]) if plain else 2, []).append(symbol)
    return [_axis(size, symbols, firsts, limits) for size, symbols in together.items()]


def _axis(size: int, symbols: list[Any], firsts: list[Any], limits: dict[str, Any]) -> Axis:
    def rows(first: Any) -> Callable[[int], int] | None:
        if first is None or first.free_symbols.isdisjoint(symbols):
            return None
        return lambda count: int(first.subs(dict.fromkeys(symbols, count)))

    uppers = [limits[str(symbol)].upper for symbol in symbols if str(symbol) in limits]
    upper = min((int(limit) for limit in uppers if limit.is_finite and limit < _LARGE), default=None)
    return Axis(size=size, upper=upper, rows=tuple(rows(first) for first in firsts))


def sizes_by_symbol(inputs: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The input and axis of each symbol that is a size of an input."""
    found: dict[str, str] = {}
    for path, tensor in inputs:
        for axis, size in enumerate(cast("tuple[int | torch.SymInt, ...]", tuple(tensor.shape))):
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size), f"{path}.shape[{axis}]")
    return found


def with_named_sizes(text: str, sizes: Mapping[str, str], parameters: Sequence[str] = ()) -> str:
    """Replace torch's symbols and expressions for sizes by the input and the axis.

    >>> with_named_sizes("Eq(s77, 4)", {"s77": "x.shape[0]"})
    'Eq(x.shape[0], 4)'
    """
    named = re.sub(r"\bs\d+\b", lambda match: sizes.get(match[0], match[0]), text)
    named = re.sub(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", r"\1.shape[\2]", named)
    return re.sub(r"\*args\[(\d+)\]", lambda match: dict(enumerate(parameters)).get(int(match[1]), match[0]), named)


def frozen_size(
    model: nn.Module,
    program: torch.export.ExportedProgram,
    path: Path,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axes: list[Axis],
    *,
    flat: bool = False,
) -> str | None:
    """The reason why the artefact at `path` differs from the model at another batch size, or None.

    With `flat`, the program takes the call's tensors as separate arguments.

    `program` is compared in float, which reveals small differences. The artefact is compared on ONNX Runtime, which
    users will run.
    """
    reason = _frozen_reason(model, program, path, (args, kwargs), axes, flat=flat)
    parameters = () if flat else tuple(inspect.signature(model.forward).parameters)
    return None if reason is None else with_named_sizes(reason, _symbols(program), parameters)


def _symbols(program: torch.export.ExportedProgram) -> dict[str, str]:
    names = set(program.graph_signature.user_inputs)
    inputs = [(node.name, node.meta.get("val")) for node in program.graph.nodes if node.name in names]
    return sizes_by_symbol((name, value) for name, value in inputs if isinstance(value, Tensor))


def _frozen_reason(
    model: nn.Module, program: torch.export.ExportedProgram, path: Path, call: Any, axes: list[Axis], *, flat: bool
) -> str | None:
    args, kwargs = call
    real = _opened(path)
    with torch.no_grad(), eval_mode(model):
        verifier = _Verifier(model, program.module(check_guards=False), real, args, kwargs, flat=flat)
        for axis in axes:
            tried: set[int] = set()
            broken = _breaking_sizes(model, program, (args, kwargs), axis, flat=flat)
            for size in dict.fromkeys([*axis.sizes(), *broken, 2 * axis.size]):
                if axis.upper is not None and size > 8 * axis.size + 4:  # too large to run
                    return f"it was traced for batches up to {axis.upper}"
                if size > 8 * axis.size + 4:
                    return f"the model's code depends on it: with {size} samples, {broken[size]} is not true"
                if size == 2 * axis.size and size not in broken and (axis.upper or max(tried, default=0) > axis.size):
                    continue  # it is for models that don't accept odd sizes
                wide_args, wide_kwargs = axis.resized((args, kwargs), size)
                try:
                    exact = verifier.outputs("float", wide_args, wide_kwargs)
                except Exception:  # the model doesn't accept this size, so the artefact doesn't have to
                    continue
                tried.add(size)
                reason = verifier.differs(exact, wide_args, wide_kwargs)
                if reason is not None:
                    return f"with {size} samples, {reason}"
            if not tried and axis is axes[0]:
                return "the model doesn't support another batch size"
    return None


def _breaking_sizes(
    model: nn.Module, program: torch.export.ExportedProgram, call: Any, axis: Axis, *, flat: bool
) -> dict[int, str]:
    """For each condition on sizes that tracing assumed (`x.shape[0] % 5 != 0`), the smallest size that violates it."""
    guards: list[str] = [] if flat else list(getattr(program, "_guards_code", ()))
    signature = inspect.signature(model.forward)
    found: dict[int, str] = {}
    for size in range(1, _SEARCHED) if guards else ():
        args, kwargs = axis.resized(map_tensors(call, lambda t: torch.empty_like(t, device="meta")), size)
        scope = {"L": signature.bind(*args, **kwargs).arguments, "torch": torch, "math": math}
        for guard in list(guards):
            try:
                holds = bool(eval(guard, scope))  # generated by torch
            except Exception:  # a condition that doesn't depend on the arguments
                guards.remove(guard)
                continue
            if not holds and size != axis.size:
                found.setdefault(size, guard)
                guards.remove(guard)
    return found


def _opened(path: Path) -> Runtime | None:
    try:
        return open_runtime(DEFAULT_RUNTIME, path)
    except BitwrightError:  # not installed, or it can't load the file, which `export` reports
        return None


class _Verifier:
    def __init__(
        self,
        model: nn.Module,
        program: Callable[..., Any],
        real: Runtime | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        flat: bool,
    ) -> None:
        self.model, self.program, self.real, self.flat = model, program, real, flat
        self.call = args, kwargs

    @cached_property
    def usual_db(self) -> float:
        """The agreement of program and model at the traced size, which matters only if another one is low."""
        return _worst_db(self.outputs("float", *self.call), self.traced(*self.call))

    @cached_property
    def usual_error(self) -> float | None:
        """The artefact's deviation at the traced size, which matters only if another one is high."""
        return self.artefact_error(*self.call)

    def outputs(self, mode: QuantizationMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[NDArray[Any]]:
        with self._in(mode), _same_randomness():
            return [as_array(tensor) for _, tensor in tensors_in(call_copied(self.model, args, kwargs))]

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[NDArray[Any]]:
        if self.flat:
            args, kwargs = tuple(tensor for _, tensor in tensors_in((args, kwargs))), {}
        with _same_randomness(), redirect_stderr(io.StringIO()):  # torch prints the traceback of a failing program
            return [as_array(tensor) for _, tensor in tensors_in(self.program(*args, **kwargs))]

    def _in(self, mode: QuantizationMode) -> AbstractContextManager[None]:
        return nullcontext() if find_attachment(self.model) is None else in_mode(self.model, mode)

    def differs(self, exact: list[NDArray[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """A description of how the program or the artefact differs from the model for these inputs, or None."""
        try:
            traced = self.traced(args, kwargs)
        except Exception as error:
            return f"the exported program fails: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
        for ours, theirs in zip(exact, traced, strict=True):
            if ours.shape != theirs.shape:
                return f"the exported program returns the shape {theirs.shape}, the model {ours.shape}"
        worst = _worst_db(exact, traced)
        if worst < _EXACT_DB and worst < self.usual_db - _SPREAD_DB:
            return f"the exported program returns different values than the model ({worst:.0f} dB)"
        if self.real is None:  # ONNX Runtime isn't installed, or can't load the file
            return None
        try:
            deviation = self.artefact_error(args, kwargs, refuse=True)
        except BitwrightError as problem:
            return None if self.usual_error is None else problem.problems[0].what
        if deviation is None or deviation <= _TOLERATED or self.usual_error is None:
            return None
        if deviation > _NO_WORSE * self.usual_error:
            return f"ONNX Runtime's deviation from the simulated model is {deviation:.2g} of the output"
        return None

    def artefact_error(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, refuse: bool = False) -> float | None:
        """The artefact's deviation from the simulated model relative to the output; None if it doesn't run."""
        if self.real is None:
            return None
        simulated = self.outputs("quantize", args, kwargs)
        try:
            results = self.real.run(self.real.feed(*args, **kwargs))
            if [array.shape for array in results] != [array.shape for array in simulated]:
                shapes = f"{[array.shape for array in results]}, the model {[array.shape for array in simulated]}"
                raise BitwrightError(f"the artefact returns the shapes {shapes}", code="shape-differs")
        except BitwrightError:
            if refuse:
                raise
            return None
        return float(10 ** (-_worst_db(simulated, results) / 20))


def _worst_db(ours: list[NDArray[Any]], theirs: list[NDArray[Any]]) -> float:
    """The lowest ratio of signal to difference among the outputs; NaN values count as equal."""
    ratios = [1000.0]
    for one, other in zip(ours, theirs, strict=True):
        sums = AgreementSums()
        one, other = (array.astype(np.float64) for array in (one, other))
        both = np.isnan(one) & np.isnan(other)
        one, other = np.where(both, 0.0, one), np.where(both, 0.0, other)
        sums.add(one, np.nan_to_num(other, nan=np.inf, posinf=np.inf, neginf=-np.inf), one)
        ratios.append(sums.result("").sqnr_db)
    return min(ratios)


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Seed random numbers, so that both sides draw the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
