"""What `bitwright doctor` shows besides runtimes and kernels: tools, data and optional packages."""

from __future__ import annotations

import os
import re
import shutil
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from bitwright.zoo.data import DATA_VARIABLE

_Row = dict[str, Any]
#: Extras for developing Bitwright.
_OWN = {"test", "lint", "bench", "docs", "examples"}


def tools() -> list[_Row]:
    """Tools other than Python packages, and what they are for."""
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


def _tool(name: str, found: str | None, purpose: str, fix: str) -> _Row:
    return {"tool": name, "found": found, "for": purpose, "fix": None if found else fix}


def data() -> _Row:
    """The folder of reference data sets."""
    said = os.environ.get(DATA_VARIABLE)
    folder = None if said is None else Path(said)
    sets = [] if folder is None or not folder.is_dir() else sorted(one.name for one in folder.iterdir() if one.is_dir())
    found = f"{', '.join(sets)}" if sets else None
    fix = f"set {DATA_VARIABLE} to a folder with cifar10/, imagenet-val/ or fashion-mnist/"
    return _tool(f"data ({DATA_VARIABLE})", found, "workloads on real data", fix)


def extras() -> list[_Row]:
    """Optional dependencies: installed and missing packages, and the command that installs them."""
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
