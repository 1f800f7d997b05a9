"""A quantized program as a file (.pt2), with the names of its sites beside it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from bitwright.deploy.agreement import as_array
from bitwright.deploy.integrity import Damage, compare_digests, digests_of, file_digest
from bitwright.deploy.program import QUANTIZE, QuantizedProgram
from bitwright.errors import ArtefactError
from bitwright.files import replacing
from bitwright.graph.tree import as_call, tensors_in
from bitwright.modes import evaluating

_SITES = "bitwright-sites.json"


def save_program(
    path: Path,
    program: torch.export.ExportedProgram,
    quantized: QuantizedProgram | None = None,
    *,
    beside: Path | None = None,
) -> None:
    """Write a program; a float one has no sites. The file also knows what is in the one `beside` it."""
    names: dict[str, Any] = {}
    if quantized is not None:
        names = {"quantized": quantized.quantized, "constants": quantized.constants}
        names["digests"] = digests_of(_tensors(quantized))
        names["files"] = {} if beside is None else {beside.name: file_digest(beside)}
    for node in program.graph.nodes:  # Python stack traces: larger than a small model's weights, and our paths
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with replacing(path) as temporary:
            torch.export.save(program, temporary, extra_files={_SITES: json.dumps(names)})


def load_program(path: Path) -> tuple[torch.export.ExportedProgram, QuantizedProgram | None]:
    """Read what `save_program` wrote."""
    program, names = _load(path)
    if not names:
        return program, None
    return program, QuantizedProgram(
        program=program, quantized=tuple(names["quantized"]), constants=dict(names["constants"])
    )


def _load(path: Path) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    files = {_SITES: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(path, extra_files=files)
    return program, json.loads(files[_SITES] or "{}")


def damages_of(path: Path) -> list[Damage]:
    """What isn't as it was written, in the program and in the file beside it."""
    program, names = _load(path)
    if "digests" not in names:
        return []
    quantized = QuantizedProgram(
        program=program, quantized=tuple(names["quantized"]), constants=dict(names["constants"])
    )
    found = compare_digests(names["digests"], _tensors(quantized))
    for name, expected in names["files"].items():
        if file_digest(path.with_name(name)) != expected:
            found.append(Damage(site=name, what=f"{name} has other bytes than were exported"))
    return found


def _tensors(quantized: QuantizedProgram) -> dict[str, NDArray[Any]]:
    """Everything that a program stores: by site, or by its own name what stayed in float."""
    program = quantized.program
    rest = {**program.state_dict, **program.constants}
    own = {
        name: as_array(tensor)
        for name, tensor in rest.items()
        if isinstance(tensor, Tensor) and name not in quantized.constants
    }
    return {**own, **stored_in(quantized)}


def float_program(model: nn.Module, inputs: Any) -> torch.export.ExportedProgram:
    """The float model, with the batch of `inputs`."""
    args, kwargs = as_call(inputs)
    with torch.no_grad(), evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, strict=False)


def stored_in(quantized: QuantizedProgram) -> dict[str, NDArray[Any]]:
    """Codes, scales and zero points that the program holds, by site; those of activations are written in the calls."""
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
    """The program as a function of its input tensors that gives a tuple of tensors, and how those are called.

    It also returns what `sites` have, as `<site>.codes`: their codes, or the numbers that these stand for.
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
    """A dequantize operator for an output alone: another one's would have two readers, which no fusion likes."""
    reader = next(user for user in codes.users if "dequantize" in str(user.target))
    with graph.inserting_after(reader):
        return graph.node_copy(reader, lambda node: node)


def _quantize_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in QUANTIZE]


def input_names(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The names of the tensors that the program takes."""
    return tuple(str(name) for name in program.graph_signature.user_inputs)


def flat_example(program: torch.export.ExportedProgram) -> tuple[Tensor, ...]:
    """The tensors that it was exported with, in the order of its inputs."""
    if program.example_inputs is None:
        raise ArtefactError("the program doesn't say how it is called", fix="export it again")
    args, kwargs = program.example_inputs
    flat = [tensor for _, tensor in tensors_in((*args, kwargs))]
    return tuple(flat)


def example_batch(program: torch.export.ExportedProgram) -> int | None:
    """The batch size that the program is bound to."""
    return next((int(tensor.shape[0]) for tensor in flat_example(program) if tensor.dim()), None)
