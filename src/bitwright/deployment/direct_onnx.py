"""Write ONNX directly from a program of `torch.export`, for programs whose operators are all known.

torch.onnx first decomposes a program, which traces it again, and loads its registry of all operators. That takes longer
than everything else in an export. Here, each operator has a function that writes its nodes (`aten_*.py`). For a program
with another operator, `Untranslated` is raised, and the caller uses torch.onnx.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any, cast

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, OutputKind

from bitwright.deployment.graph_writer import NodeWriter, Untranslated, emitter_of, ir_shape, opname

__all__ = ["write_graph"]

_IR_VERSION = 10
_KEPT = 1 << 16  # bytes of a folded constant that isn't computed again
_SAME = {"detach", "detach_", "alias", "lift_fresh_copy"}  # results that are their input, also if one is written


def write_graph(program: torch.export.ExportedProgram) -> ir.Model:
    """The program as ONNX, with a node of the domain `bitwright` for each marker."""
    # They register their operators, and import this package.
    from bitwright.deployment import aten_arithmetic, aten_layout, aten_networks  # noqa: F401

    writer = _ProgramWriter(program)
    with torch.no_grad():
        writer.run()
    model = ir.Model(writer.graph, ir_version=_IR_VERSION)
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return model


class _ProgramWriter(NodeWriter):
    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self.program = program
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        self.node = self.nodes[0]
        self.values: dict[fx.Node, Any] = {}
        self.stored: dict[fx.Node, Tensor] = {}  # parameters, buffers and constants
        self._order = {node: index for index, node in enumerate(self.nodes)}
        self._folded: dict[fx.Node, bool] = {}  # whether a node's value depends on no input
        self._computed: dict[fx.Node, Any] = {}
        self._initializers: dict[Any, ir.Value] = {}
        self._roots: dict[fx.Node, fx.Node] = {}  # the owner of the memory that a tensor shares

    def value(self, node: fx.Node) -> Any:
        if node not in self.values:
            if not self._folds(node):
                raise Untranslated(f"{node.target}")
            self.values[node] = self._fold(node)
        return self.values[node]

    def data(self, node: Any) -> Tensor | None:
        if not isinstance(node, fx.Node) or not self._folds(node) or not isinstance(self.meta(node), Tensor):
            return None
        found: Tensor = self._compute(node)
        return found

    def run(self) -> None:
        """Write the whole program."""
        self._read_inputs()
        needed = self._needed()
        for node in self.nodes:
            self.node = node
            if node.op in ("placeholder", "get_attr"):
                continue
            if node.op == "output":
                self._write_outputs()
            elif node.op != "call_function":
                self.refuse()
            elif node in needed:
                self._alias(node)
                if not self._folds(node):
                    self._write(node)

    def _read_inputs(self) -> None:
        signature = self.program.graph_signature
        if signature.buffers_to_mutate or any(one.kind != OutputKind.USER_OUTPUT for one in signature.output_specs):
            raise Untranslated("a result that is written into a buffer or an input")
        state = {**self.program.state_dict, **self.program.constants}
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        for node in self.nodes:
            if node.op == "get_attr":
                tensor = getattr(self.program.graph_module, str(node.target), None)
                if isinstance(tensor, Tensor):
                    self.stored[node] = tensor
                    node.meta.setdefault("val", tensor)
            elif node.op == "placeholder":
                spec = specs[node.name]
                if spec.kind == InputKind.USER_INPUT:
                    self._read_input(node)
                elif isinstance(tensor := state.get(spec.target), Tensor):
                    self.stored[node] = tensor
                else:
                    raise Untranslated(f"an input of the kind {spec.kind.name}")
        self._names = {node: str(specs[node.name].target) for node in self.stored if node.op == "placeholder"}
        writes = [node for node in self.nodes if self._is_write(node)]
        for node in self.nodes:
            self._folded[node] = node in self.stored or self._is_constant(node, writes=bool(writes))

    def _read_input(self, node: fx.Node) -> None:
        found = node.meta.get("val")
        if isinstance(found, Tensor):
            value = ir.Value(name=node.name, shape=ir_shape(found), type=ir.TensorType(from_torch_dtype(found.dtype)))
            self.graph.inputs.append(value)
            self.values[node] = value
        elif node.users:
            raise Untranslated("an input that isn't a tensor")

    def _needed(self) -> set[fx.Node]:
        """Nodes that the results depend on; writes into tensors may change what other nodes read."""
        wanted = [node for node in self.nodes if node.op == "output" or self._is_write(node)]
        found: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node not in found:
                found.add(node)
                wanted += node.all_input_nodes
        return found

    @staticmethod
    def _is_write(node: fx.Node) -> bool:
        schema = getattr(node.target, "_schema", None)
        return schema is not None and schema.is_mutable and opname(node) not in _SAME

    def _is_constant(self, node: fx.Node, *, writes: bool) -> bool:
        """Whether a node's value depends on no input; new tensors may be written into."""
        if node.op != "call_function" or node.target is torch.ops.bitwright.site.default or self._is_write(node):
            return False
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            return False
        if (not node.all_input_nodes and writes) or "val" not in node.meta:
            return False
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False
        return all(self._folded[source] for source in node.all_input_nodes)

    def _folds(self, node: fx.Node) -> bool:
        return self._folded[node]

    def _compute(self, node: fx.Node) -> Any:
        """The value of a node that depends on no input."""
        if node in self.stored:
            return self.stored[node]
        if node in self._computed:
            return self._computed[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._compute)
        target: Any = node.target
        result = target(*args, **kwargs)
        if isinstance(result, Tensor) and result.numel() * result.element_size() <= _KEPT:
            self._computed[node] = result
        return result

    def _fold(self, node: fx.Node) -> Any:
        found = self.meta(node)
        if not isinstance(found, Tensor):
            self.refuse("a constant that isn't a tensor")
        if node in self.stored:
            tensor = self.stored[node]
            key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else node
            if key not in self._initializers:  # tied weights are stored once
                name = self._names.get(node, node.name)
                self._initializers[key] = self.register(name, TorchTensor(tensor.detach(), name=name))
            return self._initializers[key]
        return self.lazy(node.name, lambda: self._compute(node), found)

    def _alias(self, node: fx.Node) -> None:
        """Note whose memory a result shares, and verify that a write changes nothing else that is read later."""
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # getitem, or arithmetic with sizes
            if node.target is operator.getitem:
                self._roots[node] = self._root(node.args[0])
            return
        for index, arg in enumerate(schema.arguments):
            if arg.alias_info is None or index >= len(node.args) or not isinstance(node.args[index], fx.Node):
                continue
            source = node.args[index]
            self._roots[node] = self._root(source)
            if arg.alias_info.is_write and self._is_write(node):
                self._verify_write(node, cast("fx.Node", source))

    def _root(self, node: Any) -> Any:
        return self._roots.get(node, node)

    def _verify_write(self, node: fx.Node, written: fx.Node) -> None:
        root = self._root(written)
        if self._folds(root) or written != node.args[0]:
            self.refuse("a write into a constant")
        same = self._whole(written)
        for other in [root, *(other for other, owner in self._roots.items() if owner is root)]:
            later = any(self._order[user] > self._order[node] for user in other.users)
            if later and other is not node and self._whole(other) is not same:
                self.refuse("a write into a part of a tensor")

    def _whole(self, node: fx.Node) -> fx.Node:
        """The first node with the same tensor: results of writes and detach() are their inputs."""
        while node.op == "call_function" and getattr(node.target, "_schema", None) is not None:
            if not self._is_write(node) and opname(node) not in _SAME:
                break
            node = cast("fx.Node", node.args[0])
        return node

    def _write(self, node: fx.Node) -> None:
        found = node.meta.get("val")
        if node.target is operator.getitem:
            several, index = cast("tuple[fx.Node, int]", node.args)
            self.values[node] = self.value(several)[index]
            return
        if not isinstance(found, (Tensor, tuple, list)):
            return  # a size, which is written where it is used, or a check
        if node.target is torch.ops.bitwright.site.default:
            source, site = cast("tuple[fx.Node, str]", node.args)
            marker = ir.Node("bitwright", "Site", [self.value(source)], [ir.AttrString("site", site)])
            self.graph.append(marker)
            made: Any = marker.outputs[0]
            self.unnamed.add(made)
        else:
            emitter = emitter_of(node.target)
            if emitter is None:
                self.refuse()
            arguments = _arguments(node)
            try:
                inspect.signature(emitter).bind(self, **arguments)
            except TypeError:  # an overload with other arguments
                self.refuse()
            made = emitter(self, **arguments)
        if isinstance(found, Tensor):
            self._describe(node.name, made, found)
        else:
            for index, (value, one) in enumerate(zip(made, found, strict=False)):
                if value is not None:
                    self._describe(f"{node.name}_{index}", value, one)
        self.values[node] = made
        if self._is_write(node):  # everyone who reads the tensor from here on reads the new value
            whole = self._whole(node)
            for other in [whole, *(other for other, owner in self._roots.items() if owner is self._root(whole))]:
                if self._whole(other) is whole:
                    self.values[other] = made

    def _describe(self, name: str, value: ir.Value, found: Tensor) -> None:
        """Name a new value after the operator, and note its type and shape."""
        if value not in self.unnamed:  # the operator changes nothing, or its result exists already
            return
        self.unnamed.remove(value)
        value.name, value.shape = name, ir_shape(found)
        value.dtype = from_torch_dtype(found.dtype)

    def _write_outputs(self) -> None:
        results = self.node.args[0]
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if not isinstance(result, fx.Node) or not isinstance(self.meta(result), Tensor):
                raise Untranslated("a result that isn't a tensor")
            value = self.value(result)
            if value.producer() is None or value in self.graph.outputs:
                copied = ir.Node("", "Identity", [value])
                self.graph.append(copied)
                self.count += 1
                copied.outputs[0].name = f"{result.name}_output{self.count}"
                value = copied.outputs[0]
                value.dtype, value.shape = from_torch_dtype(self.meta(result).dtype), ir_shape(self.meta(result))
            self.graph.outputs.append(value)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, with defaults."""
    found: dict[str, Any] = {}
    target: Any = node.target
    for index, argument in enumerate(target._schema.arguments):
        name = "x" if argument.name == "self" else argument.name
        if index < len(node.args):
            found[name] = node.args[index]
        elif argument.name in node.kwargs:
            found[name] = node.kwargs[argument.name]
        else:
            found[name] = argument.default_value
    return found
