"""Remove markers from an ONNX graph: the result is a float model with rounded weights, and the grids of its tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray

from bitwright.core.errors import ExportError, PlanError, Problem
from bitwright.deployment.artefacts.base import Sidecar, TensorGrid
from bitwright.deployment.qdq import MARKER, Recorded, permutation_of, set_constant
from bitwright.quantizers import Attachment, Quantizer

Keys = dict[str, tuple[str, str, int | None]]  # site → key in the sidecar, tensor in the model, channel axis


@dataclass
class _QuantizedTensor:
    quantizer: Quantizer
    value: ir.Value
    weight: bool
    axis: int | None
    sites: list[str] = field(default_factory=list)


def write_plain(
    model: ir.Model, attachment: Attachment, recorded: Recorded, sidecar: Sidecar
) -> tuple[list[TensorGrid], Keys]:
    """Replace all markers, in place; returns the grids for the sidecar and the keys of all sites."""
    writer = _PlainWriter(model, attachment, recorded)
    writer.run()
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return writer.grids(sidecar)


class _PlainWriter:
    def __init__(self, model: ir.Model, attachment: Attachment, recorded: Recorded) -> None:
        self.graph, self.attachment, self.recorded = model.graph, attachment, recorded
        self.found: dict[ir.Value, _QuantizedTensor] = {}
        self.constants: dict[str, ir.Value] = {}

    def run(self) -> None:
        for node in list(self.graph):
            if (node.domain, node.op_type) == MARKER:
                site, source, output = node.attributes["site"].as_string(), node.inputs[0], node.outputs[0]
                assert source is not None
                value = self._value(site, source)
                if value.type is None:  # outputs of the model keep their type
                    value.type, value.shape = output.type, output.shape
                ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
                self.graph.remove(node, safe=True)
        for found in self.found.values():
            if found.weight:
                self._turn(found)
                self._name_layers(found)

    def _value(self, site: str, source: ir.Value) -> ir.Value:
        if site in self.recorded.constants:
            return self._initializer(site, self.recorded.constants[site].float().cpu().numpy())
        owner = self.attachment.shared.get(site, site)
        quantizer = self.attachment.quantizers[owner]
        if site not in self.recorded.values:
            self._remember(source, quantizer, site, weight=False)
            return source
        key = owner if quantizer.weight else site
        if key not in self.constants:
            array = self.recorded.values[site].float().cpu().numpy()
            if source.name in self.graph.initializers and len(source.uses()) == 1:
                set_constant(source, array)  # keeps the parameter's name
                self.constants[key] = source
            else:
                self.constants[key] = self._initializer(site, array)
        if quantizer.port != "bias":  # its grid is the product of two others
            self._remember(self.constants[key], quantizer, site, weight=True)
        return self.constants[key]

    def _remember(self, value: ir.Value, quantizer: Quantizer, site: str, *, weight: bool) -> None:
        axis = quantizer.layout.axis if quantizer.layout.granularity == "channel" else None
        known = self.found.setdefault(value, _QuantizedTensor(quantizer, value, weight, axis))
        if known.quantizer is not quantizer:
            raise ExportError(
                "this artefact has one grid per tensor, but two sites quantize this tensor differently",
                where=f"{known.sites[0]} and {site}",
                fix="share the quantizer (share: …), or export the artefact qdq",
                code="conflicting-grids",
            )
        known.sites.append(site)

    def _initializer(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        base = name = re.sub(r"[^A-Za-z0-9_.]", "_", name.replace(":", "."))
        count = 0
        while name in self.graph.initializers:
            count += 1
            name = f"{base}_{count}"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        self.graph.register_initializer(value)
        return value

    def _turn(self, found: _QuantizedTensor) -> None:
        """Apply transposes of a weight now, because tools expect weights directly at the operator."""
        users = [use.node for use in found.value.uses()]
        assert found.value.const_value is not None
        array = found.value.const_value.numpy()
        turns = [permutation_of(node, array.ndim) for node in users]
        if not turns or turns[0] is None or any(turn != turns[0] for turn in turns):
            return
        set_constant(found.value, array.transpose(turns[0]))
        if found.axis is not None:
            found.axis = turns[0].index(found.axis % array.ndim)
        for node in users:
            ir.convenience.replace_all_uses_with(node.outputs[0], found.value)
            self.graph.remove(node, safe=True)

    def _name_layers(self, found: _QuantizedTensor) -> None:
        """Name operators with a weight as in the plan."""
        for use, site in zip(found.value.uses(), found.sites, strict=False):
            use.node.name = site.rpartition(":")[0]

    def grids(self, sidecar: Sidecar) -> tuple[list[TensorGrid], Keys]:
        """All grids; raises an error that lists every grid the format can't store."""
        grids: list[TensorGrid] = []
        keys: Keys = {}
        problems: list[Problem] = []
        for value, found in self.found.items():
            grid = TensorGrid(
                tensor=str(value.name),
                grid=sidecar.grid(found.quantizer),
                weight=found.weight,
                axis=found.axis,
                layers=tuple(dict.fromkeys(use.node.name for use in value.uses() if use.node.name)),
            )
            reason = sidecar.refusal(grid)
            if found.quantizer.layout.granularity == "group":
                reason = ("this artefact doesn't support scales per group", "use channel or tensor")
            if reason is not None:
                format = str(found.quantizer.format)
                what, fix = reason
                where = found.sites[0]
                problems.append(Problem(what=what, where=where, value=format, fix=fix, code="unsupported-format"))
                continue
            grids.append(grid)
            keys.update(dict.fromkeys(found.sites, (sidecar.keys(grid)[0], grid.tensor, grid.axis)))
        if problems:
            raise PlanError(problems, title="the artefact can't store these grids")
        return grids, keys
