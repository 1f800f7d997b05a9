"""Shell completion of registered names, including those of plugins, without importing torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from typer.models import OptionInfo

from bitwright.core.registry import WORKLOADS, registries

Completer = Callable[[str], list[str]]

#: The kind of registered names, by the name of the option or argument.
_KINDS = {
    "WORKLOAD": "workloads",
    "CONFIG|WORKLOAD": "workloads",
    "--workload": "workloads",
    "--backend": "backends",
    "--observer": "observers",
    "--weight-observer": "observers",
    "--quantizer": "quantizers",
    "--weight-quantizer": "quantizers",
    "--step": "steps",
    "--strategy": "strategies",
    "--indicator": "indicators",
    "--formats": "kernels",
    "--kernel": "kernels",
    "--planner": "planners",
    "--runtime": "runtimes",
    "--runtimes": "runtimes",
    "--artefact": "artefacts",
}
_WORDS = {
    "KIND": [*registries(), "formats"],
    "--precision": ["int8", "int4", "w4a8", "w4a16", "w8a16", "w8a8-dynamic", "w4a8-dynamic", "fp8", "qsync-int8"],
    "--amp": ["bf16", "fp16"],
    "--clock": ["wall", "cpu"],
    "--fold": ["-1", "0", "1", "2", "3", "4"],
}


#: What a value is, in help texts.
_METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}


def add_completion(parameter: inspect.Parameter) -> None:
    """Complete the values of an option or argument, and name their kind in help texts."""
    kind, *given = get_args(parameter.annotation)
    info = given[0]
    if isinstance(info, OptionInfo):
        names = [*(info.param_decls or ()), f"--{parameter.name.replace('_', '-')}"]
    else:
        names = [info.metavar or parameter.name.upper()]
    inner = _inner(kind)
    if info.metavar is None and inner in _METAVARS:
        info.metavar = _METAVARS[inner]
    if info.autocompletion is None:
        info.autocompletion = _completer(names)


def _inner(kind: Any) -> Any:
    """The type of one value: str of `list[str] | None`."""
    while arguments := get_args(kind):
        kind = next(one for one in arguments if one is not type(None))
    return kind


def _completer(names: Sequence[str]) -> Completer | None:
    """None leaves the completion to the shell, which knows files."""
    known = next((registries()[_KINDS[name]] for name in names if name in _KINDS), None)
    words = next((_WORDS[name] for name in names if name in _WORDS), None)
    if known is None and words is None:
        return None

    def complete(incomplete: str) -> list[str]:
        found = list(words or ()) if known is None else known.names()
        if known is WORKLOADS:
            found = [*found, *_functions(incomplete)]
        return [name for name in found if name.startswith(incomplete)]

    return complete


def _functions(begun: str) -> Iterator[str]:
    """Functions of Python files, as file.py:function. The files are read, not imported."""
    path, colon, _ = begun.partition(":")
    if colon:
        yield from (f"{path}:{name}" for name in _defined(Path(path)))
        return
    folder = Path(path).parent if not path.endswith("/") else Path(path)
    for file in sorted(folder.glob("*.py")):
        yield from (f"{file}:{name}" for name in _defined(file))


def _defined(file: Path) -> Iterator[str]:
    if file.suffix == ".py" and file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("def ") and not line.startswith("def _"):
                yield line[4:].partition("(")[0].strip()
