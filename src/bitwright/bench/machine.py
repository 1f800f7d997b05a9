"""Where a row ran, down to what changes its last bits: the width of vectors, and the revision of the code."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import torch
from pydantic import Field

from bitwright.core.environment import Environment, environment

#: What torch's own kernels and those of oneDNN obey, and how each spells a set of instructions.
TORCH_VARIABLE, ONEDNN_VARIABLE = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"
_ONEDNN_NAMES = {"AVX512": "AVX512_CORE"}
_NARROW_TO_WIDE = ("DEFAULT", "AVX2", "AVX512")


class Machine(Environment):
    """The machine of a row. Sums are added in another order where vectors have another width."""

    isa: str | None = Field(default=None, description="What torch's kernels were chosen for: AVX2, AVX512, …")
    onednn_isa: str | None = Field(default=None, description=f"{ONEDNN_VARIABLE}, where it was set.")
    revision: str | None = Field(
        default=None, description="Of Bitwright's git repository; +changes: files weren't as committed."
    )

    @property
    def instructions(self) -> tuple[str, str]:
        """Sets of instructions of torch's and of oneDNN's kernels; by the CPU where nothing else was said."""
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
    """What to do so that a row of the machine `was` comes out the same here; None: nothing."""
    wanted, here = was.instructions, now.instructions
    if wanted == here:
        return None
    needed = max(wanted, key=_rank)
    if needed != "DEFAULT" and _feature(needed) not in now.cpu_features:
        return f"it ran with {needed}, which this CPU hasn't: its last digits can't come out the same here"
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
    """The commit of the package's own repository; None where it was installed from elsewhere."""
    package = Path(__file__).parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:  # a repository around, but not ours
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
