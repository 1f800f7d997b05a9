"""`export(model, path, inputs)`: the prepared model as its target's tools read it, nothing lost on the way."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from torch import Tensor, nn

from bitwright.attach import Attachment, Fold, Quantizer, attachment_of, in_mode, tapped
from bitwright.backends import backend
from bitwright.deploy.artefacts.plain import write_plain
from bitwright.deploy.artefacts.sidecar import Sidecar
from bitwright.deploy.artefacts.store import KEYS, KIND, QDQ
from bitwright.deploy.qdq import Counts, Recorded, write_qdq
from bitwright.errors import ExportError, Problem
from bitwright.files import replacing, write_text
from bitwright.graph.tree import as_call, map_tensors
from bitwright.modes import evaluating
from bitwright.registry import ARTEFACTS
from bitwright.version import __version__

OPSET = 21
# The marker as ONNX operator; it lives only between torch.onnx and `write_qdq`.
_SITE = onnxscript.values.Op(
    onnxscript.values.Opset("bitwright", 1),
    "Site",
    OpSchema(
        "Site",
        "bitwright",
        1,
        inputs=[OpSchema.FormalParameter("x", "T")],
        outputs=[OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=[OpSchema.Attribute("site", OpSchema.AttrType.STRING)],
    ),
)
log = logging.getLogger("bitwright")


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """What was written."""

    path: Path
    bytes: int
    activation_pairs: int
    weights: int
    int32_biases: int
    dynamic_batch: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: str = QDQ
    sidecar: Path | None = None
    """The file of grids beside a model in float."""


def export(
    model: nn.Module, path: str | Path, inputs: Any, *, dynamic_batch: bool = True, artefact: str | None = None
) -> Artefact:
    """Write a prepared, calibrated model as ONNX (opset 21); `inputs` is one example call.

    Which `artefact` is written says the table of the plan's backend: Q/DQ pairs with integer weights, or a float model
    with a file of grids beside it (docs/backends/artefacts.md). What is exported must pass the quantizers that the
    model passes, else nothing is written and an error names the missing sites.
    """
    path = Path(path)
    attachment = attachment_of(model)
    kind = artefact or default_artefact(attachment)
    sidecar = _sidecar(kind)
    for problem in unexportable(model, kind):
        raise ExportError(problem.what, where=problem.where, value=problem.value, fix=problem.fix)
    args, kwargs = as_call(inputs)
    with evaluating(model):
        program, dynamic = _program(model, attachment, args, kwargs, dynamic_batch)
        recorded = _record(model, attachment, args, kwargs, _constant_sites(program), codes=sidecar is None)
    _assert_complete(program, recorded)
    onnx_model = _translate(program)
    counts, text = _write(onnx_model, attachment, recorded, kind, sidecar)
    onnx_model.producer_name, onnx_model.producer_version = "bitwright", __version__
    onnx_model.metadata_props["bitwright.plan"] = attachment.plan.to_yaml()
    with replacing(path) as temporary:
        ir.save(onnx_model, temporary)
        if sidecar is not None:
            write_text(sidecar.path(path), text)
    return Artefact(
        path=path,
        bytes=path.stat().st_size,
        activation_pairs=counts.activations,
        weights=counts.weights,
        int32_biases=counts.biases,
        dynamic_batch=dynamic,
        inputs=tuple(str(value.name) for value in onnx_model.graph.inputs),
        outputs=tuple(str(value.name) for value in onnx_model.graph.outputs),
        kind=kind,
        sidecar=None if sidecar is None else sidecar.path(path),
    )


def default_artefact(attachment: Attachment) -> str:
    """What the tools of the plan's backend read."""
    return QDQ if attachment.plan.backend is None else backend(attachment.plan.backend).artefacts[0]


def _sidecar(kind: str) -> Sidecar | None:
    if kind == QDQ:
        return None
    found: Sidecar = ARTEFACTS.get(kind)()
    return found


def _write(
    model: ir.Model, attachment: Attachment, recorded: Recorded, kind: str, sidecar: Sidecar | None
) -> tuple[Counts, str]:
    if sidecar is None:
        counts = write_qdq(model, attachment, recorded)
        _drop_inferable(model)
        return counts, ""
    _drop_inferable(model)  # before operators with a weight get their names
    grids, keys = write_plain(model, attachment, recorded, sidecar)
    model.metadata_props[KIND] = kind
    model.metadata_props[KEYS] = json.dumps(keys)
    return Counts(weights=sum(grid.weight for grid in grids)), sidecar.write(grids)


def marked_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.export.ExportedProgram, Recorded]:
    """The prepared model with a marker at each site, its batch fixed, and the integers of what is constant."""
    attachment = attachment_of(model)
    for problem in unexportable(model):
        raise ExportError(problem.what, where=problem.where, value=problem.value, fix=problem.fix)
    with evaluating(model):
        program, _ = _program(model, attachment, args, kwargs, dynamic_batch=False)
        recorded = _record(model, attachment, args, kwargs, _constant_sites(program), codes=True)
    _assert_complete(program, recorded)
    return program, recorded


def export_float(model: nn.Module, path: str | Path, inputs: Any, *, dynamic_batch: bool = True) -> Path:
    """The float model as ONNX: the reference that sizes, latencies and accuracies are compared with."""
    path = Path(path)
    args, kwargs = as_call(inputs)
    with evaluating(model):
        program, _ = _export_program(model, args, kwargs, dynamic_batch)
    onnx_model = _translate(program)
    _drop_inferable(onnx_model)
    with replacing(path) as temporary:
        ir.save(onnx_model, temporary)
    return path


def unexportable(model: nn.Module, artefact: str | None = None) -> list[Problem]:
    """Quantizers whose levels the artefact can't have, with all their sites; known as soon as a model is prepared."""
    attachment = attachment_of(model)
    kind = artefact or default_artefact(attachment)
    sidecar = _sidecar(kind)
    sites: dict[str, list[str]] = {}
    for site, quantizer in attachment.quantizers.items():
        if not (quantizer.exportable if sidecar is None else sidecar.carries(quantizer)):
            sites.setdefault(quantizer.spec.quantizer, []).append(site)
    return [
        Problem(
            what=f"this quantizer has levels that {'QuantizeLinear' if sidecar is None else kind} can't write",
            where=", ".join(where),
            value=name,
            fix="use evenly spaced levels here (plain, lsq, lsqplus, pact, dsq, tqt), or keep these sites in float"
            if name != "plain"
            else "use the backend's own quantizer here, or keep these sites in float",
        )
        for name, where in sites.items()
    ]


def _record(
    model: nn.Module,
    attachment: Attachment,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constant: set[str],
    *,
    codes: bool,
) -> Recorded:
    """One real forward: which sites are passed, and the integers (or rounded numbers) of those that are constant."""
    recorded = Recorded()

    def remember(site: str, quantizer: Quantizer, x: Tensor) -> None:
        recorded.passed[site, str(x.dtype), x.dim()] += 1
        if site in constant and codes:
            recorded.weights[site] = quantizer.integers(x)
        elif site in constant:
            recorded.values[site] = quantizer.quantize(x.to(torch.float32)).to(x.dtype)

    with tapped(model, remember), torch.no_grad(), in_mode(model, "quantize"):
        model(*args, **kwargs)
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


def _program(
    model: nn.Module, attachment: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_batch: bool
) -> tuple[torch.export.ExportedProgram, bool]:
    with _marking(attachment), in_mode(model, "quantize"):
        return _export_program(model, args, kwargs, dynamic_batch)


def _export_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_batch: bool
) -> tuple[torch.export.ExportedProgram, bool]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own notes about its internals; failures raise
        if dynamic_batch:
            try:
                # A batch of one would be taken for a constant.
                wide_args, wide_kwargs = _at_least_two(args), _at_least_two(kwargs)
                shapes = (_dynamic(wide_args), _dynamic(wide_kwargs))
                program = torch.export.export(
                    model,
                    wide_args,
                    wide_kwargs,
                    dynamic_shapes=_by_parameter(model, *shapes),
                    strict=False,
                )
                return program, _has_dynamic_inputs(program)
            except Exception as error:
                log.warning("no dynamic batch: the model's own code fixes it (%s)", str(error).strip().split("\n")[0])
        try:
            return torch.export.export(model, args, kwargs, strict=False), False
        except Exception as error:
            raise ExportError(
                f"torch.export can't follow the model: {type(error).__name__}: {str(error).strip().splitlines()[0]}",
                fix="data-dependent control flow can't be exported; export the part without it",
            ) from error


def _at_least_two(nest: Any) -> Any:
    def widen(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == 1:
            return tensor.repeat(2, *[1] * (tensor.dim() - 1))
        return tensor

    return map_tensors(nest, widen)


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
    """Positional and keyword specs as torch.export wants them: by parameter name if there are keywords."""
    if not kwargs:
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


def _has_dynamic_inputs(program: torch.export.ExportedProgram) -> bool:
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" and node.name in names else None
        if isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape[:1]):
            return True
    return False


def _constant_sites(program: torch.export.ExportedProgram) -> set[str]:
    """Sites whose numbers no input can change, not even by its size: weights, stored or computed."""
    signature = program.graph_signature
    mutable = set(signature.buffers_to_mutate.values())
    moving: set[torch.fx.Node] = set()
    marked: dict[str, set[torch.fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in signature.user_inputs or signature.inputs_to_buffers.get(node.name) in mutable:
                moving.add(node)
        elif any(source in moving for source in node.all_input_nodes):
            moving.add(node)
        if node.op == "call_function" and node.target is torch.ops.bitwright.site.default:
            marked.setdefault(str(node.args[1]), set()).add(node.args[0])
    return {
        site
        for site, sources in marked.items()
        # a weight is folded anew at each of its uses; another site that is passed twice sees two tensors
        if not sources & moving and (len(sources) == 1 or site.endswith((":weight", ":bias")))
    }


def _assert_complete(program: torch.export.ExportedProgram, recorded: Recorded) -> None:
    """The program passes the quantizers that the model passes, with tensors of the same kind."""
    markers = [
        (str(node.args[1]), node.args[0].meta["val"])
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is torch.ops.bitwright.site.default
    ]
    found = Counter((site, str(x.dtype), x.dim()) for site, x in markers if site not in recorded.constants)
    if found != recorded.passed:
        differ = {site for site, _, _ in (found - recorded.passed) + (recorded.passed - found)}
        raise ExportError(
            f"the exported program passes {found.total()} quantizers, the model {recorded.passed.total()}",
            value=sorted(differ)[:8],
            fix="under torch.export the model's code takes another path there: keep these sites in float",
        )


def _translate(program: torch.export.ExportedProgram) -> ir.Model:
    def site(x: Any, site: str) -> Any:
        return _SITE(x, site=site)

    # no_grad: with gradients torch lowers attention with a learned mask to views that don't fit its strides
    with torch.no_grad(), warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                optimize=True,
                custom_translation_table={torch.ops.bitwright.site.default: site},
            )
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ExportError(
                f"torch.onnx can't translate the program: {lines[0]}", fix="see the cause below with --debug"
            ) from error
    assert exported is not None
    model: ir.Model = exported.model
    _drop_traces(model)
    return model


def _drop_inferable(model: ir.Model) -> None:
    """Node names and the types of inner values: every runtime infers them, and a small model is mostly these."""
    kept = set(model.graph.outputs)
    for node in model.graph:
        node.name = None
        for value in node.outputs:
            if value not in kept:
                value.type, value.shape = None, None


def _drop_traces(model: ir.Model) -> None:
    """torch.onnx notes Python stack traces at every node: more bytes than a small model's weights, and our paths."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
