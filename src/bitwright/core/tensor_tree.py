"""Find and change tensors in nested inputs and outputs.

Supports tuples, lists, mappings, dataclasses and types that are registered as pytrees, such as transformers' caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bitwright.core.modes import copied


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor in `value` with its path: "", "0", "logits", "cache.0.key"."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, (list, tuple)):
        items = iter(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif (node := pytree.SUPPORTED_NODES.get(type(value))) is not None:
        items = iter(enumerate(node.flatten_fn(value)[0]))
    else:
        return
    for key, item in items:
        yield from tensors_in(item, f"{path}.{key}" if path else str(key))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of the nested value with `change` applied to each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({key: map_tensors(item, change) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_tensors(getattr(value, name), change) for name in fields})
    if (node := pytree.SUPPORTED_NODES.get(type(value))) is not None:
        children, context = node.flatten_fn(value)
        return node.unflatten_fn([map_tensors(child, change) for child in children], context)
    return value


def channels_last(value: Any) -> Any:
    """A copy of the nested value with its images (4-D tensors) in channels-last memory format."""
    return map_tensors(value, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)


def batch_size(batch: Any) -> int:
    """The length of the first tensor's first axis."""
    return next((int(tensor.shape[0]) for _, tensor in tensors_in(batch) if tensor.dim()), 1)


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """The samples `start` to `stop`: slices each tensor with the batch size as its first dimension."""
    size = batch_size(batch)
    return map_tensors(batch, lambda t: t[start:stop] if t.dim() and t.shape[0] == size else t)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert example inputs to positional and keyword arguments.

    A dict becomes keywords, a tuple or list positional arguments, anything else one argument. Tensors are copied, so
    that a model that writes to its inputs doesn't change the caller's tensors.
    """
    inputs = copied(inputs)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}
