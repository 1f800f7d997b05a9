"""Checkpoints of models, prepared or not, as safetensors: no pickle, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.attach import CONTAINER, find_attachment
from bitwright.errors import CheckpointError, PlanError, Problem, did_you_mean
from bitwright.files import replacing

__all__ = ["checkpoint_file", "load_checkpoint", "read_state", "save_checkpoint", "save_state"]

_VERSION = "1"
_PREFIX = f"{CONTAINER}."


def save_checkpoint(model: nn.Module, path: str | Path) -> Path:
    """Write the model's state, its quantizers' included.

    Tied tensors are stored once: safetensors refuses shared storage, so the other names go into the metadata.
    """
    return save_state(model.state_dict(), path)


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
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    return path


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
        aliases: dict[str, str] = json.loads(metadata.get("aliases", "{}"))
        state |= {name: state[owner] for name, owner in aliases.items()}
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint can't be read: {error}",
            where=str(path),
            fix="save it again: this file is damaged",
        ) from error
    version = metadata.get("bitwright", _VERSION)
    if version != _VERSION:
        raise CheckpointError(
            "the checkpoint has another version",
            where=str(path),
            value=version,
            fix=f"this Bitwright reads version {_VERSION}",
        )
    return state


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
