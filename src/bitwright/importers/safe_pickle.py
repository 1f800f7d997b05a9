"""Read data from a pickle: numbers, texts, lists, dictionaries, and NumPy's scalars and object arrays.

Unpickling can call any function. Here it can only call the stand-ins below, which build plain values.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.core.documents import read_bytes
from bitwright.core.errors import BitwrightError

_MOST_BYTES = 64 << 20
_FIX = "save the data as JSON or YAML; only numbers, texts, lists, dictionaries and NumPy's object arrays are read"
# Opcodes that create other objects, or allocate memory before they read it.
_REFUSED = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
_REFUSED |= {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}


class _Function:
    """A function that a pickle may call. A state that the pickle tries to set is refused."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("sets the state of a function")


class _Dtype:
    __slots__ = ("name", "order")

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.order = str(name), "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


class _ObjectArray:
    __slots__ = ("items",)

    def __init__(self, *_: Any) -> None:
        self.items: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.items = state[-1]


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    if re.fullmatch(r"b1|[iu][1248]|f[248]", dtype.name) is None:
        raise pickle.UnpicklingError(f"has a scalar of type {dtype.name[:20]!r}")
    return np.frombuffer(data, np.dtype(f"{dtype.order}{dtype.name}"))[0].item()


_FUNCTIONS = {
    "numpy.dtype": _Function(_Dtype),
    "numpy.ndarray": _Function(_ObjectArray),
    "_codecs.encode": _Function(lambda text, *_: text.encode("latin-1")),  # bytes in protocols 0 to 2
    **{f"{module}.bytes": _Function(lambda: b"") for module in ("builtins", "__builtin__")},
    **{f"numpy.{core}.multiarray._reconstruct": _Function(_ObjectArray) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _Function(_scalar) for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes, where: str) -> None:
        super().__init__(io.BytesIO(raw))
        self.where = where

    def find_class(self, module: str, name: str) -> _Function:
        found = _FUNCTIONS.get(f"{module}.{name}")
        if found is None:
            what = "the pickle calls a function that is not data"
            raise BitwrightError(what, where=self.where, value=f"{module}.{name}", fix=_FIX, code="unsafe-pickle")
        return found


def read_pickle(raw: bytes, where: str) -> Any:
    """The value of a pickle; NumPy's scalars become Python numbers."""
    _check_opcodes(raw, where)
    value = _Unpickler(raw, where).load()
    return value.items if isinstance(value, _ObjectArray) else value


def _check_opcodes(raw: bytes, where: str) -> None:
    """Refuse opcodes that create other objects, and uses of the memo that need unbounded memory or time."""
    tuples: set[Any] = set()
    previous, count = "", 0
    for opcode, argument, _ in pickletools.genops(raw):
        name = opcode.name
        wrong = name if name in _REFUSED else ""
        if name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            index = count if argument is None else argument
            count += 1
            if index > len(raw):  # the memo is a list: a large index allocates as many entries
                wrong = f"{name} {index}"
            if previous.startswith("TUPLE"):
                tuples.add(index)
        elif name in ("GET", "BINGET", "LONG_BINGET") and argument in tuples:
            wrong = f"{name} of a tuple"  # the hash of a tuple of shared tuples takes exponential time
        if wrong:
            what = "the pickle does more than hold data"
            raise BitwrightError(what, where=where, value=wrong, fix=_FIX, code="unsafe-pickle")
        previous = name


def load_npy(path: str | Path) -> Any:
    """The content of an .npy file. An object array without axes gives its only value."""
    try:
        return _load(Path(path))
    except BitwrightError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors, in NumPy and in pickle
        text = " ".join(str(error).split()) or type(error).__name__
        fix = "give a file that numpy.save wrote"
        raise BitwrightError(f"can't be read: {text[:200]}", where=str(path), fix=fix, code="damaged-file") from error


def _load(path: Path) -> Any:
    raw = read_bytes(path, what="the mapper", fix="give a file that numpy.save wrote", most=_MOST_BYTES)
    with io.BytesIO(raw) as file:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
        if not dtype.hasobject:
            if prod(shape) * dtype.itemsize > len(raw):
                raise ValueError(f"the shape {shape} needs more numbers than the file has")
            file.seek(0)
            return np.load(file, allow_pickle=False)
        value = read_pickle(file.read(), str(path))
    return value[0] if shape == () and isinstance(value, list) and len(value) == 1 else value
