"""Read and write ONNX files of any size, inspect artefacts, and find names of operators."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bitwright.core.documents import regular
from bitwright.core.errors import ArtefactError, BitwrightError, PlanError, Problem, shortened
from bitwright.core.files import replacing, sync_to_disk, writing


def operator_of(node: ir.Node) -> str:
    """The operator name from an input such as `conv:input`, `conv:weight` or `conv.weight`, or the output's name."""
    for value in (value.name for value in node.inputs if value is not None and value.name):
        operator, colon, port = value.rpartition(":")
        if colon and not port.startswith("output"):
            return operator
        if value.endswith(".weight"):
            return value.removesuffix(".weight")
    return str(node.outputs[0].name)


def producing_operator(graph: ir.Graph, value: str, kinds: set[str]) -> str | None:
    """The operator of these kinds that computes a value, possibly followed by operators that runtimes fuse."""
    node = next((node for node in graph if value in {output.name for output in node.outputs}), None)
    while node is not None and node.op_type not in kinds:
        source = node.inputs[0] if node.inputs else None
        node = None if source is None else source.producer()
    return None if node is None else operator_of(node)


_LARGEST = 2**31 - 2**24  # bytes of tensors in one file; the rest is for the graph
_SMALL = 1024  # bytes of a tensor that stays in the model's file, which shape inference needs
_FIX = "pass the path of an exported .onnx file"


def load_onnx(path: Path) -> ir.Model:
    """Read a model. Its tensors can't refer to files outside the model's folder."""
    path = regular(Path(path), what="the artefact", fix=_FIX, error=ArtefactError)
    try:
        model = ir.load(path)
        problems = [problem for graph in model.graphs() for problem in _unreadable(graph, path)]
        empty = len(model.graph) == 0
    except Exception as error:  # protobuf, onnx_ir and the operating system raise different types
        words = shortened(" ".join(str(error).split()) or type(error).__name__)
        raise ArtefactError(f"not an ONNX file: {words}", where=str(path), fix=_FIX, code="damaged-artefact") from error
    if problems:
        raise PlanError(problems, title=f"{path} has weights that can't be read")
    if empty:
        raise ArtefactError("the ONNX file has no operators", where=str(path), fix=_FIX, code="empty-artefact")
    return model


def _unreadable(graph: ir.Graph, path: Path) -> Iterator[Problem]:
    """Problems of tensors with missing data: external files must be in the model's folder and long enough."""
    folder = path.parent.resolve()
    for tensor in _tensors(graph):
        if not isinstance(tensor, ir.ExternalTensor):
            try:
                tensor.numpy()  # a view of the file
            except Exception as error:  # an invalid type, or a wrong number of bytes for the shape
                what = f"the tensor can't be read: {shortened(str(error))}"
                yield Problem(what=what, where=str(tensor.name), fix="export it again", code="damaged-artefact")
            continue
        location, where = str(tensor.location), str(tensor.name)
        parts = (*Path(location).parts, *PureWindowsPath(location).parts)
        rooted = Path(location).is_absolute() or bool(PureWindowsPath(location).drive)
        file = folder / location
        if not location or "\0" in location or rooted or ".." in parts or not file.resolve().is_relative_to(folder):
            what = "the weight is stored outside the model's folder"
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
    """Write `path`; if one file can't hold the tensors, also write `data` next to it (default: `<path>.data`)."""
    needed = _bytes_of(model)
    with writing(path, needed=needed, strict=True):
        if needed > _LARGEST:
            ir.save(model, path, external_data=data or f"{path.name}.data", size_threshold_bytes=_SMALL)
        else:
            ir.save(model, path)


def _bytes_of(model: ir.Model) -> int:
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)


def data_files(path: Path) -> list[Path]:
    """The external data files of an ONNX file; empty for other files."""
    try:
        model = load_onnx(path)
    except BitwrightError:  # not an ONNX file, or one that refers to files elsewhere
        return []
    names = {
        value.const_value.location
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    return [path.parent / name for name in sorted(map(str, names))]


def stored_bytes(path: Path) -> int:
    """The size of an artefact, including external data files."""
    return sum(file.stat().st_size for file in (path, *data_files(path)) if file.is_file())


@contextmanager
def replacing_onnx(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield a temporary path and the name for its data file; both are moved into place if the block succeeds.

    The data file gets a new name each time, so the old model stays intact until it is replaced. Then its data files
    are removed.
    """
    path = path.resolve() if path.is_symlink() else path
    data = path.parent / f"{path.name}.{secrets.token_hex(4)}.data"
    stale = data_files(path) if path.is_file() else []
    try:
        with replacing(path) as temporary:
            yield temporary, data.name
            written = temporary.parent / data.name
            if written.is_file():  # move it before the model that refers to it
                sync_to_disk(written)
                written.replace(data)
    except BaseException:
        data.unlink(missing_ok=True)
        raise
    for file in stale:
        file.unlink(missing_ok=True)


DIGESTS = "bitwright.digests"  # metadata of the ONNX file
STRUCTURE = "bitwright.structure"
_LENGTH = 16  # hexadecimal digits: 64 bits, enough against accidental damage
_PART = re.compile(r"(\.(codes|scale|zero_point|low|high|value|factor))?(~\d+)?$")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A tensor of an artefact that differs from the exported one or from the model."""

    site: str
    what: str


def digest(array: NDArray[Any]) -> str:
    """The digest of the type, the shape and all bits."""
    head = f"{array.dtype.name}{array.shape}".encode()
    return sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:_LENGTH]


def digests_of(tensors: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """The digest of each tensor."""
    return {name: digest(array) for name, array in tensors.items()}


def site_of(tensor: str) -> str:
    """The site of an artefact's tensor, or the tensor's name."""
    return _PART.sub("", tensor)


def compare_digests(stored: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> list[Damage]:
    """Differences from the stored digests; empty if there are none."""
    if not stored:
        return []
    found = []
    for name, array in tensors.items():
        if name not in stored:
            found.append(Damage(site=site_of(name), what=f"{name} was added after the export"))
        elif digest(array) != stored[name]:
            found.append(Damage(site=site_of(name), what=f"the values of {name} changed after the export"))
    missing = stored.keys() - tensors.keys()
    return found + [Damage(site=site_of(name), what=f"{name} is missing") for name in sorted(missing)]


def onnx_tensors(model: ir.Model) -> dict[str, NDArray[Any]]:
    """The constants of an ONNX model: initializers and values of Constant nodes, including subgraphs."""
    found: dict[str, NDArray[Any]] = {}
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                found[str(name)] = value.const_value.numpy()
        for node in graph:
            if node.op_type == "Constant" and "value" in node.attributes:
                found[str(node.outputs[0].name)] = node.attributes["value"].as_tensor().numpy()
    return found


def structure_digest(model: ir.Model) -> str:
    """The digest of all operators, their connections and attributes."""
    lines = [" ".join(str(value.name) for value in (*model.graph.inputs, *model.graph.outputs))]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        names = [
            [(value.name or "") if value is not None else "" for value in side] for side in (node.inputs, node.outputs)
        ]
        attributes = sorted(_attribute(attribute) for attribute in node.attributes.values())
        lines.append(f"{node.domain or 'ai.onnx'} {node.op_type} {names} {attributes}")
    return text_digest("\n".join(lines))


def _attribute(attribute: ir.Attr) -> str:
    kind, value = attribute.type, attribute.value
    if kind in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):  # their nodes are visited separately
        text = ""
    elif kind is ir.AttributeType.TENSOR:
        text = digest(value.numpy())
    elif kind in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):  # stored as float32
        text = digest(np.asarray(value, dtype=np.float32))
    elif kind in (ir.AttributeType.INTS, ir.AttributeType.STRINGS):
        text = str(list(value))
    else:
        text = str(value)
    return f"{attribute.name} {kind.name} {text}"


def structure_damages(model: ir.Model) -> list[Damage]:
    """Whether operators or attributes changed since the export; empty if no digest is stored."""
    stored = model.metadata_props.get(STRUCTURE)
    if stored is None or stored == structure_digest(model):
        return []
    return [Damage(site="graph", what="operators or their attributes changed after the export")]


def write_digests(model: ir.Model, extra: Mapping[str, str] | None = None) -> None:
    """Store the digests of constants and operators, and `extra` digests of other files, in the model's metadata."""
    model.metadata_props[STRUCTURE] = structure_digest(model)
    model.metadata_props[DIGESTS] = json.dumps({**digests_of(onnx_tensors(model)), **(extra or {})})


def read_digests(model: ir.Model) -> dict[str, str]:
    """The digests in an ONNX model; files of earlier versions and of other tools have none."""
    try:
        found = json.loads(model.metadata_props.get(DIGESTS, "{}"))
    except (ValueError, RecursionError):
        return {"": "unreadable"}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {"": "unreadable"}


def text_digest(text: str) -> str:
    """The digest of a text file's contents."""
    return sha256(text.encode()).hexdigest()[:_LENGTH]


def file_digest(path: Path) -> str:
    """The digest of a file."""
    return sha256(path.read_bytes()).hexdigest()[:_LENGTH]
