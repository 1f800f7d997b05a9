"""`capture(model, inputs)`: run a model on real inputs, record every operator, and leave the model unchanged."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError, CalibrationError, CaptureError, Problem, first_line, line_of
from bitwright.core.tensor_tree import (
    as_call,
    batch_size,
    map_tensors,
    plain_tensors,
    slice_batch,
    tensors_in,
    untouched,
)
from bitwright.graph.graph import Graph, Op, Output, Parameter, Port, Role, Source, merged, operator_name, primary_kind
from bitwright.graph.interception import Interceptor, bare, install, uninstall
from bitwright.graph.operators import carries_floats, in_transform, is_inplace, kind_of, locate, macs, reads_values


@strict
def capture(model: nn.Module, *inputs: Any, train: bool = False) -> Graph:
    """Record the operators that `model` calls for `inputs`.

    Each of `inputs` is one example call: a tensor, a tuple of positional arguments or a dict of keyword arguments.
    Several recordings are merged; `graph.partial(op)` tells whether only some of them reach an operator. The model runs
    without gradients, and in eval mode unless `train` is set. Its mode, buffers and attributes and the random
    state are restored afterwards.

    >>> graph = capture(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.ones(1, 3))
    >>> ", ".join(op.name for op in graph.ops)
    '0, 1'
    """
    if not isinstance(model, nn.Module):
        raise CaptureError("capture needs a torch.nn.Module", value=type(model).__name__, code="not-a-module")
    if not inputs:
        raise CaptureError("capture needs at least one example input", fix="capture(model, batch)", code="no-inputs")
    model = bare(model)
    check_runnable(model)
    with report_batch_errors(model, inputs[0]):
        graph = _run(model, inputs[0], train=train)
    for example in inputs[1:]:
        with report_batch_errors(model, example):
            graph = merged(graph, _run(model, example, train=train))
    return graph


def reject_empty(batch: Any) -> None:
    """Raise if a batch has tensors, but no values."""
    tensors = [tensor for _, tensor in tensors_in(batch)]
    if tensors and not any(tensor.numel() for tensor in tensors):
        raise CalibrationError(
            "the batch has no samples",
            value=", ".join(str(tuple(tensor.shape)) for tensor in tensors),
            fix="give a batch with at least one sample",
            code="empty-batch",
        )


def capture_paths(model: nn.Module, inputs: Iterable[Any], *, most: int) -> Graph:
    """Record example calls until one adds no new operator, but at most `most` calls.

    Most models need two calls. Models with data-dependent control flow need more.
    """
    model = bare(model)
    check_runnable(model)
    calls = iter(inputs)
    first, *second = islice(calls, 2)
    graph = _capture_few(model, first, second[0] if second else first)
    if graph is not None:
        return graph
    with report_batch_errors(model, first):
        graph = capture(model, first)
    for example in islice(chain(second, calls), most - 1):
        known = len(graph.ops)
        with report_batch_errors(model, example):
            found = _run(model, example, train=False)
        graph = merged(graph, found)
        if len(graph.ops) == known:
            break
    return graph


def _capture_few(model: nn.Module, first: Any, second: Any) -> Graph | None:
    """Record only the first samples of two calls. Return None if complete batches might take another path.

    They take the same path if the model's code reads no tensor values, and if one sample, two samples and the shapes of
    a complete batch take the same path.
    """
    few = slice_batch(first, 0, 2)
    other = slice_batch(second, 0, 1 if batch_size(few) > 1 else 2)
    if batch_size(few) == batch_size(other):
        return None
    found: list[Graph] = []
    for example in (few, other):
        try:
            graph, values_read = _record(model, example, train=False)
        except Exception:  # the model may require complete batches; they are tried next
            return None
        if values_read:
            return None
        found.append(graph)
    if found[0].by_name.keys() != found[1].by_name.keys():
        return None
    return merged(*found) if _takes_path(model, first, found[0]) else None


def _takes_path(model: nn.Module, batch: Any, graph: Graph) -> bool:
    """Whether a batch calls exactly these operators. Only shapes are computed, so this is cheap for large batches."""
    args, kwargs = map_tensors(as_call(batch), _without_values)
    try:
        found = run_recorded(model, _ShapeRecorder(model, args, kwargs), args, kwargs, train=False)
    except Exception:  # an operator that needs values, or one that meta tensors don't support
        return False
    return found.by_name.keys() == graph.by_name.keys()


def check_runnable(model: nn.Module) -> None:
    """Reject uninitialized tensors and modules with invisible operators. Report all problems at once."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    meta = [name for name, tensor in tensors if name not in lazy and tensor.is_meta]
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    outermost = [path for path in scripted if not any(_is_inside(path, other) for other in scripted)]
    problems = [
        Problem(what=what, where=_some(where), value=len(where), fix=fix, code=code)
        for what, where, fix, code in (
            (
                "these parameters are not initialized: their modules are lazy",
                lazy,
                "run the model once on an example, model(batch), then quantize it",
                "uninitialized-parameter",
            ),
            (
                "these tensors have no values: they are on the meta device",
                meta,
                "load the weights first (model.to_empty, then load_state_dict), or build the model on a device",
                "meta-tensor",
            ),
            (
                "these modules are compiled by torch.jit, which hides their operators",
                [path or type(model).__name__ for path in outermost],
                "use the original Python modules instead of the scripted or traced ones",
                "scripted-module",
            ),
        )
        if where
    ]
    if problems:
        error = CaptureError(problems[0].what, code=problems[0].code)
        error.problems = problems
        error.args = ("\n".join(map(str, problems)),)
        raise error


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", … ({len(names)} in all)" if len(names) > 8 else "")


def _run(model: nn.Module, example: Any, *, train: bool) -> Graph:
    return _record(model, example, train=train)[0]


def _record(model: nn.Module, example: Any, *, train: bool) -> tuple[Graph, bool]:
    """The recorded graph, and whether the model's code read tensor values."""
    args, kwargs = as_call(example)
    recorder = Recorder(model, args, kwargs)
    return run_recorded(model, recorder, args, kwargs, train=train), recorder.values_read


def run_recorded(
    model: nn.Module, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool
) -> Graph:
    """Call the model once with a recorder, and restore the model afterwards."""
    with untouched(model, train=train):
        try:
            install(model, recorder)
            result = model(*args, **kwargs)
        finally:
            uninstall(model, recorder)
    return recorder.graph(result)


@contextmanager
def report_batch_errors(model: nn.Module, example: Any) -> Iterator[None]:
    """If the model also fails on the batch without recording, report it as an error of the batch."""
    try:
        yield
    except BitwrightError:
        raise
    except Exception as error:
        args, kwargs = as_call(example)
        if not _fails_alone(model, args, kwargs):
            raise CaptureError(
                f"the model runs, but its operators can't be recorded: {type(error).__name__}: {first_line(error)}",
                where=line_of(error).removeprefix(", at ") or type(model).__name__,
                fix="replace the code there (torch.cond and torch.while_loop by `if` or a loop), or quantize only the "
                "rest of the model",
                code="recording-failed",
            ) from error
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for _, tensor in tensors_in(example))
        raise CaptureError(
            f"the model fails on a batch: {type(error).__name__}: {first_line(error)}{line_of(error)}",
            value=shapes.replace("torch.", ""),
            fix="give batches of the model's inputs, without targets (those of Workload.calibration, too)",
            code="model-failed",
        ) from error


def _fails_alone(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        with untouched(model, train=False):
            model(*args, **kwargs)
    except Exception:
        return True
    return False


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Recorder(Interceptor):
    """Records each call. Tensors are identified by weak references, so recording doesn't keep activations alive."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.primary = {path: primary_kind(module) for path, module in model.named_modules()}
        self.ops: list[Op] = []
        self.depths: dict[str, int] = {}
        self.known: dict[int, tuple[weakref.ref[Tensor], Source, bool]] = {}
        self.calls: dict[str, int] = {}
        self.frame: tuple[str, int, dict[str, int]] = ("", 0, {})
        self.unknown = 0
        self.values_read = False  # whether the model's code read tensor values, which may change its path
        self.views: set[str] = set()  # operators that write to a view: their last output is the base tensor
        names: dict[int, tuple[nn.Parameter, list[str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), (parameter, []))[1].append(name)
        self.parameters = tuple(
            Parameter(names=tuple(known), shape=tuple(p.shape), dtype=_dtype(p)) for p, known in names.values()
        )
        for parameter, known in names.values():
            self._know(parameter, Source("param", known[0]), constant=True)
        for name, buffer in model.named_buffers():
            self._know(buffer, Source("buffer", name), constant=True)
        for path, module in model.named_modules():
            for name, tensor in plain_tensors(module):
                if id(tensor) not in self.known:  # nn.LSTM also keeps its parameters in a list
                    name = f"{path}.{name}" if path else name
                    self._know(tensor, Source("constant", name), constant=True)
        self.inputs: list[str] = []
        for name, tensor in named_inputs(model, args, kwargs):
            self.inputs.append(name)
            self._know(tensor, Source("input", name), constant=False)

    def _know(self, tensor: Tensor, source: Source, *, constant: bool) -> None:
        self.known[id(tensor)] = (weakref.ref(tensor), source, constant)

    def _source(self, tensor: Tensor) -> tuple[Source, bool]:
        entry = self.known.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1], entry[2]
        # The tensor comes from a scripted function or is a global of the model's code. Treating an activation as a
        # weight would quantize it wrongly; treating a constant as an activation is safe.
        source = Source("unknown", f"unknown{self.unknown}")
        self.unknown += 1
        self._know(tensor, source, constant=False)
        return source, False

    def enter(self, path: str) -> Any:
        """Count the calls of the module."""
        before = self.frame
        call = self.calls.get(path, 0)
        self.calls[path] = call + 1
        self.frame = (path, call, {})
        return before

    def leave(self, token: Any) -> None:
        """Return to the calling module."""
        self.frame = token

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call, and record it if it makes a tensor."""
        kind = kind_of(func)
        self.values_read = self.values_read or reads_values(func, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)
        found = [(port, tensor, *self._source(tensor)) for port, _, tensor in locate(kind, func, args, kwargs)]
        before = [tuple(tensor.shape) for _, tensor, _, _ in found]
        result = func(*args, **kwargs)
        made = [tensor for _, tensor in tensors_in(result)]
        inplace = is_inplace(func) or kwargs.get("inplace") is True or kwargs.get("out") is not None
        if inplace and not made and found:  # x[i] = y returns None and changes x
            made = [found[0][1]]
        if made:
            base = made[0]._base if inplace else None
            equation = args[0] if args and isinstance(args[0], str) else ""
            name = self._record(kind, found, before, made if base is None else [*made, base], inplace, equation)
            if base is not None:
                self.views.add(name)
        return result

    def _record(
        self,
        kind: str,
        found: list[tuple[str, Tensor, Source, bool]],
        shapes: list[tuple[int, ...]],
        made: list[Tensor],
        inplace: bool,
        equation: str,
    ) -> str:
        path, call, counts = self.frame
        floats = not found or carries_floats([tensor for _, tensor, _, _ in found], {})
        product = macs(
            kind, {port: shape for (port, *_), shape in zip(found, shapes, strict=True)}, tuple(made[0].shape), equation
        )
        if in_transform():  # recorded, but quantizers are not supported here
            kind = f"transformed_{kind}"
        counted = kind if floats else f"{kind}_int"
        index = counts.get(counted, 0)
        counts[counted] = index + 1
        name = operator_name(path, call, counted, index, self.primary[path])
        ports = tuple(
            Port(name=port, sources=(source,), shape=shape, dtype=_dtype(tensor), role=_role(port, constant))
            for (port, tensor, source, constant), shape in zip(found, shapes, strict=True)
        )
        constant = all(constant for _, _, _, constant in found)
        depth = 1 + max((self.depths.get(s.name, 0) for _, _, s, _ in found if s.kind == "op"), default=0)
        self.depths[name] = depth
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                module=path,
                call=call,
                ports=ports,
                outputs=tuple(Output(shape=tuple(t.shape), dtype=_dtype(t)) for t in made),
                macs=product,
                depth=depth,
                constant=constant,
                inplace=inplace,
                seen=1,
            )
        )
        for position, tensor in enumerate(made):
            self._know(tensor, Source("op", name, position), constant=constant)
        return name

    def graph(self, result: Any) -> Graph:
        """The recorded operators and the model's outputs."""
        outputs = tuple((path, self._source(tensor)[0]) for path, tensor in tensors_in(result))
        if not outputs:
            raise CaptureError(
                "the model returned no tensor",
                value=type(result).__name__,
                fix="return a tensor, or tuples, lists, dicts or dataclasses of tensors",
                code="no-output-tensor",
            )
        return Graph(
            ops=self._without_unread_bases({source for _, source in outputs}),
            inputs=tuple(self.inputs),
            outputs=outputs,
            parameters=self.parameters,
            runs=1,
        )

    def _without_unread_bases(self, read: set[Source]) -> tuple[Op, ...]:
        """Remove base tensors of views from the outputs of operators unless the base itself is read."""
        read.update(source for op in self.ops for port in op.ports for source in port.sources)
        return tuple(
            replace(op, outputs=op.outputs[:-1])
            if op.name in self.views and Source("op", op.name, len(op.outputs) - 1) not in read
            else op
            for op in self.ops
        )


class _ShapeRecorder(Recorder):
    """Records a call on tensors without values."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call on meta tensors, and record it."""
        return super().call(func, map_tensors(args, _without_values), map_tensors(kwargs, _without_values))


def _without_values(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.detach().to("meta")


def _role(port: str, constant: bool) -> Role:
    if port in ("running_mean", "running_var", "attn_mask"):
        return "other"
    if not constant:
        return "activation"
    return "bias" if port == "bias" else "weight"


def named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a call with the name of its parameter."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the model's own call raises a better error
        bound = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    yield from tensors_in(bound)
