"""What `bitwright doctor` looks at beside the runtimes: kernels, tools, data, and extras that aren't installed."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

from bitwright.plan import ComputeSpec
from bitwright.registry import KERNELS
from bitwright.zoo.data import DATA_VARIABLE

Row = dict[str, Any]
_BATCH, _FEW, _WIDTH, _TURNS = 1024, 64, 768, 3
_HOPELESS = 4.0  # of FP32's time on few samples: not worth a longer look
LAYER = f"a linear layer of {_WIDTH} × {_WIDTH}, batch {_BATCH}"
#: For those who work on Bitwright itself.
_OWN = {"test", "lint", "bench", "docs", "examples"}


def kernels() -> list[Row]:
    """Each kernel of low-precision training: whether it runs here, and its time as a share of FP32's."""
    device = torch.device("cpu")
    x, weight, gradient = torch.randn(_BATCH, _WIDTH), torch.randn(_WIDTH, _WIDTH), torch.randn(_BATCH, _WIDTH)

    def step(run: Callable[..., Any], rows: int = _BATCH) -> float:
        own, other = x[:rows].clone().requires_grad_(), weight.clone().requires_grad_()
        start = time.process_time()
        torch.autograd.grad(run(F.linear, (own, other), {}), (own, other), gradient[:rows])
        return time.process_time() - start

    ways: dict[str, Callable[..., Any]] = {"float": lambda func, args, kwargs: func(*args, **kwargs)}
    rows: dict[str, Row] = {}
    few = min(step(ways["float"], _FEW) for _ in range(3))
    for name in KERNELS.names():
        try:
            kind = KERNELS.get(name)
            rows[name] = {"kernel": name, "problem": kind.missing(device), "of_float": None}
            if rows[name]["problem"] is None and "linear" in kind.kinds:
                run = kind(ComputeSpec(format=name, backward=("input", "weight")))
                step(run, 1)  # the first call compiles and packs
                rows[name]["of_float"] = step(run, _FEW) / few
                if rows[name]["of_float"] < _HOPELESS:
                    ways[name] = run
        except Exception as error:  # a plugin that can't be imported must not hide the others
            rows[name] = {"kernel": name, "problem": f"{type(error).__name__}: {error}", "of_float": None}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TURNS):  # by turns: a busy machine disturbs all alike
        for name, run in ways.items():
            times[name].append(step(run))
    for name in ways:
        if name != "float":
            rows[name]["of_float"] = min(times[name]) / min(times["float"])
    return list(rows.values())


def tools() -> list[Row]:
    """What is there beside Python packages, and what it is good for."""
    compiler = next((found for name in _compilers() if (found := shutil.which(name))), None)
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    launcher = shutil.which("torchrun") or ("python -m torch.distributed.run" if gloo else None)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [
        _tool("C++ compiler", compiler, "runtime inductor, --fuse, --compile", "install g++ or clang++, or set CXX"),
        _tool("torchrun", launcher, "training on several processes", "install a torch with torch.distributed"),
        _tool("gloo", "in torch" if gloo else None, "processes on CPUs", "install a torch with torch.distributed"),
        _tool("accelerator", None if accelerator is None else str(accelerator), "training on it", "none: CPU is used"),
        data(),
    ]


def _compilers() -> list[str]:
    return [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]


def _tool(name: str, found: str | None, purpose: str, fix: str) -> Row:
    return {"tool": name, "found": found, "for": purpose, "fix": None if found else fix}


def data() -> Row:
    """The folder of reference data sets."""
    said = os.environ.get(DATA_VARIABLE)
    folder = None if said is None else Path(said)
    sets = [] if folder is None or not folder.is_dir() else sorted(one.name for one in folder.iterdir() if one.is_dir())
    found = f"{', '.join(sets)}" if sets else None
    fix = f"set {DATA_VARIABLE} to a folder with cifar10/, imagenet-val/ or fashion-mnist/"
    return _tool(f"data ({DATA_VARIABLE})", found, "workloads on real data", fix)


def extras() -> list[Row]:
    """Optional parts: what each has and still lacks, with the line that installs it."""
    try:
        lines = metadata("bitwright").get_all("Requires-Dist") or []
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return []
    wanted: dict[str, list[str]] = {}
    for line in lines:
        package = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", line)
        if package and extra and extra[1] not in _OWN:
            wanted.setdefault(extra[1], []).append(package[0])
    rows = []
    for extra_name, packages in wanted.items():
        versions = {package: _installed(package) for package in packages}
        missing = [package for package, version in versions.items() if not version]
        found = {package: version for package, version in versions.items() if version}
        fix = f"pip install 'bitwright[{extra_name}]'" if missing else None
        rows.append({"extra": extra_name, "found": found, "missing": missing, "fix": fix})
    return rows


def _installed(package: str) -> str | None:
    """Its version."""
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return None
