"""What is registered (`list`) and what works on this machine (`doctor`)."""

from __future__ import annotations

import inspect
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from bitwright.backends import backend
from bitwright.core.arguments import strict
from bitwright.core.display import Progress, Summarized, Table, phases
from bitwright.core.environment import DATA_VARIABLE, Environment, environment
from bitwright.core.errors import UnknownName, did_you_mean
from bitwright.core.formats import FLOATS, MINIFLOATS
from bitwright.core.registry import BACKENDS, KERNELS, RUNTIMES, Registry, registries
from bitwright.deployment import available_runtimes, saturates
from bitwright.importers.key_listing import TABLES
from bitwright.profiling import microbenchmarks

__all__ = ["KINDS", "Diagnosis", "Plugin", "Plugins", "diagnose", "list_plugins"]

#: Tried with torch 2.13 and Python 3.11; docs/runtimes.md has the details.
_NOT_OFFERED = {
    "tvm": {
        "tried": "apache-tvm 0.27.0.post1",
        "why": "reads QDQ files, but runs their convolutions in float32: no integer lowering",
    },
}
#: Extras for developing Bitwright.
_OWN = {"test", "lint", "bench", "docs", "examples"}


@dataclass(frozen=True, kw_only=True)
class RuntimeState:
    """A runtime on this machine."""

    version: str | None
    problem: str | None
    saturates: bool | None
    """Whether 8-bit products saturate; None if the runtime can't be used."""
    consequence: str

    def cells(self, name: str) -> tuple[object, ...]:
        """The row of a table."""
        exactness = {None: None, True: "saturates", False: "exact"}[self.saturates]
        return name, self.version or self.problem, exactness, self.consequence


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool other than a Python package."""

    tool: str
    found: str | None
    purpose: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Packages of an optional dependency."""

    extra: str
    found: dict[str, str]
    missing: list[str]

    @property
    def fix(self) -> str | None:
        """The command that installs the missing packages."""
        return f"pip install 'bitwright[{self.extra}]'" if self.missing else None


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Summarized):
    """The result of `diagnose`."""

    environment: Environment
    runtimes: dict[str, RuntimeState]
    kernels: list[microbenchmarks.KernelSpeed]
    tools: list[Tool]
    extras: list[Extra]

    def failures(self) -> list[str]:
        """Nothing can be checked without a runtime."""
        usable = any(state.problem is None for state in self.runtimes.values())
        return [] if usable else ["no runtime can be used: artefacts can be written, but not checked"]

    def summary(self) -> Iterator[Table]:
        """One table for each part."""
        found = self.environment
        machine = [
            ("bitwright", found.bitwright),
            ("python", found.python),
            ("machine", f"{found.cpu} ({found.platform})"),
            ("CPU features", ", ".join(found.cpu_features) or "none known"),
            ("cores, threads", f"{found.cores} cores, torch uses {found.threads}"),
            *found.packages.items(),
        ]
        yield Table(["", ""], machine, title="Environment")
        heads = ["runtime", "version", "u8 × s8", "consequence"]
        yield Table(heads, [state.cells(name) for name, state in self.runtimes.items()], title="Runtimes")
        speeds = [(one.kernel, one.problem or _works(one.kernel), _speed(one)) for one in self.kernels]
        layer = f"a linear layer of {microbenchmarks.WIDTH} × {microbenchmarks.WIDTH}, batch {microbenchmarks.BATCH}"
        title = f"Kernels, in {layer}, forward and backward, CPU time"
        yield Table(["kernel", "works here", "#time of FP32"], speeds, title=title)
        tools = [(one.tool, one.found or "no", one.purpose, None if one.found else one.fix) for one in self.tools]
        yield Table(["tool", "found", "for", "fix"], tools, title="Tools and data")
        extras = [
            (
                one.extra,
                ", ".join(f"{package} {version}" for package, version in one.found.items()) or "–",
                ", ".join(one.missing) or "–",
                one.fix or "complete",
            )
            for one in self.extras
        ]
        yield Table(["extra", "found", "missing", "install"], extras, title="Extras")
        others = [(name, facts["tried"], facts["why"]) for name, facts in _NOT_OFFERED.items()]
        title = "Runtimes that Bitwright can't use (docs/runtimes.md)"
        yield Table(["not offered", "tried", "why"], others, title=title)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "environment": self.environment.model_dump(),
            "runtimes": {name: asdict(state) for name, state in self.runtimes.items()},
            "kernels": [speed.to_dict() for speed in self.kernels],
            "tools": [asdict(one) for one in self.tools],
            "extras": [{**asdict(one), "fix": one.fix} for one in self.extras],
            "not_offered": _NOT_OFFERED,
        }


@strict
def diagnose(*, progress: Progress | None = None) -> Diagnosis:
    """Examine this machine. Runtimes are probed for the exactness of 8-bit products; kernels are timed against FP32.

    >>> diagnose().runtimes["onnxruntime"].problem is None
    True
    """
    begin, found = phases(progress), environment()
    begin("probing the runtimes")
    runtimes = {name: _runtime(name, reason, found.packages) for name, reason in available_runtimes().items()}
    begin("timing the kernels")
    kernels = microbenchmarks.kernel_speeds()
    return Diagnosis(environment=found, runtimes=runtimes, kernels=kernels, tools=_tools(), extras=_extras())


def _works(kernel: str) -> str:
    engine = KERNELS.get(kernel).engine(torch.device("cpu"))
    return "yes" if engine is None else f"yes, in {engine}"


def _speed(speed: microbenchmarks.KernelSpeed) -> str | None:
    if speed.of_float is None:
        return speed.doubt
    return f"{speed.of_float:.2f}" + (": slower" if speed.of_float > 1.05 else "")


def _runtime(name: str, problem: str | None, packages: dict[str, str]) -> RuntimeState:
    if problem is not None:
        unchecked = "artefacts aren't checked on it"
        return RuntimeState(version=None, problem=problem, saturates=None, consequence=unchecked)
    lossy = saturates(name)
    version = packages.get({"inductor": "torch", "litert": "ai-edge-litert", "llamacpp": "xllamacpp"}.get(name, name))
    return RuntimeState(version=version, problem=None, saturates=lossy, consequence=_consequence(name, lossy=lossy))


def _consequence(runtime: str, *, lossy: bool) -> str:
    if RUNTIMES.get(runtime).decoders_only:
        return "only language models"
    if not lossy:
        return "8-bit weights use their full range"
    tables = [table for table in map(backend, BACKENDS.names()) if table.runtime == runtime]
    names = ", ".join(f"{table.name} ({table.guard.name})" for table in tables if table.guard is not None)
    if not names:
        return "8-bit sums may saturate: prefer another runtime"
    return f"plans guard 8-bit weights for {names}; use --no-saturating if another machine runs the model"


def _tools() -> list[Tool]:
    compilers = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    launcher = shutil.which("torchrun") or ("python -m torch.distributed.run" if gloo else None)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    said = os.environ.get(DATA_VARIABLE)
    folder = None if said is None else Path(said)
    sets = [] if folder is None or not folder.is_dir() else sorted(one.name for one in folder.iterdir() if one.is_dir())
    torch_fix = "install a torch with torch.distributed"
    rows = [
        ("C++ compiler", compiler, "runtime inductor, --fuse, --compile", "install g++ or clang++, or set CXX"),
        ("torchrun", launcher, "training on several processes", torch_fix),
        ("gloo", "in torch" if gloo else None, "processes on CPUs", torch_fix),
        ("accelerator", None if accelerator is None else str(accelerator), "training on it", "none: CPU is used"),
        (
            f"data ({DATA_VARIABLE})",
            ", ".join(sets) or None,
            "workloads on real data",
            f"set {DATA_VARIABLE} to a folder with cifar10/, imagenet-val/ or fashion-mnist/",
        ),
    ]
    return [Tool(tool=tool, found=found, purpose=purpose, fix=fix) for tool, found, purpose, fix in rows]


def _extras() -> list[Extra]:
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
    found = []
    for name, packages in wanted.items():
        versions = {package: version for package in packages if (version := _version(package)) is not None}
        found.append(Extra(extra=name, found=versions, missing=[one for one in packages if one not in versions]))
    return found


def _version(package: str) -> str | None:
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return None


_FORMATS, _IMPORTERS = "formats", "importers"
KINDS = (*registries(), _FORMATS, _IMPORTERS)
"""What can be listed."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A registered object."""

    name: str
    about: str
    problem: str | None = None
    """Why it doesn't work here."""


@dataclass(frozen=True)
class Plugins(Summarized):
    """Registered objects by kind."""

    kinds: dict[str, list[Plugin]]

    def summary(self) -> Iterator[Table]:
        """One table for each kind."""
        for kind, found in self.kinds.items():
            yield Table([kind, "about", "works here"], [(one.name, one.about, one.problem or "yes") for one in found])

    def to_dict(self) -> dict[str, Any]:
        """All of them as plain data."""
        return {kind: [asdict(one) for one in found] for kind, found in self.kinds.items()}


@strict
def list_plugins(kinds: Sequence[str] = KINDS) -> Plugins:
    """List quantizers, observers, backends, runtimes and other plugins, and whether they work here.

    >>> [plugin.name for plugin in list_plugins(["planners"]).kinds["planners"]][:2]
    ['batches', 'fastest']
    """
    known = registries()
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName("unknown kind", value=kind, fix=did_you_mean(kind, KINDS), code="unknown-name")
    others = {_FORMATS: _formats, _IMPORTERS: _importers}
    return Plugins({kind: list(others[kind]() if kind in others else _entries(known[kind])) for kind in kinds})


def _entries(registry: Registry) -> Iterator[Plugin]:
    for name in registry.names():
        about, problem = "", None
        try:
            found = registry.get(name)
            about = found().title if registry is BACKENDS else (inspect.getdoc(found) or "").partition("\n")[0]
            problem = _problem(registry, found)
        except Exception as error:  # a plugin that can't be imported must not hide the others
            problem = f"{type(error).__name__}: {error}"
        yield Plugin(name=name, about=about, problem=problem)


def _problem(registry: Registry, found: Any) -> str | None:
    """Workloads are not loaded for this, because loading one may train for hours."""
    if registry is RUNTIMES:
        reason: str | None = found.missing()
        return reason
    if registry is BACKENDS:
        runtime = found().runtime
        if runtime is None:
            return "plans and artefacts only; no runtime to check them on"
        return None if runtime in RUNTIMES and RUNTIMES.get(runtime).missing() is None else f"no {runtime} here"
    return None


def _importers() -> Iterator[Plugin]:
    for name, (title, _) in TABLES.items():
        yield Plugin(name=name, about=f"{title}; list_keys({name!r}) or `bitwright list importers {name}`: its keys")


def _formats() -> Iterator[Plugin]:
    for name, about in {
        "float": "left as the model has it",
        "intB, uintB": "integers of B = 2 to 16 bits, e.g. int8/channel/sym, uint8/tensor/asym",
        "…/tensor, …/channel, …/groupN": "one scale for all, per channel, or per N elements",
        "…/sym, …/asym": "zero point 0, or any",
        "…/pot, …/narrow, …/adasign": "power-of-two scale; ±127; unsigned where nothing is negative",
        "…/full": "weights: signed scales with which the largest value gets the lowest code",
    }.items():
        yield Plugin(name=name, about=about)
    for name, numbers in MINIFLOATS.items():
        block = "blocks of 32 share a power of two" if name.startswith("mx") else "a scale per tensor, channel or group"
        yield Plugin(name=name, about=f"floating point of {numbers.bits} bits, simulated; {block}")
    for name, bits in FLOATS.items():
        if name != "float":
            problem = "this version doesn't simulate it"
            yield Plugin(name=name, about=f"floating point of {bits} bits", problem=problem)
