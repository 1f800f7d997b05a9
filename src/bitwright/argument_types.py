"""Whether a value is of an annotated type, as far as that can be told without looking into containers.

What isn't understood (protocols, type variables) is accepted. Numbers of NumPy count as numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

_CONTAINERS = {
    "Mapping": "a mapping",
    "dict": "a dict",
    "Callable": "a function",
    "Iterable": "an iterable",
    "Iterator": "an iterator",
    "Sequence": "a list",
    "list": "a list",
    "tuple": "a tuple",
}


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` is what `hint` asks for."""
    if hint is Any or hint is object:
        return True
    if hint is None or hint is NoneType:
        return value is None
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = get_args(hint)
        return any(fits(value, kind) for kind in kinds) or (
            str in kinds and Path in kinds and isinstance(value, os.PathLike)
        )
    if origin is Annotated:
        return fits(value, get_args(hint)[0])
    if isinstance(hint, TypeVar):
        return hint.__bound__ is None or fits(value, hint.__bound__)
    if origin is not None:
        return _fits_container(value, origin, get_args(hint))
    return _is_a(value, hint) if isinstance(hint, type) else True


def _is_a(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool") or value in (0, 1)
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol
        return True


def _fits_container(value: Any, origin: Any, of: tuple[Any, ...]) -> bool:
    if origin is Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if origin in (Iterable, Sequence, list):
        if _is_tensor(value) or isinstance(value, bytes):  # one batch instead of several
            return False
        if isinstance(value, str):
            return origin is Iterable and of == (str,)  # one name instead of several, where that is allowed
        if isinstance(value, Mapping) and of == (Any,):
            return False
        return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if origin in (Mapping, dict, Iterator):
        return isinstance(value, origin)
    return True


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return (torch is not None and isinstance(value, torch.Tensor)) or type(value).__name__ == "ndarray"


def name_of(hint: Any) -> str:
    """The type in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(name_of(kind) for kind in get_args(hint)))
    if hint is None or hint is NoneType:
        return "None"
    if isinstance(hint, TypeVar) and hint.__bound__ is not None:
        return name_of(hint.__bound__)
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        return _CONTAINERS.get(name, name)
    if getattr(hint, "__module__", "").startswith("torch.nn"):
        return f"a torch.nn.{hint.__name__}"
    return str(getattr(hint, "__name__", hint))
