"""The machine of a measurement: CPU, instruction sets, package versions, code revision and memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pydantic import Field

from bitwright.core import __version__
from bitwright.core.schemas import ResultModel

DATA_VARIABLE = "BITWRIGHT_DATA"
"""The environment variable that names the folder of reference data sets."""
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
    "ai-edge-litert",
    "safetensors",
    "pydantic",
    "scikit-learn",
)
# Features that determine the speed and the rounding of 8-bit products.
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve")

#: The variables that limit the instruction sets of torch's own kernels and of oneDNN's, and the names that they use.
TORCH_VARIABLE, ONEDNN_VARIABLE = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"
_ONEDNN_NAMES = {"AVX512": "AVX512_CORE"}
_NARROW_TO_WIDE = ("DEFAULT", "AVX2", "AVX512")


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


class Machine(Environment):
    """The environment, with everything that changes the last bits of a result.

    The width of vectors determines the order in which sums are added.
    """

    isa: str | None = Field(default=None, description="The instruction set of torch's kernels: AVX2, AVX512, …")
    onednn_isa: str | None = Field(default=None, description=f"{ONEDNN_VARIABLE}, if it was set.")
    revision: str | None = Field(
        default=None, description="The commit of Bitwright's git repository; +changes: with uncommitted changes."
    )

    @property
    def instructions(self) -> tuple[str, str]:
        """The instruction sets of torch's and of oneDNN's kernels; by default the best of the CPU."""
        best = next((name for name in ("AVX512", "AVX2") if _feature(name) in self.cpu_features), "DEFAULT")
        asked = (self.onednn_isa or "ALL").upper()
        limits = {"AVX512": "AVX512", "AVX2": "AVX2", "AVX": "DEFAULT", "SSE41": "DEFAULT"}
        limit = next((kind for name, kind in limits.items() if asked.startswith(name)), best)
        return self.isa or best, min(best, limit, key=_NARROW_TO_WIDE.index)


def machine() -> Machine:
    """This machine, as this process uses it."""
    return Machine(
        **environment().model_dump(),
        isa=torch.backends.cpu.get_cpu_capability(),
        onednn_isa=os.environ.get(ONEDNN_VARIABLE),
        revision=revision(),
    )


def other_instructions(was: Machine, now: Machine) -> str | None:
    """How to get the same last digits as on the machine `was`. None if this machine already gives them."""
    wanted, here = was.instructions, now.instructions
    if wanted == here:
        return None
    needed = max(wanted, key=_rank)
    if needed != "DEFAULT" and _feature(needed) not in now.cpu_features:
        return f"it ran with {needed}, which this CPU does not have: the last digits can differ here"
    names = f"{TORCH_VARIABLE}={wanted[0].lower()} {ONEDNN_VARIABLE}={_ONEDNN_NAMES.get(wanted[1], wanted[1])}"
    return f"it ran with other instructions ({_words(wanted)}; here {_words(here)}): set {names}"


def _words(instructions: tuple[str, str]) -> str:
    return " and ".join(dict.fromkeys(instructions))


def _rank(name: str) -> int:
    return _NARROW_TO_WIDE.index(name) if name in _NARROW_TO_WIDE else -1


def _feature(name: str) -> str:
    return {"AVX512": "avx512f", "AVX2": "avx2"}.get(name, name)


@cache
def revision() -> str | None:
    """The commit of the package's own repository; None if it was installed from a wheel."""
    package = Path(__file__).parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:  # the repository of another project
        return None
    commit = _git(package, "rev-parse", "--short=12", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return commit if commit is None or not changed else f"{commit}+changes"


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name."""
    return _cpu()[0]


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


def resident_bytes() -> int:
    """Resident bytes of this process; 0 if unknown."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Peak resident bytes of this process; 0 if unknown."""
    return _status("VmHWM")


def reset_peak_memory() -> bool:
    """Release free memory and reset the peak counter of this process; return False if that is impossible.

    Otherwise, free heap blocks would count in the next measurement, or a higher earlier peak would hide its peak.
    """
    gc.collect()
    with suppress(AttributeError, OSError):  # the C library isn't glibc
        ctypes.CDLL(None).malloc_trim(0)
    return reset_peak()


def reset_peak() -> bool:
    """Reset the peak counter of this process; return False if that is impossible."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return peak_resident_bytes() > 0


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration):
        return 0


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


@contextmanager
def quiet(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Raise the level of these loggers, and of their descendants that set their own level, to `level`."""
    below = [name for name in logging.Logger.manager.loggerDict if name.startswith(tuple(f"{one}." for one in names))]
    loggers = [logging.getLogger(name) for name in names]
    loggers += [one for name in below if (one := logging.getLogger(name)).level]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)
