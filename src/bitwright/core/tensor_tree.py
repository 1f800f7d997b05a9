"""Nested inputs and outputs of models: find, change and copy their tensors, and call a model without side effects.

Supports tuples, lists, mappings, dataclasses and types that are registered as pytrees, such as transformers' caches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_CONTAINERS = (dict, OrderedDict, list, set)


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


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Switch the model to evaluation mode, and restore the mode of each module afterwards.

    Objects that aren't modules (runtimes, functions) are not changed.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


_KEPT = (
    *(str, bytes, int, float, complex, bool, type(None), range, slice, type, nn.Module, torch.Generator),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType, functools.partial),
)


def copied(inputs: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of nested inputs with new tensors.

    A model may write to its inputs (`x.mul_(2)`, `x[:, 0] = 0`, `out=x`, a growing cache). This must not change the
    user's batches or the next pass. A tensor that occurs twice is copied once.
    """
    memo = {} if memo is None else memo
    if id(inputs) in memo:
        return memo[id(inputs)]
    if isinstance(inputs, _KEPT):
        return inputs
    memo[id(inputs)] = new = _copied(inputs, memo)
    return new


def call_copied(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model with copies of the arguments."""
    args, kwargs = copied((args, kwargs))
    return model(*args, **kwargs)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: copied(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item, memo) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(item, memo) for item in value))
    if dataclasses.is_dataclass(value) or isinstance(value, Mapping) or hasattr(value, "__dict__"):
        try:
            return copy.deepcopy(value, {**memo, **{id(t): copied(t, memo) for t in _tensors_of(value)}})
        except Exception:  # objects that can't be copied are passed unchanged
            return value
    return value


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of an object. They are copied separately because `deepcopy` rejects non-leaf tensors."""
    items = value.values() if isinstance(value, Mapping) else vars(value).values() if hasattr(value, "__dict__") else ()
    for item in items:
        for part in item if isinstance(item, (list, tuple)) else (item,):
            if isinstance(part, Tensor):
                yield part


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Convert a tensor to NumPy; bfloat16 becomes float32, which has the same values."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def shape_of(value: object) -> str:
    """Describe a batch for an error message by its type and shape, never its contents."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return f"dict of {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__


@contextmanager
def untouched(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Restore everything that running the model in this block changes."""
    modules = list(model.modules())
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    # A forward may replace a buffer, fill a cache or register a hook; these are in the modules' dicts.
    # Most dicts are empty, so copying only the others saves thousands of objects.
    known = [v for module in modules for v in vars(module).values() if type(v) in _CONTAINERS]
    containers = [(v, v.copy() if v else ()) for v in known]
    written = [*model.buffers(), *(tensor for module in modules for _, tensor in plain_tensors(module))]
    tensors = [(tensor, tensor.detach().clone()) for tensor in written if not isinstance(tensor, nn.Parameter)]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=_cuda_devices(model)), torch.no_grad():
            model.train(train)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for now, before in [*attributes, *containers]:
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are neither parameters nor buffers: attributes, also in lists, tuples and dicts."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}.{key}", item) for key, item in items if isinstance(item, Tensor))


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
