"""What a shell offers for a value: the names that are registered, plugins included. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bitwright.core.registry import (
    ARTEFACTS,
    BACKENDS,
    INDICATORS,
    KERNELS,
    OBSERVERS,
    PLANNERS,
    QUANTIZERS,
    RUNTIMES,
    STEPS,
    STRATEGIES,
    WORKLOADS,
    Registry,
)

Completer = Callable[[str], list[str]]

#: Options and arguments by their longest name; the shell itself completes files.
_REGISTRIES: dict[str, Registry] = {
    "WORKLOAD": WORKLOADS,
    "CONFIG|WORKLOAD": WORKLOADS,
    "--workload": WORKLOADS,
    "--backend": BACKENDS,
    "--observer": OBSERVERS,
    "--weight-observer": OBSERVERS,
    "--quantizer": QUANTIZERS,
    "--weight-quantizer": QUANTIZERS,
    "--step": STEPS,
    "--strategy": STRATEGIES,
    "--indicator": INDICATORS,
    "--formats": KERNELS,
    "--kernel": KERNELS,
    "--planner": PLANNERS,
    "--runtime": RUNTIMES,
    "--runtimes": RUNTIMES,
    "--artefact": ARTEFACTS,
}
_WORDS = {
    "--quantize": ["int8", "int4", "w4a8"],
    "--precision": ["int8", "int4", "w4a8"],
    "--amp": ["bf16", "fp16"],
    "--clock": ["wall", "cpu"],
    "--fold": ["-1", "0", "1", "2", "3", "4"],
}


def completer(names: Sequence[str], choices: Sequence[str] | None) -> Completer | None:
    """How a value is completed; None leaves it to the shell, which knows files."""
    known = next((_REGISTRIES[name] for name in names if name in _REGISTRIES), None)
    words = choices or next((_WORDS[name] for name in names if name in _WORDS), None)
    if known is None and words is None:
        return None

    def complete(incomplete: str) -> list[str]:
        if known is None:
            return list(words or ())
        return [*known.names(), *(_functions(incomplete) if known is WORKLOADS else ())]

    return complete


def _functions(begun: str) -> Iterator[str]:
    """Python files as far as a colon, and then their functions: the text is looked at, not imported."""
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
