"""A recording of torch functions with their arguments, which can be replayed in parts.

Calibration uses it to work on one block of a model at a time. It is used for measuring and fitting only, never for
deployment. Numbers that the model's code derives from shapes are recorded as constants, so each input shape needs its
own recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.tensor_tree import as_call, map_tensors, tensors_in
from bitwright.graph.capture import Recorder, named_inputs, run_recorded
from bitwright.graph.graph import Op, Source

Values = dict[Source, Tensor]
Runner = Callable[["Call", tuple[Any, ...], dict[str, Any]], Any]


class _Ref(Tensor):
    """A placeholder for a tensor in recorded arguments. A Tensor subclass, so that `map_tensors` finds it."""

    source: Source


def _ref(source: Source) -> _Ref:
    ref = torch.empty(0).as_subclass(_Ref)
    ref.source = source
    return ref


@dataclass(frozen=True, kw_only=True)
class Call:
    """One recorded call."""

    op: Op
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[Source]

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """A non-tensor argument, given by position or by keyword."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)


@dataclass(frozen=True, kw_only=True)
class Tape:
    """The calls of one forward, in order."""

    calls: tuple[Call, ...]
    outputs: tuple[Source, ...]
    constants: Values
    """Tensors that are not parameters, buffers, inputs or results."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The operator names, in order."""
        return tuple(call.op.name for call in self.calls)

    def position(self, operator: str) -> int:
        """The position of an operator."""
        return self.names.index(operator)

    @cached_property
    def last_read(self) -> dict[Source, int]:
        """The position of the last call that reads each tensor. The model's outputs are read at the end."""
        found = {source: index for index, call in enumerate(self.calls) for source in call.reads}
        return {**found, **dict.fromkeys(self.outputs, len(self.calls))}

    def live(self, position: int) -> set[Source]:
        """Inputs and results from before `position` that are read at `position` or later."""
        made = {call.op.name for call in self.calls[:position]}
        return {
            source
            for source, last in self.last_read.items()
            if last >= position and (source.kind == "input" or (source.kind == "op" and source.name in made))
        }

    def run(self, start: int, stop: int, values: Values, fixed: Mapping[Source, Tensor], run: Runner) -> Values:
        """Run the calls from `start` to `stop`.

        `values` are inputs and earlier results, `fixed` are parameters and buffers. Returns the values that are read at
        `stop` or later. Other values are freed as early as possible.
        """
        values = dict(values)

        def look_up(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, _Ref):
                return tensor
            source = tensor.source
            return values[source] if source in values else fixed[source]

        for position, call in enumerate(self.calls[start:stop], start):
            args, kwargs = map_tensors((call.args, call.kwargs), look_up)
            if call.op.inplace and args and isinstance(args[0], Tensor):
                args = (args[0].clone(), *args[1:])  # other calls may still read the old values
            result = run(call, args, kwargs)
            made = [tensor for _, tensor in tensors_in(result)] or [args[0]]  # x[i] = y returns nothing
            del args, kwargs, result
            for index, tensor in enumerate(made):
                values[Source("op", call.op.name, index)] = tensor
            for source in [s for s in values if self.last_read.get(s, -1) <= position]:
                del values[source]
        return values


class _TapeRecorder(Recorder):
    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(model, args, kwargs)
        self.taped: list[Call] = []
        self.kept: Values = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the arguments as well."""
        reads: set[Source] = set()

        def refer(tensor: Tensor) -> Tensor:
            source = self._source(tensor)[0]
            if source.kind in ("unknown", "constant"):
                self.kept.setdefault(source, tensor)
            reads.add(source)
            return _ref(source)

        before = len(self.ops)
        args_then, kwargs_then = map_tensors((args, kwargs), refer)
        result = super().call(func, args, kwargs)
        if len(self.ops) > before:
            call = Call(op=self.ops[-1], func=func, args=args_then, kwargs=kwargs_then, reads=frozenset(reads))
            self.taped.append(call)
        return result


def record(model: nn.Module, inputs: Any) -> tuple[Tape, Values]:
    """Record one call of a float model. Also returns the input tensors by name."""
    args, kwargs = as_call(inputs)
    taper = _TapeRecorder(model, args, kwargs)
    graph = run_recorded(model, taper, args, kwargs, train=False)
    tape = Tape(
        calls=tuple(taper.taped), outputs=tuple(source for _, source in graph.outputs), constants=dict(taper.kept)
    )
    return tape, inputs_of(model, inputs)


def inputs_of(model: nn.Module, inputs: Any) -> Values:
    """The tensors of one call by their names in a tape."""
    args, kwargs = as_call(inputs)
    return {Source("input", name): tensor for name, tensor in named_inputs(model, args, kwargs)}


def parameters_of(model: nn.Module) -> Values:
    """Parameters and buffers by their names in a tape."""
    found: Values = {Source("param", name): p for name, p in model.named_parameters(remove_duplicate=False)}
    found.update({Source("buffer", name): b for name, b in model.named_buffers(remove_duplicate=False)})
    return found


def run_call(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call as recorded."""
    return call.func(*args, **kwargs)


def depends_on_parameters(calls: Iterable[Call]) -> set[str]:
    """Operators with results that depend on a parameter. Masks and positions computed from inputs alone don't."""
    found: set[str] = set()
    for call in calls:
        if any(s.kind == "param" or (s.kind == "op" and s.name in found) for s in call.reads):
            found.add(call.op.name)
    return found
