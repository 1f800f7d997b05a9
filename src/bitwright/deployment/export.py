"""`export(model, path, inputs)`: write a prepared model as an artefact that the target's tools read."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVarTuple

import onnx_ir as ir
import torch
from torch import nn

from bitwright.backends import backend
from bitwright.core import __version__
from bitwright.core.arguments import strict
from bitwright.core.environment import quiet
from bitwright.core.errors import ExportError, PlanError, Problem, log_warnings
from bitwright.core.files import write_text
from bitwright.core.registry import ARTEFACTS
from bitwright.core.tensor_tree import as_call, batch_size, eval_mode
from bitwright.deployment.artefacts.base import KEYS, KIND, QDQ, Sidecar, write_plain
from bitwright.deployment.artefacts.weights import WeightFile, integer_weights, weight_file
from bitwright.deployment.decoder import (
    cached_forward,
    decoder_example,
    dynamic_sizes,
    is_decoder,
    name_values,
    verify_decoder,
    write_generation_files,
)
from bitwright.deployment.direct_onnx import write_graph
from bitwright.deployment.dynamic_axes import frozen_size
from bitwright.deployment.graph_writer import Untranslated
from bitwright.deployment.onnx_files import replacing_onnx, save_onnx, stored_bytes, text_digest, write_digests
from bitwright.deployment.onnx_translation import fold_constants, to_float32, translations
from bitwright.deployment.qdq import OPSET, Counts, Recorded, write_qdq
from bitwright.deployment.runtimes.base import suffixes
from bitwright.deployment.torch_export import Exported, export_program, fixed_batch, reason_of, trace
from bitwright.graph.interception import bare
from bitwright.quantizers import Attachment, attachment_of
from bitwright.quantizers.state import parameter_problems, state_problems
from bitwright.workload.language_models import tokenizer_of

_GGUF = "gguf"  # the artefact of files with this suffix
_Rest = TypeVarTuple("_Rest")  # further results of writing a file


@strict
@dataclass(frozen=True, kw_only=True)
class Artefact:
    """An exported file and what it contains. `export` returns it.

    >>> import tempfile, torch, bitwright
    >>> x = torch.randn(16, 8)
    >>> quantized = bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     artefact = quantized.export(f"{folder}/model.onnx")
    >>> artefact.path.name, artefact.kind
    ('model.onnx', 'qdq')
    """

    path: Path
    bytes: int
    activation_pairs: int
    weights: int
    int32_biases: int
    dynamic_batch: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dynamic_activations: int = 0
    """Tensors that are quantized with scales computed at run time."""
    kind: str = QDQ
    sidecar: Path | None = None
    """The file with the quantization parameters, if the model file itself is float."""
    warnings: tuple[Problem, ...] = ()
    """Requests that the artefact doesn't fulfil. Each was also logged."""
    notes: tuple[str, ...] = ()
    """How the file was written, if that isn't the usual way: the operator for which torch.onnx was used."""

    def __repr__(self) -> str:
        """One line: the file and what it has."""
        return f"<Artefact {self.path}: {self.kind}, {self.bytes:,} bytes, {self.weights} integer weights>"

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data."""
        sidecar = None if self.sidecar is None else str(self.sidecar)
        return {**asdict(self), "path": str(self.path), "sidecar": sidecar}


@strict
def export(
    model: nn.Module,
    path: str | Path,
    inputs: Any,
    *,
    dynamic_batch: bool = True,
    artefact: str | None = None,
    tokenizer: Any = None,
    exact: bool = False,
) -> Artefact:
    """Write a prepared, calibrated model as ONNX (opset 20 or 21); `inputs` is one example call.

    If the model is a decoder of transformers and `path` is a folder (a path without suffix), the folder gets model.onnx
    with a cache (`past_key_values.*`, `present.*`) and any number of samples and tokens, and the files from which
    onnxruntime-genai generates text. `tokenizer` is that of `load_workload` by default. With `exact`, these files make
    ONNX Runtime multiply activations in float; by default, its products with weights of blocks round them to 8 bits.

    The table of the plan's backend determines which `artefact` is written: Q/DQ pairs with integer weights, or a float
    model with a file of grids next to it (docs/backends/artefacts.md). The exported program must contain all quantizers
    of the model; otherwise nothing is written, and an error lists the missing sites.

    >>> import tempfile, torch, bitwright
    >>> x = torch.randn(16, 8)
    >>> quantized = bitwright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)), [x])
    >>> artefact = bitwright.export(quantized.model, tempfile.mkdtemp() + "/model.onnx", x)
    >>> artefact.kind, artefact.weights, artefact.dynamic_batch
    ('qdq', 1, True)
    """
    path = Path(path)
    attachment = attachment_of(model)
    kind = artefact or (_GGUF if path.suffix == f".{_GGUF}" else default_artefact(attachment))
    if kind == QDQ and is_folder(path) and is_decoder(model):
        return _export_decoder(model, path, tokenizer=tokenizer or tokenizer_of(bare(model)), exact=exact)
    writer = weight_file(kind)
    if exact or (tokenizer is not None and writer is None):
        what, fix = "only the folder of a decoder has these arguments", "export into a folder: a path without suffix"
        raise ExportError(what, where="tokenizer, exact", value=str(path), fix=fix, code="ignored-argument")
    if writer is not None:
        return _export_weights(model, path, kind, writer, tokenizer or tokenizer_of(bare(model)), inputs)
    path = onnx_path(path)
    sidecar = _sidecar(kind)
    for problem in unexportable(model, kind):
        raise ExportError(problem.what, where=problem.where, value=problem.value, fix=problem.fix, code=problem.code)
    refuse_odd_state(model, attachment)
    args, kwargs = as_call(inputs)
    with replacing_onnx(path) as (temporary, data):
        write = partial(_export, model, temporary, data, args, kwargs, kind)
        (exported, onnx_model, counts, text, notes), noted = _verified(
            model, temporary, (args, kwargs), write, dynamic_batch
        )
        if sidecar is not None:
            write_text(sidecar.path(path), text)
    log_warnings(noted)
    beside = None if sidecar is None else sidecar.path(path)
    made = _described(path, onnx_model, counts, noted, dynamic_batch=bool(exported.axes))
    return replace(made, kind=kind, sidecar=beside, notes=notes)


def is_folder(path: Path) -> bool:
    """Whether a path is meant as a folder: it exists, or it has no suffix."""
    return path.is_dir() or not path.suffix


def decoder_folder(model: nn.Module, path: Path) -> Path | None:
    """The folder for a decoder whose file is `path`: a folder of its own for each model.onnx."""
    return path.parent if path.name == "model.onnx" and is_decoder(bare(model)) else None


def _described(
    path: Path, model: ir.Model, counts: Counts, noted: tuple[Problem, ...], *, dynamic_batch: bool
) -> Artefact:
    return Artefact(
        path=path,
        bytes=stored_bytes(path),
        activation_pairs=counts.activations,
        dynamic_activations=counts.dynamic,
        weights=counts.weights,
        int32_biases=counts.biases,
        dynamic_batch=dynamic_batch,
        inputs=tuple(str(value.name) for value in model.graph.inputs),
        outputs=tuple(str(value.name) for value in model.graph.outputs),
        warnings=noted,
    )


def _export_weights(
    model: nn.Module, path: Path, kind: str, writer: WeightFile, tokenizer: Any, inputs: Any
) -> Artefact:
    """Write integer weights without a graph."""
    if problems := writer.problems(model):
        raise PlanError(problems, title=f"the artefact {kind} can't store this model")
    refuse_odd_state(model, attachment_of(model))
    weights = integer_weights(model)
    noted = writer.write(model, weights, path, tokenizer=tokenizer, inputs=inputs)
    log_warnings(noted)
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return Artefact(
        path=path,
        bytes=sum(file.stat().st_size for file in files),
        activation_pairs=0,
        weights=len(weights),
        int32_biases=0,
        dynamic_batch=True,
        inputs=(),
        outputs=(),
        kind=kind,
        warnings=tuple(noted),
    )


def onnx_path(path: str | Path) -> Path:
    """The path of an ONNX file. The suffix of an artefact determines its runtime, so that others are errors."""
    path = Path(path)
    if path.suffix == ".onnx":
        return path
    name = next((name for name, (own, _) in suffixes().items() if own == path.suffix), None)
    if name is not None:
        what = f"this function writes ONNX, and {path.suffix} is read by {name}"
        fix = f'bitwright.export_workload(workload, "{path.name}", saved), or `bitwright export`, writes it'
    else:
        what, fix = "the suffix of the artefact is unknown", f"end its name with .onnx: {path.stem}.onnx"
    raise ExportError(what, where=str(path), value=path.suffix, fix=fix, code="unknown-suffix")


def _export_decoder(model: nn.Module, folder: Path, *, tokenizer: Any, exact: bool) -> Artefact:
    """Write a decoder with its cache into a folder, and verify other sizes on ONNX Runtime."""
    for problem in unexportable(model, QDQ):
        raise ExportError(problem.what, where=problem.where, value=problem.value, fix=problem.fix, code=problem.code)
    attachment = attachment_of(model)
    refuse_odd_state(model, attachment)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    with cached_forward(model) as sizes, replacing_onnx(path) as (temporary, data):
        call = decoder_example(model, sizes)
        traced = trace(model, (), call, dynamic_batch=True, sizes=dynamic_sizes)
        onnx_model, notes, noted = _decoder_model(traced.exported, model, call)
        counts, text = _write(onnx_model, attachment, traced.recorded, QDQ, None)
        _save(onnx_model, attachment, temporary, data, text, None)
        verify_decoder(model, sizes, temporary)
    log_warnings(noted)
    noted += write_generation_files(model, folder, sizes, tokenizer=tokenizer, exact=exact)
    return replace(_described(path, onnx_model, counts, noted, dynamic_batch=True), notes=notes)


def _export(
    model: nn.Module,
    path: Path,
    data: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str,
    dynamic_batch: bool,
) -> tuple[Exported, ir.Model, Counts, str, tuple[str, ...]]:
    """Trace the model and write one ONNX file (a large one also has a `data` file); then the sidecar and notes."""
    attachment, sidecar = attachment_of(model), _sidecar(kind)
    traced = trace(model, args, kwargs, dynamic_batch=dynamic_batch, codes=sidecar is None)
    onnx_model, notes = translate(traced.program)
    noted = to_float32(onnx_model, model, (args, kwargs))
    counts, text = _write(onnx_model, attachment, traced.recorded, kind, sidecar)
    _save(onnx_model, attachment, path, data, text, sidecar)
    exported = replace(traced.exported, warnings=(*traced.exported.warnings, *noted))
    return exported, onnx_model, counts, text, notes


def _save(model: ir.Model, attachment: Attachment, path: Path, data: str, text: str, sidecar: Sidecar | None) -> None:
    """Write the file with its plan and the digests of its contents."""
    model.producer_name, model.producer_version = "bitwright", __version__
    model.metadata_props["bitwright.plan"] = attachment.plan.to_yaml()
    write_digests(model, None if sidecar is None else {sidecar.suffix: text_digest(text)})
    save_onnx(model, path, data)


def _verified(
    model: nn.Module, path: Path, call: Any, write: Callable[[bool], tuple[Exported, *_Rest]], dynamic_batch: bool
) -> tuple[tuple[Exported, *_Rest], tuple[Problem, ...]]:
    """Write a file that takes any batch size and verify it; if it fails, fix the batch size to that of the example."""
    try:
        written = write(dynamic_batch)
        exported = written[0]
        if not exported.axes:
            return written, exported.warnings
        reason = frozen_size(
            model, exported.program, path, exported.args, exported.kwargs, exported.axes, flat=exported.flat
        )
        if reason is None:
            return written, exported.warnings
    except ExportError as error:
        if not dynamic_batch or "torch-onnx-failed" not in error.codes:
            raise
        reason = error.problems[0].what  # torch.onnx supports fewer operators with dynamic sizes
    written = write(False)
    return written, (fixed_batch(reason, batch_size(call)), *written[0].warnings)


def refuse_odd_state(model: nn.Module, attachment: Attachment) -> None:
    """Raise an error if a quantizer has an invalid scale or zero point, or a parameter isn't finite."""
    found = [state_problems(q, q.state_dict()) for q in attachment.quantizers.values() if q.calibrated and not q.of]
    problems = [problem for problems in found for problem in problems]
    problems += parameter_problems(attachment.quantizers, model.named_parameters())
    if problems:
        raise PlanError(problems, title="a model with an invalid state can't be exported")


def default_artefact(attachment: Attachment) -> str:
    """The first kind of artefact in the table of the plan's backend."""
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
    """The program of the prepared model with a marker at each site and a fixed batch, and the codes of constants."""
    for problem in unexportable(model):
        raise ExportError(problem.what, where=problem.where, value=problem.value, fix=problem.fix, code=problem.code)
    refuse_odd_state(model, attachment_of(model))
    traced = trace(model, args, kwargs, dynamic_batch=False)
    return traced.program, traced.recorded


@strict
def export_float(model: nn.Module, path: str | Path, inputs: Any, *, dynamic_batch: bool = True) -> Path:
    """Write the float model as ONNX, the reference for comparisons of size, latency and accuracy.

    A decoder of transformers is written with its cache if `path` is a folder, as `export` does.

    >>> import tempfile, torch, bitwright
    >>> path = bitwright.export_float(torch.nn.Linear(8, 4), tempfile.mkdtemp() + "/model.onnx", torch.randn(1, 8))
    >>> path.name
    'model.onnx'
    """
    if is_folder(Path(path)) and is_decoder(bare(model)):
        return _export_float_decoder(model, Path(path))
    path = onnx_path(path)
    args, kwargs = as_call(inputs)
    with replacing_onnx(path) as (temporary, data):
        write = partial(_export_float, model, temporary, data, args, kwargs)
        _, noted = _verified(model, temporary, (args, kwargs), write, dynamic_batch)
    log_warnings(noted)
    return path


def _export_float_decoder(model: nn.Module, folder: Path) -> Path:
    """Write a decoder with its cache, without quantizers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    with cached_forward(model) as sizes, replacing_onnx(path) as (temporary, data):
        call = decoder_example(model, sizes)
        with eval_mode(model):
            exported = export_program(model, (), call, True, dynamic_sizes)
        onnx_model, _, noted = _decoder_model(exported, model, call)
        _drop_inferable(onnx_model)
        save_onnx(onnx_model, temporary, data)
        verify_decoder(model, sizes, temporary)
    log_warnings(noted)
    write_generation_files(model, folder, sizes, tokenizer=tokenizer_of(bare(model)), exact=False)
    return path


def _decoder_model(
    exported: Exported, model: nn.Module, call: Any
) -> tuple[ir.Model, tuple[str, ...], tuple[Problem, ...]]:
    """The ONNX model of a decoder with its cache, notes and warnings."""
    if not exported.axes:
        problem = exported.warnings[0]
        fix = "export it as a plain model, with export(model, path, inputs)"
        raise ExportError(problem.what, where=problem.where, fix=fix, code="fixed-batch")
    onnx_model, notes = translate(exported.program)
    noted = to_float32(onnx_model, model, call)
    name_values(onnx_model)
    return onnx_model, notes, noted


def _export_float(
    model: nn.Module, path: Path, data: str, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_batch: bool
) -> tuple[Exported]:
    with eval_mode(model):
        exported = export_program(model, args, kwargs, dynamic_batch)
    onnx_model, _ = translate(exported.program)
    noted = to_float32(onnx_model, model, (args, kwargs))
    _drop_inferable(onnx_model)
    save_onnx(onnx_model, path, data)
    return (replace(exported, warnings=(*exported.warnings, *noted)),)


def unexportable(model: nn.Module, artefact: str | None = None) -> list[Problem]:
    """Quantizers that the artefact can't represent, with their sites. The model needs no calibration for this."""
    attachment = attachment_of(model)
    kind = artefact or default_artefact(attachment)
    if (writer := weight_file(kind)) is not None:
        return writer.problems(model)
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
            code="unsupported-levels",
        )
        for name, where in sites.items()
    ]


def translate(program: torch.export.ExportedProgram) -> tuple[ir.Model, tuple[str, ...]]:
    """The program as ONNX, written directly if all of its operators are known, and otherwise by torch.onnx.

    The second result has a note about the operator that isn't known.
    """
    try:
        return write_graph(program), ()
    except Untranslated as reason:
        note = f"torch.onnx translated the program, because of {reason}"
        logging.getLogger(__name__).debug(note)
    return translate_with_torch(program), (note,)


def translate_with_torch(program: torch.export.ExportedProgram) -> ir.Model:
    """The program as ONNX by torch.onnx, which knows more operators and takes longer."""
    # no_grad: with gradients, torch lowers attention with a learned mask to views with incompatible strides
    with torch.no_grad(), warnings.catch_warnings(), quiet("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        try:
            exported = _to_onnx(program)
        except Exception as error:
            raise ExportError(
                f"torch.onnx can't translate the program: {reason_of(error)}",
                fix="replace the operator that the message names, or export the part of the model without it; "
                "check whether torch.onnx.export(model, inputs, dynamo=True) also fails for the float model",
                code="torch-onnx-failed",
            ) from error
    assert exported is not None
    model: ir.Model = exported.model
    _drop_traces(model)
    return model


def _to_onnx(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram | None:
    def translate() -> torch.onnx.ONNXProgram | None:
        return torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            optimize=True,
            custom_translation_table=translations(program),
        )

    try:
        return translate()
    except Exception:
        # An operator without a translation may compute a weight; then its result is enough.
        if not fold_constants(program):
            raise
    return translate()


def _drop_inferable(model: ir.Model) -> None:
    """Remove node names and types of inner values, which all runtimes infer; they dominate small files."""
    kept = set(model.graph.outputs)
    for node in model.graph:
        node.name = None
        for value in node.outputs:
            if value not in kept:
                value.type, value.shape = None, None


def _drop_traces(model: ir.Model) -> None:
    """Remove the Python stack traces that torch.onnx stores at each node, because they are large and contain paths."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
