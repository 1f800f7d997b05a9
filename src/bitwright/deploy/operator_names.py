"""What an ONNX operator is called in the plan: `export` names values by the sites that they are read at."""

from __future__ import annotations

import onnx_ir as ir


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
