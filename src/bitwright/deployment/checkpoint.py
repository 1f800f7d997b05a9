"""Checkpoints of models, prepared or not, as safetensors files that are written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.core.arguments import strict
from bitwright.core.documents import parse_json
from bitwright.core.errors import CheckpointError, PlanError, Problem, did_you_mean, shortened
from bitwright.core.files import replacing
from bitwright.quantizers import CONTAINER, Attachment, find_attachment
from bitwright.quantizers.state import parameter_problems

__all__ = ["checkpoint_file", "load_checkpoint", "load_state", "read_state", "save_checkpoint", "save_state"]

_VERSION = "1"
_PICKLED = (".pth", ".pt", ".tar", ".bin")
_CONTAINERS = ("state_dict", "model", "net")  # keys under which training scripts store the weights
_PREFIX = f"{CONTAINER}."


@strict
def save_checkpoint(model: nn.Module, path: str | Path) -> Path:
    """Write the model's state, including its quantizers.

    Tied tensors are stored once, because safetensors rejects shared storage; their other names go into the metadata.

    >>> import tempfile, torch, bitwright
    >>> path = bitwright.save_checkpoint(torch.nn.Linear(8, 4), tempfile.mkdtemp() + "/model.safetensors")
    >>> path.name
    'model.safetensors'
    """
    return save_state(model.state_dict(), path)


@strict
def checkpoint_file(path: Path) -> Path:
    """The checkpoint at a path: the file itself, or the one in the folder of a run."""
    file = path / "checkpoint.safetensors" if path.is_dir() else path
    if not file.is_file():
        fix = "pass the folder of a run, or a file"
        raise CheckpointError("the checkpoint doesn't exist", where=str(file), fix=fix, code="no-such-checkpoint")
    return file


def save_state(state: dict[str, Any], path: str | Path) -> Path:
    """Write a state dict like `save_checkpoint`."""
    path = Path(path)
    tensors, aliases = _untied(state)
    metadata = {"format": "pt", "bitwright": _VERSION, "aliases": json.dumps(aliases, sort_keys=True)}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with replacing(path, needed=needed) as temporary:
        save_file(tensors, temporary, metadata=metadata)
        _sort_metadata(temporary, metadata)
    return path


def _sort_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Give the metadata a fixed order, so that equal states give equal files: safetensors writes them in any order."""
    text = json.dumps(dict(sorted(metadata.items())), separators=(",", ":"), ensure_ascii=False).encode()
    with path.open("r+b") as file:
        start = b'{"__metadata__":'
        head = file.read(8 + len(start) + len(text))
        with suppress(ValueError):  # leave an unknown layout unchanged
            if head[8:].startswith(start) and json.loads(head[8 + len(start) :]) == metadata:
                file.seek(8 + len(start))
                file.write(text)


@strict
def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Load a file of `save_checkpoint` into a model that is prepared with the same plan.

    A float checkpoint also loads, but leaves quantizers without ranges. It may be a state dict that `torch.save` wrote
    (.pth, .pt, .tar, .bin). Names and shapes are compared first: either everything is loaded, or nothing is and the
    error lists every difference.

    >>> import tempfile, torch, bitwright
    >>> saved, loaded = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    >>> path = bitwright.save_checkpoint(saved, tempfile.mkdtemp() + "/model.safetensors")
    >>> bitwright.load_checkpoint(loaded, path)
    >>> torch.equal(saved.weight, loaded.weight)
    True
    """
    load_state(model, read_state(Path(path)), where=str(path))


def load_state(model: nn.Module, state: dict[str, Tensor], *, where: str) -> None:
    """Load a state dict if all its names and shapes match the model; otherwise report every difference."""
    for name, tensor in model.state_dict().items():
        if name.endswith(".num_batches_tracked"):  # batch norms of old checkpoints don't count their batches
            state.setdefault(name, torch.zeros_like(tensor))
    problems = _differences(model, state)
    if problems:
        raise PlanError(problems, title=f"{where} doesn't match the model")
    model.load_state_dict(state)


def _untied(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the other names of tensors that share its memory."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                "the state contains a value that isn't a tensor",
                where=name,
                value=type(tensor).__name__,
                fix="remove it from the state dict (get_extra_state), or register it as a buffer",
                code="not-a-tensor",
            )
        memory = tensor.untyped_storage().data_ptr()
        view = (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in first:
            aliases[name] = first[view]
            continue
        first[view] = name
        # Different views of the same memory become separate tensors.
        tensors[name] = tensor.detach().clone().contiguous() if memory in storages else tensor.detach().contiguous()
        storages.add(memory)
    return tensors, aliases


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a file of `save_state`, or a state dict of `torch.save`."""
    if not path.is_file():
        raise CheckpointError(
            "the checkpoint doesn't exist",
            where=str(path),
            fix="pass the path of a .safetensors file",
            code="no-such-checkpoint",
        )
    if path.suffix in _PICKLED:
        return read_pickled(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors, torch and the operating system raise different types
        if path.suffix != ".safetensors" and path.is_file():
            raise CheckpointError(
                "this is not a checkpoint",
                where=str(path),
                fix="give a .safetensors file, or a state dict of torch.save (.pth, .pt, .tar, .bin)",
                code="wrong-kind-of-file",
            ) from error
        raise CheckpointError(
            f"the checkpoint can't be read: {shortened(str(error))}",
            where=str(path),
            fix="the file is damaged; save it again",
            code="damaged-checkpoint",
        ) from error
    state |= _aliased(metadata.get("aliases", "{}"), state, path)
    version = metadata.get("bitwright", _VERSION)
    if version != _VERSION:
        raise CheckpointError(
            "unknown version of the checkpoint",
            where=str(path),
            value=version,
            fix=f"this Bitwright reads version {_VERSION}",
            code="unknown-version",
        )
    return state


def read_pickled(path: Path) -> dict[str, Tensor]:
    """A state dict of torch.save. Only tensors and plain values are read; code in the file doesn't run."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and the operating system raise different types
        raise CheckpointError(
            f"the checkpoint can't be read: {shortened(str(error))}",
            where=str(path),
            fix="save model.state_dict() again, preferably as .safetensors",
            code="damaged-checkpoint",
        ) from error
    for key in _CONTAINERS:
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    if not isinstance(data, Mapping) or not all(isinstance(value, Tensor) for value in data.values()):
        raise CheckpointError(
            "the file has no state dict",
            where=str(path),
            value=type(data).__name__,
            fix="save model.state_dict()",
            code="damaged-checkpoint",
        )
    wrapped = all(str(name).startswith("module.") for name in data)  # saved by DataParallel
    return {str(name).removeprefix("module.") if wrapped else str(name): value for name, value in data.items()}


def _aliased(text: str, state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Tied tensors by their other names; each must refer to a tensor in the file."""
    fix = "the file is damaged; save it again"
    aliases = parse_json(text, where=f"{path}, aliases", what="the checkpoint", fix=fix, error=CheckpointError)
    if not isinstance(aliases, dict):
        raise CheckpointError(
            "the names of tied tensors are not a mapping",
            where=f"{path}, aliases",
            value=aliases,
            fix=fix,
            code="damaged-checkpoint",
        )
    problems = [
        Problem(
            what="it is tied to a tensor that the checkpoint doesn't contain"
            if name not in state
            else "it occurs twice",
            where=name,
            value=owner,
            fix=fix,
            code="damaged-checkpoint",
        )
        for name, owner in aliases.items()
        if not isinstance(owner, str) or owner not in state or name in state
    ]
    if problems:
        raise PlanError(problems, title=f"the tied tensors of {path} have problems")
    return {name: state[owner] for name, owner in aliases.items()}


def _differences(model: nn.Module, state: dict[str, Tensor]) -> list[Problem]:
    known = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(_PREFIX)}
    attachment = find_attachment(model)
    sites = set(attachment.quantizers) if attachment is not None else set()
    problems = [
        Problem(
            what="the checkpoint doesn't contain this tensor",
            where=name,
            fix="save it from the same model",
            code="missing-tensor",
        )
        for name in known
        if name not in state
    ]
    strange: dict[str, None] = {}  # report a site once, not each of its tensors
    for name, tensor in state.items():
        if name.startswith(_PREFIX):
            site = name.removeprefix(_PREFIX).rpartition(".")[0]
            if site not in sites:
                strange[site] = None
        elif name not in known:
            what, fix = "the model has no such tensor", did_you_mean(name, known)
            problems.append(Problem(what=what, where=name, fix=fix, code="unknown-tensor"))
        elif isinstance(known[name], torch.Tensor) and known[name].shape != tensor.shape:
            problems.append(
                Problem(
                    what=f"the model has the shape {tuple(known[name].shape)} here",
                    where=name,
                    value=tuple(tensor.shape),
                    fix="build the same model as when the checkpoint was saved",
                    code="state-shape",
                )
            )
        elif isinstance(known[name], Tensor) and known[name].is_floating_point() != tensor.is_floating_point():
            problems.append(
                Problem(
                    what=f"the model has {known[name].dtype} here",
                    where=name,
                    value=str(tensor.dtype),
                    fix="save it from the same model",
                    code="state-dtype",
                )
            )
    if attachment is not None:
        problems += attachment.state_problems(state, _PREFIX)
        problems += _unequal_channels(model, attachment, state)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        given = ((name, tensor) for name, tensor in state.items() if name in parameters and name in known)
        problems += parameter_problems(sites, given)
    problems += [
        Problem(
            what="the checkpoint has a quantizer, but the plan has none here",
            where=site,
            fix="use the plan of the checkpoint" if sites else "prepare(model, plan) first, with the checkpoint's plan",
            code="unexpected-quantizer",
        )
        for site in strange
    ]
    return problems


def _unequal_channels(model: nn.Module, attachment: Attachment, state: dict[str, Tensor]) -> Iterator[Problem]:
    """Problems of per-channel scales that don't match the number of channels of their weight."""
    for site, quantizer in attachment.quantizers.items():
        scale = state.get(f"{_PREFIX}{site}.scale")
        path, _, port = site.rpartition(":")
        try:
            weight = model.get_parameter(f"{path}.{port}")
        except AttributeError:  # an activation, or a weight that isn't stored under the name of its operator
            continue
        if scale is None or scale.dim() != 1 or quantizer.layout.granularity != "channel":
            continue
        channels = weight.shape[quantizer.layout.axis]
        if scale.numel() not in (0, channels):  # a missing scale is already reported
            yield Problem(
                what=f"the number of scales differs from the number of channels of the weight, {channels}",
                where=site,
                value=scale.numel(),
                fix="use the checkpoint of this model",
                code="state-shape",
            )
