"""Where rows ran: instructions and revision, and what to set for the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitwright.core.environment import Machine, machine, other_instructions, revision

ROOT = Path(__file__).parents[2]


def of(*features: str, isa: str | None = None, onednn: str | None = None) -> Machine:
    return machine().model_copy(update={"cpu_features": features, "isa": isa, "onednn_isa": onednn})


def test_other_vector_widths_give_the_variables_to_set() -> None:
    old, new = of("avx2"), of("avx2", "avx512f", isa="AVX512")
    assert old.instructions == ("AVX2", "AVX2")  # as told by the CPU where a file is older than the record
    assert new.instructions == ("AVX512", "AVX512")
    told = other_instructions(old, new)
    assert told is not None
    assert "set ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" in told
    assert other_instructions(old, of("avx2", "avx512f", isa="AVX2", onednn="AVX2")) is None
    half = other_instructions(old, of("avx2", "avx512f", isa="AVX2"))  # oneDNN's convolutions are still wider
    assert half is not None
    back = other_instructions(new, of("avx2", "avx512f", isa="AVX2", onednn="AVX2"))
    assert "ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE" in str(back)
    assert "AVX512, which this CPU does not have" in str(other_instructions(new, old))


@pytest.mark.parametrize(("asked", "kind"), [("ALL", "AVX512"), ("AVX512_CORE", "AVX512"), ("SSE41", "DEFAULT")])
def test_onednn_limits_are_mapped_to_instruction_sets(asked: str, kind: str) -> None:
    assert of("avx2", "avx512f", isa="AVX2", onednn=asked).instructions == ("AVX2", kind)


def test_environment_variables_are_recorded() -> None:
    code = "from bitwright.core.environment import machine as m; print(m().instructions, m().onednn_isa, m().isa)"
    narrow = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **narrow}, capture_output=True, text=True, check=True
    )
    assert "'DEFAULT') SSE41" in done.stdout
    assert "AVX" not in done.stdout.replace("NO AVX", "")


def test_the_revision_is_that_of_the_package() -> None:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        head = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a git repository")
    found = revision()
    assert found is not None
    assert head.startswith(found.removesuffix("+changes"))
    assert machine().revision == found


def test_make_leaderboard_pins_the_instructions() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rule = text.partition("\nleaderboard:")[2].partition("\nclean:")[0]
    assert rule
    assert "leaderboard: export ATEN_CPU_CAPABILITY := avx2" in text
    assert "leaderboard: export ONEDNN_MAX_CPU_ISA := AVX2" in text
