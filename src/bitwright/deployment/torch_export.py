"""Trace the prepared model with `torch.export`, with a marker at each site, and verify that no site is lost."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import CRITICAL
from types import CodeType
from typing import Any

import torch
import torch.fx.config
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwright.core.environment import quiet
from bitwright.core.errors import ExportError, Problem, line_of
from bitwright.core.tensor_tree import batch_size, call_copied, eval_mode, map_tensors, tensors_in
from bitwright.deployment.dynamic_axes import Axis, free_axes, sizes_by_symbol, with_named_sizes
from bitwright.deployment.onnx_translation import inline_regions
from bitwright.deployment.qdq import Recorded
from bitwright.graph.capture import Recorder, named_inputs, run_recorded
from bitwright.graph.interception import bare
from bitwright.quantizers import Attachment, Fold, Quantizer, Route, align, attachment_of, in_mode, routed, tapped


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A program with markers, and facts from a real forward pass of the model."""

    program: torch.export.ExportedProgram
    recorded: Recorded
    exported: Exported


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A program of torch.export and its dynamic axes."""

    program: torch.export.ExportedProgram
    axes: list[Axis]
    """The batch and other dynamic first axes; empty if all sizes are those of the example."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """The traced call: the example, with at least two samples if the batch is dynamic."""
    flat: bool = False
    """Whether the program takes the call's tensors as separate arguments; torch.export doesn't accept dataclasses."""
    warnings: tuple[Problem, ...] = ()


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_batch: bool,
    codes: bool = True,
    sizes: Callable[[Any], Any] | None = None,
) -> Traced:
    """The prepared model with a marker at each site, and the integers (`codes`) or values of constant sites.

    `sizes` returns the dynamic axes of arguments; the default is the first axis of each tensor.

    Raises an error if the program doesn't reach the same quantizers as the model.
    """
    model = bare(model)
    attachment = attachment_of(model)
    with eval_mode(model):
        under_export, usual = Route(), Route()
        with _marking(attachment), in_mode(model, "quantize"), routed(attachment, under_export):
            exported = export_program(model, args, kwargs, dynamic_batch, sizes)
        args, kwargs = exported.args, exported.kwargs  # fewer samples, if their number is dynamic
        with routed(attachment, usual):
            recorded = _record(model, attachment, args, kwargs, _constant_sites(exported.program), codes=codes)
        if other := align(usual, under_export):  # the model takes another path under export: match the operators
            with _marking(attachment), in_mode(model, "quantize"), routed(attachment, Route(other)):
                again = export_program(model, args, kwargs, bool(exported.axes), sizes)
                exported = replace(again, warnings=again.warnings or exported.warnings)
            recorded = _record(model, attachment, args, kwargs, _constant_sites(exported.program), codes=codes)
        program = exported.program
        missing = _missing(program, recorded)
        if missing:
            missing -= _without_effect(model, attachment, program, missing, args, kwargs)
    if missing:
        raise ExportError(
            f"the exported program doesn't reach {len(missing)} of the model's {len(recorded.passed)} quantizers",
            where=", ".join(sorted(missing)[:8]),
            fix="keep these sites in float: the model calls different operators there under torch.export",
            code="export-path-differs",
        )
    return Traced(program=program, recorded=recorded, exported=exported)


def _record(
    model: nn.Module,
    attachment: Attachment,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constant: set[str],
    *,
    codes: bool,
) -> Recorded:
    """Run one real forward pass: record the sites it reaches, and the integers (or rounded values) of constant ones."""
    recorded = Recorded()

    def remember(site: str, quantizer: Quantizer, x: Tensor) -> None:
        recorded.passed[site, str(x.dtype), x.dim()] += 1
        if site in constant and codes:
            recorded.weights[site] = quantizer.integers(x)
        elif site in constant:
            recorded.values[site] = quantizer.quantize(x.to(torch.float32)).to(x.dtype)

    with tapped(model, remember), torch.no_grad(), in_mode(model, "quantize"):
        call_copied(model, args, kwargs)
    for site, fold in attachment.folds.items():
        if fold.bias is not None:
            recorded.constants[site] = fold.bias
            fold.bias = None
    return recorded


@contextlib.contextmanager
def _marking(attachment: Attachment) -> Iterator[None]:
    holders: list[Quantizer | Fold] = [*attachment.quantizers.values(), *attachment.folds.values()]
    for holder in holders:
        holder.marking = True
    try:
        yield
    finally:
        for holder in holders:
            holder.marking = False


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Trace without recording the stack of each operator, which nobody reads and which takes a tenth of the time."""
    config: Any = torch.fx.config
    usual, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = usual


class _Held(io.StringIO):
    """Keeps what this thread prints. Other threads, such as that of a progress bar, print as before."""

    def __init__(self, usual: Any) -> None:
        super().__init__()
        self.usual, self.thread = usual, threading.get_ident()

    def write(self, text: str) -> int:
        other = threading.get_ident() != self.thread
        return int(self.usual.write(text)) if other else super().write(text)

    def forget(self) -> None:
        """Discard what was printed so far."""
        self.seek(0)
        self.truncate()


@contextlib.contextmanager
def _stderr_on_success() -> Iterator[_Held]:
    """Hold back what is printed to stderr until tracing succeeds: if it fails, torch prints the whole program."""
    held = _Held(sys.stderr)
    with contextlib.redirect_stderr(held):
        yield held
    held.usual.write(held.getvalue())


def export_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_batch: bool,
    dynamic: Callable[[Any], Any] | None = None,
) -> Exported:
    """Run `torch.export`, with a dynamic batch if the model's code allows it."""
    # Clone, because views of one tensor would be traced as dependent inputs.
    args, kwargs = map_tensors((args, kwargs), Tensor.clone)
    dynamic = dynamic or _dynamic
    flat = _needs_flattening(bare(model), args, kwargs)
    with (
        _tensors_only(bare(model), args, kwargs, flat) as (forward, feed),
        torch.no_grad(),
        _without_stack_traces(),
        warnings.catch_warnings(),
        quiet("torch", level=CRITICAL),  # torch logs tens of lines before it raises what is reported below
        _stderr_on_success() as held,
    ):
        sizes = forward.__dict__["forward"].sizes
        warnings.simplefilter("ignore")  # torch's internal warnings; failures raise
        noted: tuple[Problem, ...] = ()
        reason = ""
        for samples in _numbers_of_samples(args, kwargs) if dynamic_batch else ():
            try:
                # torch.export marks its inputs as dynamic, also if it fails: copies keep the marks from the second try
                wide = map_tensors((args, kwargs), partial(_with_samples, samples))
                wide_args, wide_kwargs = feed(*wide)
                program = torch.export.export(
                    forward,
                    wide_args,
                    wide_kwargs,
                    dynamic_shapes=_by_parameter(forward, dynamic(wide_args), dynamic(wide_kwargs)),
                    strict=False,
                )
                axes = free_axes(program, wide)
                if axes:
                    inline_regions(program)
                    noted = written_buffers(program)
                    return Exported(program=program, axes=axes, args=wide[0], kwargs=wide[1], flat=flat, warnings=noted)
                reason = "the model's code depends on the batch size"
            except Exception as error:
                held.forget()
                reason = with_named_sizes(reason_of(error), sizes)
        if dynamic_batch:
            noted = (fixed_batch(reason, batch_size((args, kwargs))),)
        try:
            feed_args, feed_kwargs = feed(args, kwargs)
            program = torch.export.export(forward, feed_args, feed_kwargs, strict=False)
        except Exception as error:
            raise ExportError(
                f"torch.export can't trace the model: {with_named_sizes(reason_of(error), sizes)}",
                where=line_of(error).removeprefix(", at ") or None,
                fix=advice_for(error),
                code="torch-export-failed",
            ) from error
    inline_regions(program)
    noted += written_buffers(program)
    return Exported(program=program, axes=[], args=args, kwargs=kwargs, flat=flat, warnings=noted)


def written_buffers(program: torch.export.ExportedProgram) -> tuple[Problem, ...]:
    """A warning if outputs depend on buffers that the forward pass changes, because an artefact has no state."""
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    buffers = signature.inputs_to_buffers  # computed at each access
    names: dict[torch.fx.Node, set[str]] = {}
    read: set[str] = set()
    for node in program.graph.nodes:
        buffer = buffers.get(node.name) if node.op == "placeholder" else None
        if buffer is not None:
            names[node] = {buffer}
        elif node.op == "output":
            outputs = {one.name for one in node.all_input_nodes} & set(signature.user_outputs)
            for source in node.all_input_nodes:
                read |= names.get(source, set()) if source.name in outputs else set()
        else:
            names[node] = {name for source in node.all_input_nodes for name in names.get(source, ())}
            if getattr(getattr(node.target, "_schema", None), "is_mutable", False) and node.args:
                # until torch.onnx makes it functional, only the operator itself shows a write
                target = node.args[0]
                written |= {name for name in names.get(target, ()) if _is_view_of_buffer(target, buffers)}
    found = sorted(read & written)
    if not found:
        return ()
    return (
        Problem(
            what="the model's forward changes these buffers and its outputs depend on them; the artefact has no state "
            "and starts every call with their current values",
            where=", ".join(found),
            fix="pass the state as an input and return it as an output, or don't update it in eval mode",
            code="stateful-model",
        ),
    )


def _is_view_of_buffer(node: Any, buffers: Mapping[str, str]) -> bool:
    """Whether a node is a buffer or a view of one."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.args or not any(r.alias_info is not None for r in schema.returns):
            return False
        node = node.args[0]
    return isinstance(node, torch.fx.Node) and node.name in buffers


class _TensorForward:
    """A model's forward that returns a tuple of tensors and, with `names`, takes tensors by name.

    torch.export supports few types of arguments and results. Runtimes don't accept numbers, strings and other objects;
    dataclasses are converted here.
    """

    def __init__(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> None:
        self.forward, self.args, self.kwargs, self.names = forward, args, kwargs, names
        self.sizes: dict[str, str] = {}
        """The input and axis of each symbol in the sizes of the traced call: `s77` → `x.shape[0]`."""
        self.__signature__ = inspect.signature(forward)
        if names:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Call the original forward."""
        if self.names:
            given = iter([*args, *(kwargs[name] for name in self.names[len(args) :])])
            args, kwargs = map_tensors((self.args, self.kwargs), lambda _: next(given))
        self.sizes |= sizes_by_symbol(_inputs_of(self.forward, args, kwargs))
        return tuple(tensor for _, tensor in tensors_in(self.forward(*args, **kwargs)))

    @property
    def __code__(self) -> CodeType:
        code: CodeType = self.forward.__code__
        return code


def _inputs_of(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a call with the name of its parameter."""
    try:
        bound: Any = inspect.signature(forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = (args, kwargs)
    yield from tensors_in(bound)


def _needs_flattening(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether tensors are inside objects that torch.export doesn't support, or in a parameter such as `**options`."""
    if kwargs.keys() - {name for name in _parameters(model) if name != _keywords(model)}:
        return True  # torch.export can't mark them as dynamic
    return any(not isinstance(leaf, Tensor) and next(tensors_in(leaf), None) for leaf in tree_leaves((args, kwargs)))


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _keywords(model: nn.Module) -> str | None:
    """The parameter that takes all other keywords."""
    kinds = ((name, parameter.kind) for name, parameter in _parameters(model).items())
    return next((name for name, kind in kinds if kind is inspect.Parameter.VAR_KEYWORD), None)


def _flat_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of the flattened call's arguments, in the order of the call."""
    prefix = f"{_keywords(model)}."
    named = {id(tensor): name.removeprefix(prefix) for name, tensor in named_inputs(model, args, kwargs)}
    return [re.sub(r"\W", "_", named[id(tensor)]) for _, tensor in tensors_in((args, kwargs))]


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's tensors as separate arguments."""
    return tuple(tensor for _, tensor in tensors_in((args, kwargs))), {}


@contextlib.contextmanager
def _tensors_only(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flat: bool
) -> Iterator[tuple[nn.Module, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]]]:
    """Temporarily replace the model's forward by one with arguments that torch.export supports, which returns tensors.

    Yields the model, and a function that converts the original arguments.
    """
    names = _flat_names(model, args, kwargs) if flat else []
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = _TensorForward(model.forward, args, kwargs, names)
    try:
        yield model, flattened if flat else lambda args, kwargs: (args, kwargs)
    finally:
        if own is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = own


def reason_of(error: BaseException) -> str:
    """The original error of torch in one line: its type and first non-empty line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def advice_for(error: BaseException) -> str:
    """The suggested fix for an error of torch.export."""
    if "data-dependent" in str(error).lower():
        return (
            "the code there depends on the values of a tensor (if, int(), .item(), indexing): use torch.where or "
            "torch.cond, or export the part of the model without it"
        )
    return (
        "change the code there, or export the part of the model without it; "
        "check whether torch.export.export(model, inputs, strict=False) also fails for the float model"
    )


def fixed_batch(reason: str, size: int) -> Problem:
    """The warning about an artefact with a fixed batch size."""
    return Problem(
        what=f"the artefact takes only batches of {size}: {reason}",
        fix="export with an example of the batch size to deploy, or make the model's code independent of it",
        code="fixed-batch",
    )


def _numbers_of_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Batch sizes for tracing: two samples, whose verification is the fastest, then all; one would become a constant.

    0 stands for all samples, and for inputs that may not have a batch axis in common.
    """
    sizes = {int(tensor.shape[0]) for _, tensor in tensors_in((args, kwargs)) if tensor.dim()}
    return (2, 0) if len(sizes) == 1 and min(sizes) > 2 else (0,)


def _with_samples(count: int, tensor: Tensor) -> Tensor:
    """The first samples of a tensor, at least two; with 0, all of them."""
    if tensor.dim() and tensor.shape[0] == 1:
        return tensor.repeat(2, *[1] * (tensor.dim() - 1))
    return tensor[:count].clone() if count and tensor.dim() else tensor.clone()


def _dynamic(nest: Any) -> Any:
    def mark(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {0: torch.export.Dim.AUTO} if value.dim() else None
        if isinstance(value, dict):
            return {key: mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(mark(item) for item in value)
        return None

    return mark(nest)


def _by_parameter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The specs in the form that torch.export requires: by parameter name if there are keywords or `*args`."""
    parameters = inspect.signature(model.forward).parameters.values()
    if not kwargs and all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in parameters):
        return args
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        parameter = inspect.signature(model.forward).parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            flat[name] = dict(value)
        else:
            flat[name] = value
    return flat


def _constant_sites(program: torch.export.ExportedProgram) -> set[str]:
    """Sites with values that don't depend on inputs or their sizes: weights, stored or computed."""
    signature = program.graph_signature
    mutable = set(signature.buffers_to_mutate.values())
    # these properties of a signature are computed at each access
    inputs, buffers = set(signature.user_inputs), signature.inputs_to_buffers
    moving: set[torch.fx.Node] = set()
    marked: dict[str, set[torch.fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in inputs or buffers.get(node.name) in mutable:
                moving.add(node)
        elif any(source in moving for source in node.all_input_nodes):
            moving.add(node)
        if node.op == "call_function" and node.target is torch.ops.bitwright.site.default:
            marked.setdefault(str(node.args[1]), set()).add(node.args[0])
    return {
        site
        for site, sources in marked.items()
        # a weight is folded at each use; another site that is reached twice has two tensors
        if not sources & moving and (len(sources) == 1 or site.endswith((":weight", ":bias")))
    }


def _markers(program: torch.export.ExportedProgram) -> list[tuple[str, Tensor]]:
    """The site of each marker, and its tensor."""
    return [
        (str(node.args[1]), node.args[0].meta["val"])
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is torch.ops.bitwright.site.default
    ]


def _missing(program: torch.export.ExportedProgram, recorded: Recorded) -> set[str]:
    """Sites that the program reaches less or more often than the model, or with other tensors."""
    markers = [(site, x) for site, x in _markers(program) if site not in recorded.constants]
    found = Counter((site, str(x.dtype), x.dim()) for site, x in markers)
    return {site for site, _, _ in (found - recorded.passed) + (recorded.passed - found)}


def _without_effect(
    model: nn.Module,
    attachment: Attachment,
    program: torch.export.ExportedProgram,
    missing: set[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> set[str]:
    """The missing sites with quantizers that don't affect the model's outputs.

    Either the operator's result reaches no output (a check that runs only in eager mode), or the tensor is already
    rounded to the same grid (`reshape` shares the quantizer of its input).
    """
    passed = {site for site, _ in _markers(program)}
    shared = {attachment.shared.get(site, site) for site in passed}
    unchanged: dict[str, bool] = {}

    def compare(site: str, quantizer: Quantizer, x: Tensor) -> None:
        if site in missing:
            wide = x.to(torch.float32)
            same = quantizer.site in shared and torch.equal(quantizer.quantize(wide), wide)
            unchanged[site] = unchanged.get(site, True) and same

    with tapped(model, compare), torch.no_grad(), in_mode(model, "quantize"):
        model(*args, **kwargs)
    recorder = Recorder(model, args, kwargs)
    with in_mode(model, "float"):
        graph = run_recorded(model, recorder, args, kwargs, train=False)
    idle = {site for site in missing - passed if site.rpartition(":")[0] in graph.idle}
    return idle | {site for site, same in unchanged.items() if same and site not in passed}
