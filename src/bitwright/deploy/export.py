"""`export(model, path, inputs)`: the prepared model as its target's tools read it, nothing lost on the way."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from torch import nn

from bitwright.attach import Attachment, attachment_of
from bitwright.backends import backend
from bitwright.deploy.artefacts.plain import write_plain
from bitwright.deploy.artefacts.sidecar import Sidecar
from bitwright.deploy.artefacts.store import KEYS, KIND, QDQ
from bitwright.deploy.qdq import Counts, Recorded, write_qdq
from bitwright.deploy.trace import export_program, trace
from bitwright.errors import ExportError, Problem
from bitwright.files import replacing, write_text
from bitwright.graph.tree import as_call
from bitwright.modes import evaluating
from bitwright.quiet import quiet
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
    traced = trace(model, args, kwargs, dynamic_batch=dynamic_batch, codes=sidecar is None)
    onnx_model = _translate(traced.program)
    counts, text = _write(onnx_model, attachment, traced.recorded, kind, sidecar)
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
        dynamic_batch=traced.dynamic_batch,
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
    for problem in unexportable(model):
        raise ExportError(problem.what, where=problem.where, value=problem.value, fix=problem.fix)
    traced = trace(model, args, kwargs, dynamic_batch=False)
    return traced.program, traced.recorded


def export_float(model: nn.Module, path: str | Path, inputs: Any, *, dynamic_batch: bool = True) -> Path:
    """The float model as ONNX: the reference that sizes, latencies and accuracies are compared with."""
    path = Path(path)
    args, kwargs = as_call(inputs)
    with evaluating(model):
        program, _ = export_program(model, args, kwargs, dynamic_batch)
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


def _translate(program: torch.export.ExportedProgram) -> ir.Model:
    def site(x: Any, site: str) -> Any:
        return _SITE(x, site=site)

    # no_grad: with gradients torch lowers attention with a learned mask to views that don't fit its strides
    with torch.no_grad(), warnings.catch_warnings(), quiet("torch.onnx", "onnxscript", "onnx_ir"):
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
