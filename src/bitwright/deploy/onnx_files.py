"""ONNX files: reading and writing at any size, looking into artefacts, and names of operators."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath

import onnx_ir as ir

from bitwright.core.documents import regular
from bitwright.core.errors import ArtefactError, BitwrightError, PlanError, Problem, shortened
from bitwright.core.files import replacing, sync_to_disk, writing


def operator_of(node: ir.Node) -> str:
    """The operator that reads `conv:input`, `conv:weight` or `conv.weight`; else what its output is called."""
    for value in (value.name for value in node.inputs if value is not None and value.name):
        operator, colon, port = value.rpartition(":")
        if colon and not port.startswith("output"):
            return operator
        if value.endswith(".weight"):
            return value.removesuffix(".weight")
    return str(node.outputs[0].name)


def behind(graph: ir.Graph, value: str, kinds: set[str]) -> str | None:
    """The operator of these kinds whose result reaches a value through others that a runtime fuses with it."""
    node = next((node for node in graph if value in {output.name for output in node.outputs}), None)
    while node is not None and node.op_type not in kinds:
        source = node.inputs[0] if node.inputs else None
        node = None if source is None else source.producer()
    return None if node is None else operator_of(node)


_LARGEST = 2**31 - 2**24  # bytes of tensors in one file; the graph itself has the rest
_SMALL = 1024  # bytes of a tensor that stays in the model's file, where shape inference looks for it
_FIX = "give the path of an exported .onnx file"


def load_onnx(path: Path) -> ir.Model:
    """Read a model. No tensor of it can name a file outside the model's own folder."""
    path = regular(Path(path), what="the artefact", fix=_FIX, error=ArtefactError)
    try:
        model = ir.load(path)
        problems = [problem for graph in model.graphs() for problem in _unreadable(graph, path)]
        empty = len(model.graph) == 0
    except Exception as error:  # protobuf's, onnx_ir's and the operating system's own
        words = shortened(" ".join(str(error).split()) or type(error).__name__)
        raise ArtefactError(f"not an ONNX file: {words}", where=str(path), fix=_FIX, code="damaged-artefact") from error
    if problems:
        raise PlanError(problems, title=f"{path} has weights that can't be read")
    if empty:
        raise ArtefactError("the ONNX file has no operators", where=str(path), fix=_FIX, code="empty-artefact")
    return model


def _unreadable(graph: ir.Graph, path: Path) -> Iterator[Problem]:
    """Tensors whose numbers aren't there: those in other files must lie beside the model, and be long enough."""
    folder = path.parent.resolve()
    for tensor in _tensors(graph):
        if not isinstance(tensor, ir.ExternalTensor):
            try:
                tensor.numpy()  # a view of the file's bytes
            except Exception as error:  # a type that isn't one, or other bytes than the shape needs
                what = f"the tensor can't be read: {shortened(str(error))}"
                yield Problem(what=what, where=str(tensor.name), fix="export it again", code="damaged-artefact")
            continue
        location, where = str(tensor.location), str(tensor.name)
        parts = (*Path(location).parts, *PureWindowsPath(location).parts)
        rooted = Path(location).is_absolute() or bool(PureWindowsPath(location).drive)
        file = folder / location
        if not location or "\0" in location or rooted or ".." in parts or not file.resolve().is_relative_to(folder):
            what = "the weight lies outside the model's folder"
            yield Problem(what=what, where=where, value=location, fix="export it again", code="outside-folder")
            continue
        start, length = int(tensor.offset or 0), int(tensor.nbytes)
        if not file.is_file() or start < 0 or length < 0 or start + length > file.stat().st_size:
            what = "the file with the weight is missing or too short"
            yield Problem(
                what=what, where=where, value=location, fix="keep all files together", code="damaged-artefact"
            )


def _tensors(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    for value in graph.initializers.values():
        if value.const_value is not None:
            yield value.const_value
    for node in graph:
        for attribute in node.attributes.values():
            if isinstance(attribute.value, ir.TensorProtocol):
                yield attribute.value


def save_onnx(model: ir.Model, path: Path, data: str | None = None) -> None:
    """Write `path`, and with more tensors than one file holds, `data` beside it (default: `<path>.data`)."""
    needed = _bytes_of(model)
    with writing(path, needed=needed, strict=True):
        if needed > _LARGEST:
            ir.save(model, path, external_data=data or f"{path.name}.data", size_threshold_bytes=_SMALL)
        else:
            ir.save(model, path)


def _bytes_of(model: ir.Model) -> int:
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)


def data_files(path: Path) -> list[Path]:
    """The files beside `path` that its tensors are in; none for what isn't an ONNX file."""
    try:
        model = load_onnx(path)
    except BitwrightError:  # somebody else's file, or none, or one that names files elsewhere
        return []
    names = {
        value.const_value.location
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    return [path.parent / name for name in sorted(map(str, names))]


def stored_bytes(path: Path) -> int:
    """The size of an artefact with the tensors beside it."""
    return sum(file.stat().st_size for file in (path, *data_files(path)) if file.is_file())


@contextmanager
def replacing_onnx(path: Path) -> Iterator[tuple[Path, str]]:
    """Yields a temporary path to write to and the name for its tensors; both are there if the block ends well.

    The tensors have a new name each time, so that the file that is replaced stays whole until it is; then its own
    tensors go.
    """
    path = path.resolve() if path.is_symlink() else path
    data = path.parent / f"{path.name}.{secrets.token_hex(4)}.data"
    stale = data_files(path) if path.is_file() else []
    try:
        with replacing(path) as temporary:
            yield temporary, data.name
            written = temporary.parent / data.name
            if written.is_file():  # before the model that names it
                sync_to_disk(written)
                written.replace(data)
    except BaseException:
        data.unlink(missing_ok=True)
        raise
    for file in stale:
        file.unlink(missing_ok=True)
