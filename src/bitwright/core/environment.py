"""The machine and the package versions of a measurement, and the memory allocator of this process."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import Field

from bitwright.core.documents import ResultModel
from bitwright.version import __version__

#: Packages that affect results; missing ones are left out.
PACKAGES = (
    "torch",
    "numpy",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "onnxruntime",
    "openvino",
    "executorch",
    "ncnn",
    "safetensors",
    "pydantic",
    "scikit-learn",
)
# Features that determine the speed and the rounding of 8-bit products.
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve")


class Environment(ResultModel):
    """Machine and versions of a measurement."""

    bitwright: str
    python: str
    platform: str
    cpu: str
    cpu_features: tuple[str, ...]
    cores: int
    threads: int = Field(description="Threads of torch.")
    packages: dict[str, str]


def environment() -> Environment:
    """This machine and this installation."""
    name, flags = _cpu()
    return Environment(
        bitwright=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=name,
        cpu_features=tuple(feature for feature in _FEATURES if feature in flags),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        packages={package: found for package in PACKAGES if (found := _version(package)) is not None},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> tuple[str, set[str]]:
    """The processor's name and flags; flags are only known on Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = names[1].strip() if names else platform.processor() or platform.machine()
    return name, set(flags[1].split()) if flags else set()


_TRIM, _PAD, _MMAP = -1, -2, -3  # mallopt constants
_LARGEST = 32 << 20  # the largest threshold that glibc accepts; larger blocks are still returned


@cache
def keep_freed_memory() -> bool:
    """Set glibc's thresholds so that this process keeps freed memory. Return False if the C library isn't glibc.

    glibc returns large blocks to the operating system as soon as they are free, and the kernel clears their pages on
    the next allocation. On a CPU, this takes a considerable and varying part of a training step, because glibc adjusts
    its thresholds at run time. Fixed thresholds make steps faster and their times reproducible.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(name, value) == 1 for name, value in ((_MMAP, _LARGEST), (_TRIM, 2**31 - 1), (_PAD, _LARGEST)))
