"""Checkpoints of models, prepared or not, as safetensors: no pickle, written whole or not at all."""

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

__all__ = ["checkpoint_file", "load_checkpoint", "read_state", "save_checkpoint", "save_state"]

_VERSION = "1"
_PREFIX = f"{CONTAINER}."


@strict
def save_checkpoint(model: nn.Module, path: str | Path) -> Path:
    """Write the model's state, its quantizers' included.

    Tied tensors are stored once: safetensors refuses shared storage, so the other names go into the metadata.
    """
    return save_state(model.state_dict(), path)


@strict
def checkpoint_file(path: Path) -> Path:
    """The checkpoint that a user means: a file, or the one in a run's folder."""
    file = path / "checkpoint.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError("there is no such checkpoint", where=str(file), fix="give a run's folder, or a file")
    return file


def save_state(state: dict[str, Any], path: str | Path) -> Path:
    """Write a state dict as `save_checkpoint` does."""
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
        with suppress(ValueError):  # a layout that we don't know stays as it is
            if head[8:].startswith(start) and json.loads(head[8 + len(start) :]) == metadata:
                file.seek(8 + len(start))
                file.write(text)


@strict
def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Load what `save_checkpoint` wrote into a model that is prepared with the same plan.

    A float checkpoint loads too: its quantizers are then still without a range. Names and shapes are compared
    first: either all of it is loaded, or nothing is and the error lists every difference.
    """
    path = Path(path)
    state = read_state(path)
    problems = _differences(model, state)
    if problems:
        raise PlanError(problems, title=f"{path} doesn't fit the model")
    model.load_state_dict(state)


def _untied(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the names of those that are the same memory."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                "the state has something that is not a tensor",
                where=name,
                value=type(tensor).__name__,
                fix="keep it out of the state dict (get_extra_state), or register it as a buffer",
            )
        memory = tensor.untyped_storage().data_ptr()
        view = (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in first:
            aliases[name] = first[view]
            continue
        first[view] = name
        # Two different views of one memory become two tensors.
        tensors[name] = tensor.detach().clone().contiguous() if memory in storages else tensor.detach().contiguous()
        storages.add(memory)
    return tensors, aliases


def read_state(path: Path) -> dict[str, Tensor]:
    """What `save_state` was given."""
    if not path.is_file():
        raise CheckpointError(
            "there is no such checkpoint", where=str(path), fix="give the path of a .safetensors file"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors, torch and the operating system have their own
        raise CheckpointError(
            f"the checkpoint can't be read: {shortened(str(error))}",
            where=str(path),
            fix="save it again: this file is damaged",
            code="damaged-checkpoint",
        ) from error
    state |= _aliased(metadata.get("aliases", "{}"), state, path)
    version = metadata.get("bitwright", _VERSION)
    if version != _VERSION:
        raise CheckpointError(
            "the checkpoint has another version",
            where=str(path),
            value=version,
            fix=f"this Bitwright reads version {_VERSION}",
        )
    return state


def _aliased(text: str, state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Tied tensors under their other names; each must name a tensor that the file has itself."""
    fix = "save it again: this file is damaged"
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
            what="is tied to a tensor that the checkpoint doesn't have" if name not in state else "is there twice",
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
        Problem(what="the checkpoint lacks this tensor", where=name, fix="save it from the same model")
        for name in known
        if name not in state
    ]
    strange: dict[str, None] = {}  # once per site, not once per tensor of it
    for name, tensor in state.items():
        if name.startswith(_PREFIX):
            site = name.removeprefix(_PREFIX).rpartition(".")[0]
            if site not in sites:
                strange[site] = None
        elif name not in known:
            problems.append(Problem(what="the model has no such tensor", where=name, fix=did_you_mean(name, known)))
        elif isinstance(known[name], torch.Tensor) and known[name].shape != tensor.shape:
            problems.append(
                Problem(
                    what=f"the model has the shape {tuple(known[name].shape)} here",
                    where=name,
                    value=tuple(tensor.shape),
                    fix="build the model as it was when the checkpoint was saved",
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
            what="the checkpoint has a quantizer where the plan has none",
            where=site,
            fix="use the plan that the checkpoint was made with"
            if sites
            else "prepare(model, plan) first, with the plan that the checkpoint was made with",
        )
        for site in strange
    ]
    return problems


def _unequal_channels(model: nn.Module, attachment: Attachment, state: dict[str, Tensor]) -> Iterator[Problem]:
    """Scales per channel of weights that have another number of channels."""
    for site, quantizer in attachment.quantizers.items():
        scale = state.get(f"{_PREFIX}{site}.scale")
        path, _, port = site.rpartition(":")
        try:
            weight = model.get_parameter(f"{path}.{port}")
        except AttributeError:  # a weight that isn't stored under the name of its operator, or an activation
            continue
        if scale is None or scale.dim() != 1 or quantizer.layout.granularity != "channel":
            continue
        channels = weight.shape[quantizer.layout.axis]
        if scale.numel() not in (0, channels):  # none at all is reported already
            yield Problem(
                what=f"scale has another number of channels than the weight, which has {channels}",
                where=site,
                value=scale.numel(),
                fix="use the checkpoint of this model",
                code="state-shape",
            )
