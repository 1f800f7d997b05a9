"""The prepared model as a torch.export program, and its .pt2 file."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.decomposition
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from bitwright.core.errors import ArtefactError, ExportError, shortened
from bitwright.core.files import replacing
from bitwright.core.tensor_tree import as_array, as_call, eval_mode, tensors_in
from bitwright.deployment.export import marked_program
from bitwright.deployment.onnx_files import Damage, compare_digests, digests_of, file_digest
from bitwright.deployment.qdq import Recorded
from bitwright.quantizers import Attachment, Quantizer, attachment_of

_OPS = torch.ops.quantized_decomposed


@dataclass(frozen=True, kw_only=True)
class QuantizedProgram:
    """A program, and the site of each of its integer tensors."""

    program: torch.export.ExportedProgram
    quantized: tuple[str, ...]
    """The sites of the quantize operators, in program order."""
    constants: dict[str, str] = field(default_factory=dict)
    """The name of a constant in the program → `<site>.codes`, `<site>.scale`, `<site>.zero_point`."""


def quantized_program(model: nn.Module, inputs: Any) -> QuantizedProgram:
    """Export with the batch of `inputs`; weights are integers, and int32 biases are stored as floats."""
    args, kwargs = as_call(inputs)
    marked, recorded = marked_program(model, args, kwargs)
    module = marked.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _drop_idle(module.graph)
    writer = _ProgramWriter(module, attachment_of(model), recorded)
    writer.run()
    module = fx.GraphModule(module, module.graph)  # drops unused float weights
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's internal warnings
        program = torch.export.export(module, args, kwargs, strict=False)
    found = sum(node.target in QUANTIZE for node in program.graph.nodes)
    if found != len(writer.quantized):
        raise ExportError(
            f"the program has {found} quantize operators, but the plan has {len(writer.quantized)}",
            fix="please report this",
            code="internal-mismatch",
        )
    return QuantizedProgram(program=program, quantized=tuple(writer.quantized), constants=writer.constants)


def _drop_idle(graph: fx.Graph) -> None:
    """Remove casts without effect and assertions, which would prevent fusions."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is torch.ops.aten.to.dtype and node.args[0].meta["val"].dtype == node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


QUANTIZE = (_OPS.quantize_per_tensor.default, _OPS.quantize_per_channel.default)


class _ProgramWriter:
    """Replaces markers by quantize and dequantize operators; every reader gets its own dequantize, as fusions need."""

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
        grid = _OperatorGrid.of(quantizer)
        source = node.args[0]
        assert isinstance(source, fx.Node)
        stored = site in self.recorded.weights
        with self.graph.inserting_before(node):
            if stored and grid.dtype == torch.int32:  # a bias: these compilers add it in float, with the same result
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

    def _quantize(self, source: fx.Node, grid: _OperatorGrid, parameters: tuple[Any, ...]) -> fx.Node:
        op = _OPS.quantize_per_channel.default if grid.axis is not None else _OPS.quantize_per_tensor.default
        return self.graph.call_function(op, (source, *parameters, grid.qmin, grid.qmax, grid.dtype))

    def _read(self, node: fx.Node, codes: fx.Node, grid: _OperatorGrid, parameters: tuple[Any, ...]) -> None:
        op = _OPS.dequantize_per_channel.default if grid.axis is not None else _OPS.dequantize_per_tensor.default
        for user in list(node.users):
            with self.graph.inserting_before(user):
                dequantized = self.graph.call_function(op, (codes, *parameters, grid.qmin, grid.qmax, grid.dtype))
            user.replace_input_with(node, dequantized)

    def _parameters(self, quantizer: Quantizer, grid: _OperatorGrid) -> tuple[Any, ...]:
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
class _OperatorGrid:
    """The arguments of quantize operators for a quantizer."""

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    axis: int | None
    dtype: torch.dtype

    @classmethod
    def of(cls, quantizer: Quantizer) -> _OperatorGrid:
        grid, layout = quantizer.grid(), quantizer.layout
        if quantizer.port == "bias":
            return cls(grid.scale, grid.zero_point, grid.qmin, grid.qmax, None, torch.int32)
        if layout.granularity == "group" or grid.qmin < -128 or grid.qmax > 255:
            raise ExportError(
                "torch's compilers have no integer kernels for this format",
                where=quantizer.site,
                value=str(quantizer.format),
                fix="use 8 bits per tensor or per channel",
                code="unsupported-format",
            )
        axis = layout.axis if layout.granularity == "channel" else None
        dtype = torch.int8 if grid.qmin < 0 else torch.uint8
        return cls(grid.scale, grid.zero_point, grid.qmin, grid.qmax, axis, dtype)


_SITES = "bitwright-sites.json"


def save_program(
    path: Path,
    program: torch.export.ExportedProgram,
    quantized: QuantizedProgram | None = None,
    *,
    beside: Path | None = None,
) -> None:
    """Write a program, with sites if it is quantized, and the digest of the file `beside`, which belongs to it."""
    names: dict[str, Any] = {}
    if quantized is not None:
        names = {"quantized": quantized.quantized, "constants": quantized.constants}
        names["digests"] = digests_of(_tensors(quantized))
        names["files"] = {} if beside is None else {beside.name: file_digest(beside)}
    for node in program.graph.nodes:  # stack traces are larger than small models and contain local paths
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with replacing(path) as temporary:
            torch.export.save(program, temporary, extra_files={_SITES: json.dumps(names)})


def load_program(path: Path) -> tuple[torch.export.ExportedProgram, QuantizedProgram | None]:
    """Read a file of `save_program`."""
    program, names = _load(path)
    if not names:
        return program, None
    return program, QuantizedProgram(
        program=program, quantized=tuple(names["quantized"]), constants=dict(names["constants"])
    )


def load_quantized(path: Path) -> QuantizedProgram:
    """Read the program of a quantized model; a float program is an error."""
    quantized = load_program(path)[1]
    if quantized is None:
        fix = "pass the artefact of the quantized model"
        raise ArtefactError("this program has no sites", where=str(path), fix=fix, code="no-sites")
    return quantized


def _load(path: Path) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    _refuse_changed_bytes(path)
    files = {_SITES: ""}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(path, extra_files=files)
        return program, json.loads(files[_SITES] or "{}")
    except Exception as error:  # torch raises different types for unreadable files
        what = f"the program can't be read: {type(error).__name__}: {shortened(str(error))}"
        fix = "export it again, with this version of torch"
        raise ArtefactError(what, where=str(path), fix=fix, code="damaged-artefact") from error


def _refuse_changed_bytes(path: Path) -> None:
    """Raise an error if a bit of the file changed: it is an archive with a checksum for each member."""
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
    except OSError as error:
        raise ArtefactError(
            "the program can't be read", where=str(path), value=error.strerror, code="unreadable-file"
        ) from error
    except Exception as error:  # zipfile raises several types for a damaged directory
        changed = f"{type(error).__name__}: {error}"
    if changed is not None:
        what, fix = "the program's file changed after the export", "export it again"
        raise ArtefactError(what, where=str(path), value=changed, fix=fix, code="damaged-artefact")


def damages_of(path: Path) -> list[Damage]:
    """Differences from the exported contents, in the program and in the file next to it."""
    program, names = _load(path)
    if "digests" not in names:
        return []
    quantized = QuantizedProgram(
        program=program, quantized=tuple(names["quantized"]), constants=dict(names["constants"])
    )
    found = compare_digests(names["digests"], _tensors(quantized))
    for name, expected in names["files"].items():
        if file_digest(path.with_name(name)) != expected:
            found.append(Damage(site=name, what=f"the contents of {name} changed after the export"))
    return found


def _tensors(quantized: QuantizedProgram) -> dict[str, NDArray[Any]]:
    """All stored tensors of a program: by site, or by name for those in float."""
    program = quantized.program
    rest = {**program.state_dict, **program.constants}
    own = {
        name: as_array(tensor)
        for name, tensor in rest.items()
        if isinstance(tensor, Tensor) and name not in quantized.constants
    }
    return {**own, **stored_in(quantized)}


def float_program(model: nn.Module, inputs: Any) -> torch.export.ExportedProgram:
    """The float model as a program, with the batch of `inputs`."""
    args, kwargs = as_call(inputs)
    with torch.no_grad(), eval_mode(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, strict=False)


def stored_in(quantized: QuantizedProgram) -> dict[str, NDArray[Any]]:
    """Codes, scales and zero points in the program, by site; those of activations are arguments of operators."""
    state = quantized.program.state_dict
    found = {name: state[attribute].numpy() for attribute, name in quantized.constants.items()}
    for site, node in zip(quantized.quantized, _quantize_nodes(quantized.program.graph), strict=True):
        if node.target is QUANTIZE[0]:
            found[f"{site}.scale"], found[f"{site}.zero_point"] = np.array(node.args[1]), np.array(node.args[2])
    return found


def flat_module(
    program: torch.export.ExportedProgram,
    quantized: QuantizedProgram | None = None,
    sites: Iterable[str] = (),
    *,
    dequantized: bool = False,
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """The program as a function of tensors that returns a tuple of tensors, and the names of these.

    It also returns `<site>.codes` of the given `sites`: codes, or with `dequantized` the values of the codes.
    """
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    wanted = set(sites)
    nodes = _quantize_nodes(module.graph) if quantized is not None else []
    places = quantized.quantized if quantized is not None else ()
    shown = {f"{site}.codes": node for site, node in zip(places, nodes, strict=True) if site in wanted}
    if dequantized:
        shown = {name: _dequantized(module.graph, node) for name, node in shown.items()}
    end = next(node for node in module.graph.nodes if node.op == "output")
    results = list(end.all_input_nodes)
    end.args = ((*results, *shown.values()),)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module, (*(f"output_{index}" for index in range(len(results))), *shown)


def _dequantized(graph: fx.Graph, codes: fx.Node) -> fx.Node:
    """A separate dequantize operator for an output: an operator with two readers would prevent fusions."""
    reader = next(user for user in codes.users if "dequantize" in str(user.target))
    with graph.inserting_after(reader):
        return graph.node_copy(reader, lambda node: node)


def _quantize_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in QUANTIZE]


def input_names(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The names of the program's input tensors."""
    return tuple(str(name) for name in program.graph_signature.user_inputs)


def flat_example(program: torch.export.ExportedProgram) -> tuple[Tensor, ...]:
    """The example inputs of the export, in the order of the program's inputs."""
    if program.example_inputs is None:
        raise ArtefactError("the program has no example inputs", fix="export it again", code="no-example-inputs")
    args, kwargs = program.example_inputs
    flat = [tensor for _, tensor in tensors_in((*args, kwargs))]
    return tuple(flat)


def example_batch(program: torch.export.ExportedProgram) -> int | None:
    """The fixed batch size of the program."""
    return next((int(tensor.shape[0]) for tensor in flat_example(program) if tensor.dim()), None)
