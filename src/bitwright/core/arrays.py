"""Read arrays, tensors and images from files. Damaged files raise a clear error; sizes are limited."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bitwright.core.documents import MOST_EXPANDED, regular
from bitwright.core.errors import BitwrightError, WorkloadError, did_you_mean, shortened

__all__ = ["npz_names", "read_npz", "read_picture", "read_tensors"]

_SMALL = 64 << 20
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
