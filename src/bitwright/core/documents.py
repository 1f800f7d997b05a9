"""Read files: YAML, JSON, gzip, arrays, tensors and images. `bitwright.core.schemas` validates documents.

All readers use this module. It limits the size, depth, aliases and numbers of a file, so that none can hang the process
or exhaust memory. Every problem in a file raises a `BitwrightError`.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import stat
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import AliasEvent

from bitwright.core.errors import BitwrightError, WorkloadError, did_you_mean, shortened, shortened_repr

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = [
    "gunzip",
    "name_problem",
    "npz_names",
    "parse_json",
    "parse_yaml",
    "read_bytes",
    "read_json",
    "read_npz",
    "read_picture",
    "read_settings",
    "read_tensors",
    "read_text",
    "read_yaml",
    "regular",
    "reject_other_kind",
]


ErrorType = type[BitwrightError]

MOST_BYTES = 256 << 20
"""The size limit of a JSON document."""
MOST_YAML = 32 << 20
MOST_DEPTH = 60
MOST_NODES = 1_000_000
"""The node limit of a YAML document, not counting nodes repeated by aliases."""
MOST_REPEATED = 100_000
"""The limit of nodes that aliases repeat in a YAML document."""
MOST_EXPANDED = 100
"""The limit of the expansion ratio of a large gzip stream. Traces and data sets have less than 30."""
_SMALL = 64 << 20  # expanded streams below this size have no ratio limit
_CHUNK = 1 << 20
_NO_WRITER, _SILENT = 1.0, 60.0  # timeouts in seconds for a pipe without a writer, and for one with a silent writer
_LARGEST = 2**64  # the limit of integers; traces contain unsigned 64-bit counters
_SURROGATE = re.compile("[\ud800-\udfff]")


def name_problem(name: str) -> str | None:
    """Why a string is not a valid file name; None if it is valid."""
    if not name or len(name.encode("utf-8", "replace")) > 120:
        return "a file name must have 1 to 120 bytes"
    if any(mark in name for mark in '/\\:*?"<>|') or not name.isprintable():
        return "a file name can't contain these characters"
    if name.startswith((".", "~", "-", " ")) or name.endswith((".", " ")):
        return "a file name can't start or end with these characters"
    return None


def read_bytes(
    path: str | Path,
    *,
    what: str = "the file",
    fix: str | None = None,
    error: ErrorType = BitwrightError,
    most: int = MOST_BYTES,
) -> bytes:
    """The contents of a file or pipe, up to `most` bytes."""
    found = bytearray()
    try:
        for chunk in _chunks(Path(path), what, fix, error):
            found += chunk
            if len(found) > most:
                raise error(
                    f"{what} is too large", where=str(path), value=f"more than {most} bytes", code="file-too-large"
                )
    except (OSError, ValueError) as cause:  # ValueError: a path with a zero byte
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise error(f"can't read {what}: {reason}", where=str(path), fix=fix, code="unreadable-file") from cause
    return bytes(found)


def regular(path: Path, *, what: str = "the file", fix: str | None = None, error: ErrorType = BitwrightError) -> Path:
    """The path, after checking that it is a regular file. For libraries that open the file themselves."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise error(f"can't read {what}: {reason}", where=str(path), fix=fix, code="unreadable-file") from cause
    if not stat.S_ISREG(mode):
        raise _special(mode, path, what, fix, error)
    return path


def _special(mode: int, path: Path, what: str, fix: str | None, error: ErrorType) -> BitwrightError:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a device")
    return error(f"can't read {what}: it is {kind}, not a file", where=str(path), fix=fix, code="not-a-file")


def _chunks(path: Path, what: str, fix: str | None, error: ErrorType) -> Iterator[bytes]:
    """Yield a file in chunks. Wait for a pipe as long as a writer may still send data."""
    mode = path.stat().st_mode
    pipe = stat.S_ISFIFO(mode) and hasattr(os, "O_NONBLOCK")
    if not pipe and not stat.S_ISREG(mode):
        raise _special(mode, path, what, fix, error)
    with open(os.open(path, os.O_RDONLY | (os.O_NONBLOCK if pipe else 0)), "rb", buffering=0) as file:  # noqa: PTH123
        waited, some = 0.0, False
        while True:
            chunk = file.read(_CHUNK)  # for a pipe: None if there is no data yet, empty if there is no writer
            if chunk:
                waited, some = 0.0, True
                yield chunk
            elif (some and chunk is not None) or not pipe:
                return
            elif waited >= (_NO_WRITER if chunk is not None else _SILENT):
                raise error(f"can't read {what}: the pipe sends no data", where=str(path), fix=fix, code="not-a-file")
            else:
                time.sleep(0.02)
                waited += 0.02


_KINDS_OF_FILES = {
    ".py": "Python code",
    ".onnx": "an ONNX model",
    ".safetensors": "a checkpoint",
    ".html": "a page",
    **dict.fromkeys((".pt", ".pth", ".tar", ".bin"), "a file of torch.save"),
}


def reject_other_kind(path: str | Path, *, what: str, fix: str, error: ErrorType = BitwrightError) -> None:
    """Raise if the suffix belongs to another kind of file, whose content would only be called damaged."""
    kind = _KINDS_OF_FILES.get(Path(path).suffix)
    if kind is not None and Path(path).is_file():
        raise error(f"this is not {what}, but {kind}", where=str(path), fix=fix, code="wrong-kind-of-file")


def read_text(
    path: str | Path,
    *,
    what: str = "the file",
    fix: str | None = None,
    error: ErrorType = BitwrightError,
    most: int = MOST_BYTES,
) -> str:
    """The text of a UTF-8 file without its byte-order mark."""
    return _decoded(read_bytes(path, what=what, fix=fix, error=error, most=most), path, what, fix, error)


def gunzip(raw: bytes, *, where: str, most: int, error: ErrorType = BitwrightError, fix: str | None = None) -> bytes:
    """Expand a gzip stream, up to `most` bytes. Stop early if its expansion ratio is too high."""
    found = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as stream:
            while chunk := stream.read(_CHUNK):
                found += chunk
                if len(found) > most or len(found) > max(_SMALL, MOST_EXPANDED * len(raw)):
                    raise error(
                        "the compressed file expands to more than the limit",
                        where=where,
                        value=f"more than {len(found) // len(raw)} times its size",
                        fix=fix,
                        code="file-too-large",
                    )
    except (OSError, EOFError, zlib.error) as cause:
        raise error(f"not a complete gzip file: {cause}", where=where, fix=fix, code="invalid-gzip") from cause
    return bytes(found)


def read_yaml(path: str | Path, *, what: str, fix: str | None = None, error: ErrorType = BitwrightError) -> Any:
    """The value of a YAML file."""
    text = read_text(path, what=what, fix=fix, error=error, most=MOST_YAML)
    return parse_yaml(text, where=str(path), error=error)


def read_json(
    path: str | Path,
    *,
    what: str,
    fix: str | None = None,
    error: ErrorType = BitwrightError,
    finite: bool = True,
) -> Any:
    """The value of a JSON file."""
    text = read_text(path, what=what, fix=fix, error=error)
    return parse_json(text, where=str(path), what=what, fix=fix, error=error, finite=finite)


def read_settings(path: Path, what: str, begin: str) -> dict[str, Any]:
    """The mapping in a YAML file. The error for other files names the content (`what`) and a first line (`begin`)."""
    data = read_yaml(path, what="the file", fix="give a YAML file")
    if not isinstance(data, dict):
        raise BitwrightError(
            f"{what} must be a mapping", where=str(path), value=data, fix=f"begin with `{begin}`", code="not-a-mapping"
        )
    return data


# YAML ------------------------------------------------------------------------


class _Composer(Composer):
    """Counts nodes, including those repeated by aliases: 400 bytes of nested aliases can expand to billions."""

    warn_double_anchors = False

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self._count = self._repeated = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.parser.peek_event().start_mark
        if self.parser.check_event(AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise ComposerError(None, None, "an alias is inside the value that it refers to", mark)
            self._count += self._sizes[id(node)]
            self._repeated += self._sizes[id(node)]
            if self._repeated > MOST_REPEATED:
                raise _Limit(None, None, "aliases repeat too much", mark)
            return node
        before = self._count
        self._count += 1
        if self._count - self._repeated > MOST_NODES:
            raise _Limit(None, None, "there are too many values", mark)
        node = super().compose_node(parent, index)
        self._sizes[id(node)] = self._count - before
        return node


class _Limit(ComposerError):
    """A document exceeds a limit."""


class _Constructor(SafeConstructor):
    """Constructs only types that JSON also has: strings, numbers, booleans, null, lists, mappings with string keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        mapping = super().construct_mapping(node, deep=deep)
        for key in mapping:
            if not isinstance(key, str):
                words = f"the key {shortened_repr(key, 80)} is not a string: write it in quotes"
                raise ConstructorError(None, None, words, node.start_mark)
        return mapping

    def construct_yaml_int(self, node: Any) -> Any:
        return self._number(node, super().construct_yaml_int)

    def construct_yaml_float(self, node: Any) -> Any:
        return self._number(node, super().construct_yaml_float)

    def _number(self, node: Any, construct: Callable[[Any], Any]) -> Any:
        value = construct(node) if len(node.value) <= 400 else math.inf
        if isinstance(value, int) and -_LARGEST < value < _LARGEST:
            return value
        if isinstance(value, float) and len(node.value) <= 400:
            return value
        raise ConstructorError(None, None, f"the number {shortened(node.value, 40)} is out of range", node.start_mark)

    def refused(self, node: Any) -> NoReturn:
        """Reject dates, sets and bytes, which no file model contains."""
        kind = str(node.tag).rpartition(":")[2]
        raise ConstructorError(None, None, f"a {kind} is not expected: write it in quotes", node.start_mark)


for _kind in ("int", "float"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(_Constructor, f"construct_yaml_{_kind}"))
for _kind in ("timestamp", "binary", "set", "omap", "pairs"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_kind}", _Constructor.refused)


def parse_yaml(text: str, *, where: str, error: ErrorType = BitwrightError, finite: bool = True) -> Any:
    """The value of a YAML text. `finite=False` allows `.inf` and `.nan`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor, yaml.max_depth = _Composer, _Constructor, MOST_DEPTH
    try:
        value = yaml.load(text)
    except MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        words, code = _yaml_words(cause)
        fix = "replace the tab with spaces" if "'\\t'" in words else "fix the file at this line"
        raise error(words, where=place, fix=fix, code=code) from cause
    except Exception as cause:  # ruamel's scanner and constructors also raise IndexError, ValueError, …
        words = shortened(" ".join(str(cause).split()) or type(cause).__name__)
        raise error(f"not valid YAML: {words}", where=where, fix="fix the file", code="invalid-yaml") from cause
    _check(value, where, error, finite=finite)
    return value


def _yaml_words(cause: MarkedYAMLError) -> tuple[str, str]:
    if isinstance(cause, DuplicateKeyError):
        key = str(cause.problem).partition('" with value "')[0].removeprefix('found duplicate key "')
        return f"not valid YAML: duplicate key {shortened(key, 80)!r}", "duplicate-key"
    code = "document-limit" if isinstance(cause, _Limit) or "maximum depth" in str(cause.problem) else "invalid-yaml"
    words = str(cause.problem or cause.context or "").partition(", if necessary")[0]
    return f"not valid YAML: {shortened(words, 400)}", code


# JSON ------------------------------------------------------------------------


def parse_json(
    text: str | bytes,
    *,
    where: str,
    what: str = "the file",
    fix: str | None = None,
    error: ErrorType = BitwrightError,
    finite: bool = True,
    strict: bool = True,
) -> Any:
    """The value of a JSON text.

    `finite=False` allows NaN and Infinity, which Python writes. `strict=False` is for large files of other programs: it
    allows duplicate keys and skips the search for values that can't be written.
    """
    if isinstance(text, bytes):
        text = _decoded(text, where, what, fix, error)
    hooks: dict[str, Any] = {"parse_int": _whole}
    if strict:
        hooks["object_pairs_hook"] = _distinct
    try:
        value = json.loads(text, **hooks)
    except RecursionError as cause:
        raise error(f"can't read {what}: nested too deeply", where=where, fix=fix, code="document-limit") from cause
    except json.JSONDecodeError as cause:
        place = f"{where}:{cause.lineno}:{cause.colno}"
        raise error(
            f"can't read {what}: not valid JSON: {cause.msg}", where=place, fix=fix, code="invalid-json"
        ) from cause
    except ValueError as cause:
        raise error(f"can't read {what}: not valid JSON: {cause}", where=where, fix=fix, code="invalid-json") from cause
    if strict:
        _check(value, where, error, finite=finite)
    return value


def _whole(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else _LARGEST
    if not -_LARGEST < value < _LARGEST:
        raise ValueError(f"the number {shortened(digits, 40)} is out of range")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {shortened(twice, 80)!r}")
    return found


# both ------------------------------------------------------------------------


def _decoded(raw: bytes, path: object, what: str, fix: str | None, error: ErrorType) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(
            f"can't read {what}: it is not UTF-8 text (byte {cause.start})",
            where=str(path),
            fix=fix,
            code="not-utf8",
        ) from cause


def _check(value: Any, where: str, error: ErrorType, *, finite: bool = True) -> None:
    """Reject deep nesting, strings that UTF-8 can't encode and numbers that JSON can't represent."""
    for place, found in _wrong(value, finite):
        if found is None:
            raise error("nested too deeply", where=where, code="document-limit")
        path = f"{where}, {place}" if place else where
        if isinstance(found, str):
            raise error("a string has a lone surrogate", where=path, value=found, code="invalid-text")
        raise error("a number is not finite", where=path, value=found, code="not-finite")


def _wrong(value: Any, finite: bool) -> Iterator[tuple[str, Any]]:
    stack: list[tuple[str, Any, int]] = [("", [value], -1)]
    while stack:
        place, parent, depth = stack.pop()
        if depth >= MOST_DEPTH:
            yield place, None
        for key, item in parent.items() if isinstance(parent, Mapping) else enumerate(parent):
            if isinstance(key, str) and not key.isascii() and _SURROGATE.search(key):
                yield place, key
            if isinstance(item, str):
                if not item.isascii() and _SURROGATE.search(item):
                    yield f"{place}.{key}".lstrip("."), item
            elif isinstance(item, float):
                if finite and not math.isfinite(item):
                    yield f"{place}.{key}".lstrip("."), item
            elif isinstance(item, dict | list):
                stack.append(("" if depth < 0 else f"{place}.{key}".lstrip("."), item, depth + 1))


_KINDS = "biuf"  # booleans, integers, floats
_MOST_PIXELS = 40_000_000


def npz_names(path: Path) -> list[str]:
    """The names of the arrays in an archive."""
    regular(path, what="the data", fix="give an .npz file", error=WorkloadError)
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception as error:  # zipfile raises several exception types, some of them undocumented
        raise _damaged(path, error, "give an .npz file") from error


def read_npz(path: Path, names: Sequence[str], *, fix: str = "give an .npz file") -> tuple[NDArray[Any], ...]:
    """The named arrays of an `.npz` archive, in this machine's byte order. Only numeric types are allowed."""
    known = npz_names(path)
    missing = [name for name in names if name not in known]
    if missing:
        what, near = "the file doesn't contain this array", did_you_mean(missing[0], known)
        raise WorkloadError(what, where=str(path), value=missing[0], fix=f"{near} {fix}", code="missing-array")
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(_member(archive, f"{name}.npy" if name not in archive.namelist() else name) for name in names)
    except Exception as error:  # NumPy and zipfile raise various exceptions for a damaged header
        raise _damaged(path, error, fix) from error


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read one array after comparing its header with the size stated in the archive."""
    import numpy as np

    info = archive.getinfo(name)
    if info.file_size > max(_SMALL, MOST_EXPANDED * info.compress_size):
        raise ValueError(f"{name} expands from {info.compress_size} to {info.file_size} bytes")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
        if dtype.kind not in _KINDS:
            raise ValueError(f"{name} has the non-numeric type {dtype}")
        if not shape or min(shape) < 0:
            raise ValueError(f"{name} has the shape {shape}")
        if prod(shape) * dtype.itemsize > info.file_size:
            raise ValueError(f"{name} is shorter than the {prod(shape)} numbers in its header")
    with archive.open(info) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def read_picture(path: Path) -> Any:
    """Read an image as RGB with Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise WorkloadError(
            "Pillow is required to read images", fix="pip install pillow", code="missing-package"
        ) from error
    fix = "give a JPEG, PNG or BMP file, or remove it"
    regular(path, what="the data", fix=fix, error=WorkloadError)
    try:
        with Image.open(path) as opened:
            if prod(opened.size) > _MOST_PIXELS or not prod(opened.size):
                raise ValueError(f"it has {opened.size[0]} × {opened.size[1]} pixels; the limit is {_MOST_PIXELS}")
            return opened.convert("RGB")
    except Exception as error:  # Pillow's decoders raise different types: OSError, SyntaxError, struct.error, …
        raise _damaged(path, error, fix) from error


def read_tensors(
    path: Path, *, fix: str, error: type[BitwrightError] = WorkloadError, what: str = "the file"
) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    from safetensors.torch import load_file

    regular(path, what=what, fix=fix, error=error)
    try:
        return load_file(path)
    except Exception as cause:  # safetensors, torch and the operating system raise different types
        words = shortened(" ".join(str(cause).split()) or type(cause).__name__)
        raise error(f"{what} can't be read: {words}", where=str(path), fix=fix, code="damaged-file") from cause


def _damaged(path: Path, error: BaseException, fix: str) -> WorkloadError:
    words = shortened(" ".join(str(error).split()) or type(error).__name__)
    return WorkloadError(f"can't read the data: {words}", where=str(path), fix=fix, code="damaged-file")
