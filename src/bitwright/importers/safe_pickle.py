"""Values inside a pickle, read without running it: numbers, texts, containers, and NumPy's arrays of them.

A pickle is a program that may call anything. Here only its building blocks are followed. Whatever it would call is kept
as a name with arguments; calls that NumPy's own files have are understood, all others are refused by name.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bitwright.core.documents import read_bytes
from bitwright.core.errors import BitwrightError


@dataclass
class _Call:
    """Something that would have been called."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


_MARK = object()
_MOST_BYTES = 64 << 20
_ARRAYS = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
_SCALARS = {f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")}
_DTYPES = {"numpy.dtype"}
_BYTES = {"_codecs.encode", "__builtin__.bytes", "builtins.bytes"}  # how older protocols write bytes
_PLAIN = _ARRAYS | _SCALARS | _DTYPES | _BYTES | {"numpy.ndarray"}


def load_npy(path: str | Path) -> Any:
    """What an .npy file holds; of an object array of no axes, its one value."""
    try:
        return _loaded(Path(path))
    except BitwrightError:
        raise
    except Exception as error:  # a damaged file fails anywhere in NumPy's, pickletools' or this code
        words = " ".join(str(error).split()) or type(error).__name__
        fix = "give a file that numpy.save wrote"
        raise BitwrightError(f"can't be read: {words[:200]}", where=str(path), fix=fix) from error


def _loaded(path: Path) -> Any:
    raw = read_bytes(path, what="the mapper", fix="give a file that numpy.save wrote", most=_MOST_BYTES)
    with io.BytesIO(raw) as file:  # a file would make room for as many bytes as a damaged length says
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
        if not dtype.hasobject:
            if prod(shape) * dtype.itemsize > len(raw):
                raise ValueError(f"the shape {shape} needs more numbers than there are")
            file.seek(0)
            return np.load(file, allow_pickle=False)
        value = read_pickle(file, str(path))
    if isinstance(value, _Call) and value.name in _ARRAYS and isinstance(value.state, tuple):
        value = value.state[-1]
    return value[0] if shape == () and isinstance(value, list) and len(value) == 1 else value


def read_pickle(file: BinaryIO, where: str) -> Any:
    """The value at the end of the program."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == "STOP":
            break
        _step(opcode.name, argument, stack, memo, where)
    return _plain(stack[-1])


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any], where: str) -> None:
    if name in ("PROTO", "FRAME"):
        return
    if name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name]())
    elif argument is not None and name not in ("GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID"):
        stack.append(argument)
    elif name in _BUILDERS:
        _BUILDERS[name](stack, argument, where)
    else:
        fix = "only data is read, never run: save it as JSON or YAML where it was made"
        raise BitwrightError("this pickle does more than hold data", where=where, value=name, fix=fix)


def _popped(stack: list[Any]) -> list[Any]:
    """Everything above the last mark."""
    at = len(stack) - 1 - stack[::-1].index(_MARK)
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _named(stack: list[Any], name: str, where: str) -> None:
    if name not in _PLAIN:
        fix = "only numbers, texts, containers and NumPy's arrays are read; nothing was run"
        raise BitwrightError("this pickle would call something", where=where, value=name, fix=fix)
    stack.append(_Call(name))


def _global(stack: list[Any], argument: Any, where: str) -> None:
    _named(stack, str(argument).replace(" ", "."), where)


def _stack_global(stack: list[Any], argument: Any, where: str) -> None:
    name, module = stack.pop(), stack.pop()
    _named(stack, f"{module}.{name}", where)


def _reduce(stack: list[Any], argument: Any, where: str) -> None:
    arguments, function = stack.pop(), stack.pop()
    if function.name in _BYTES:
        stack.append(arguments[0].encode("latin-1") if arguments else b"")
        return
    stack.append(_plain(_Call(function.name, tuple(arguments))))


def _build(stack: list[Any], argument: Any, where: str) -> None:
    state = stack.pop()
    if isinstance(stack[-1], _Call):
        stack[-1].state = state


def _items(stack: list[Any], argument: Any, where: str) -> None:
    items = [_plain(item) for item in _popped(stack)]
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _item(stack: list[Any], argument: Any, where: str) -> None:
    value, key = stack.pop(), stack.pop()
    stack[-1][_plain(key)] = _plain(value)


def _append(stack: list[Any], argument: Any, where: str) -> None:
    item = stack.pop()
    stack[-1].append(_plain(item))


def _extend(stack: list[Any], argument: Any, where: str) -> None:
    items = _popped(stack)
    stack[-1].extend(_plain(item) for item in items)


def _dict(stack: list[Any], argument: Any, where: str) -> None:
    items = _popped(stack)
    stack.append(dict(zip(items[::2], items[1::2], strict=True)))


def _tuple(count: int) -> Callable[[list[Any], Any, str], None]:
    def build(stack: list[Any], argument: Any, where: str) -> None:
        items = tuple(stack[-count:])
        del stack[-count:]
        stack.append(items)

    return build


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_BUILDERS: dict[str, Callable[[list[Any], Any, str], None]] = {
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "SETITEM": _item,
    "SETITEMS": _items,
    "APPEND": _append,
    "APPENDS": _extend,
    "TUPLE": lambda stack, argument, where: stack.append(tuple(_popped(stack))),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "DICT": _dict,
    "LIST": lambda stack, argument, where: stack.append(_popped(stack)),
}


def _plain(value: Any) -> Any:
    """NumPy's scalars as numbers."""
    if isinstance(value, _Call) and value.name in _SCALARS and len(value.arguments) == 2:
        dtype, data = value.arguments
        order = ">" if isinstance(dtype.state, tuple) and dtype.state[1] == ">" else "<"
        return np.frombuffer(data, np.dtype(f"{order}{dtype.arguments[0]}"))[0].item()
    return value
