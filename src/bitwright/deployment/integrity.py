"""Digests of an artefact's tensors, which reveal and locate any changed bit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

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
