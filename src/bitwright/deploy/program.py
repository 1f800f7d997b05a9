"""The prepared model as a torch.export program with quantize/dequantize operators: what torch's own compilers read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.decomposition  # registers torch.ops.quantized_decomposed
from torch import Tensor, fx, nn

from bitwright.attach import Attachment, Quantizer, attachment_of
from bitwright.deploy.export import marked_program
from bitwright.deploy.qdq import Recorded
from bitwright.errors import ExportError
from bitwright.graph.tree import as_call

_OPS = torch.ops.quantized_decomposed


@dataclass(frozen=True, kw_only=True)
class QuantizedProgram:
    """A program, and which site each of its integer tensors belongs to."""

    program: torch.export.ExportedProgram
    quantized: tuple[str, ...]
    """Sites of the quantize operators, in the program's order."""
    constants: dict[str, str] = field(default_factory=dict)
    """Name of a constant in the program → `<site>.codes`, `<site>.scale`, `<site>.zero_point`."""


def quantized_program(model: nn.Module, inputs: Any) -> QuantizedProgram:
    """Export with the batch of `inputs`; weights are integers, int32 biases the floats that they stand for."""
    args, kwargs = as_call(inputs)
    marked, recorded = marked_program(model, args, kwargs)
    module = marked.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _drop_idle(module.graph)
    writer = _Writer(module, attachment_of(model), recorded)
    writer.run()
    module = fx.GraphModule(module, module.graph)  # only what is used: the float weights stay behind
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own notes about its internals
        program = torch.export.export(module, args, kwargs, strict=False)
    found = sum(node.target in QUANTIZE for node in program.graph.nodes)
    if found != len(writer.quantized):
        raise ExportError(
            f"the program has {found} quantize operators, the plan {len(writer.quantized)}", fix="please report this"
        )
    return QuantizedProgram(program=program, quantized=tuple(writer.quantized), constants=writer.constants)


def _drop_idle(graph: fx.Graph) -> None:
    """Casts to the type that a tensor has, and assertions about it: they stand between what compilers would fuse."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is torch.ops.aten.to.dtype and node.args[0].meta["val"].dtype == node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


QUANTIZE = (_OPS.quantize_per_tensor.default, _OPS.quantize_per_channel.default)


class _Writer:
    """Markers → quantize and dequantize operators; every reader gets a dequantize of its own, as fusions want."""

    def __init__(self, module: fx.GraphModule, attachment: Attachment, recorded: Recorded) -> None:
        self.module = module
        self.graph = module.graph
        self.attachment = attachment
        self.recorded = recorded
        self.quantized: list[str] = []
        self.constants: dict[str, str] = {}
        self.made: dict[tuple[fx.Node, str], fx.Node] = {}  # (source, quantizer) → codes

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node.target is torch.ops.bitwright.site.default:
                self._replace(node, str(node.args[1]))
        self.graph.eliminate_dead_code()

    def _replace(self, node: fx.Node, site: str) -> None:
        if site in self.recorded.constants:
            with self.graph.inserting_before(node):
                node.replace_all_uses_with(self._constant(f"{site}.value", self.recorded.constants[site]))
            self.graph.erase_node(node)
            return
        quantizer = self.attachment.quantizers[self.attachment.shared.get(site, site)]
        grid = _Grid.of(quantizer)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        stored = site in self.recorded.weights
        with self.graph.inserting_before(node):
            if stored and grid.dtype == torch.int32:  # a bias: these compilers add it as float, the number is the same
                scale = quantizer.grid().scale
                value = (self.recorded.weights[site].double() * scale.double()).float()
                node.replace_all_uses_with(self._constant(f"{site}.value", value))
            elif stored:
                codes = self._constant(f"{site}.codes", self.recorded.weights[site].to(grid.dtype))
                self._read(node, codes, grid, self._parameters(quantizer, grid))
            else:
                key = (source, quantizer.site)
                parameters = self._parameters(quantizer, grid)
                if key not in self.made:
                    self.made[key] = self._quantize(source, grid, parameters)
                    self.quantized.append(site)
                self._read(node, self.made[key], grid, parameters)
        self.graph.erase_node(node)

    def _quantize(self, source: fx.Node, grid: _Grid, parameters: tuple[Any, ...]) -> fx.Node:
        op = _OPS.quantize_per_channel.default if grid.axis is not None else _OPS.quantize_per_tensor.default
        return self.graph.call_function(op, (source, *parameters, grid.qmin, grid.qmax, grid.dtype))

    def _read(self, node: fx.Node, codes: fx.Node, grid: _Grid, parameters: tuple[Any, ...]) -> None:
        op = _OPS.dequantize_per_channel.default if grid.axis is not None else _OPS.dequantize_per_tensor.default
        for user in list(node.users):
            with self.graph.inserting_before(user):
                dequantized = self.graph.call_function(op, (codes, *parameters, grid.qmin, grid.qmax, grid.dtype))
            user.replace_input_with(node, dequantized)

    def _parameters(self, quantizer: Quantizer, grid: _Grid) -> tuple[Any, ...]:
        if grid.axis is None:
            return (float(grid.scale), int(grid.zero_point))
        scale = self._constant(f"{quantizer.site}.scale", grid.scale)
        zero_point = self._constant(f"{quantizer.site}.zero_point", grid.zero_point.to(torch.int64))
        return (scale, zero_point, grid.axis)

    def _constant(self, name: str, value: Tensor) -> fx.Node:
        attribute = f"_site_{len(self.constants)}"
        self.constants[attribute] = name
        self.module.register_buffer(attribute, value.detach().clone())
        return self.graph.get_attr(attribute)


@dataclass(frozen=True)
class _Grid:
    """A quantizer's grid as these operators take it."""

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    axis: int | None
    dtype: torch.dtype

    @classmethod
    def of(cls, quantizer: Quantizer) -> _Grid:
        grid, layout = quantizer.grid(), quantizer.layout
        if quantizer.port == "bias":
            return cls(grid.scale, grid.zero_point, grid.qmin, grid.qmax, None, torch.int32)
        if layout.granularity == "group" or grid.qmin < -128 or grid.qmax > 255:
            raise ExportError(
                "torch's compilers have no integer kernels for this format",
                where=quantizer.site,
                value=str(quantizer.format),
                fix="use 8 bits per tensor or per channel",
            )
        axis = layout.axis if layout.granularity == "channel" else None
        dtype = torch.int8 if grid.qmin < 0 else torch.uint8
        return cls(grid.scale, grid.zero_point, grid.qmin, grid.qmax, axis, dtype)
