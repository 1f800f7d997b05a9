"""Nested state (of optimizers, observers) as one flat set of tensors and JSON: files without pickle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitwright.errors import CheckpointError

_TENSOR = "$tensor"


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """`value` as JSON can hold it; its tensors go into `tensors`, under their paths.

    >>> import torch
    >>> kept = {}
    >>> pack({"a": {"b": torch.ones(2), "lr": 0.1}}, kept), list(kept)
    ({'a': {'b': {'$tensor': 'a/b'}, 'lr': 0.1}}, ['a/b'])
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous()
        return {_TENSOR: path}
    if isinstance(value, dict):
        return {str(key): pack(item, tensors, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError("this state can't be saved", where=path, value=type(value).__name__)


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `pack` was given, but for keys that weren't text and tuples."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            name = value[_TENSOR]
            if name not in tensors:
                what = "the checkpoint lacks this tensor"
                raise CheckpointError(what, where=str(name), fix="resume from another one", code="damaged-checkpoint")
            return tensors[name]
        return {key: unpack(item, tensors) for key, item in value.items()}
    return [unpack(item, tensors) for item in value] if isinstance(value, list) else value
