"""Run a model without side effects: in evaluation mode and on copies of the input tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Switch the model to evaluation mode, and restore the mode of each module afterwards.

    Objects that aren't modules (runtimes, functions) are left alone.
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
        except Exception:  # pass objects that can't be copied unchanged
            return value
    return value


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of an object. They are copied separately because `deepcopy` rejects non-leaf tensors."""
    items = value.values() if isinstance(value, Mapping) else vars(value).values() if hasattr(value, "__dict__") else ()
    for item in items:
        for part in item if isinstance(item, (list, tuple)) else (item,):
            if isinstance(part, Tensor):
                yield part
