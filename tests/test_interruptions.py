"""Interrupted and killed runs end as unbroken ones: no work is lost, none is repeated (`interruptions.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "support" / "interruptions.py"


def interrupted(kills: int, terms: int, ints: int, folder: Path, timeout: float, *options: str) -> None:
    command = [sys.executable, str(SCRIPT), f"--kills={kills}", f"--terms={terms}", f"--ints={ints}", "--json"]
    ran = subprocess.run(
        [*command, f"--folder={folder}", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=timeout,
    )
    assert ran.stdout, ran.stderr[-3000:]
    for found in json.loads(ran.stdout.splitlines()[-1]):
        assert found["sent"] == {"SIGKILL": kills, "SIGTERM": terms, "SIGINT": ints}
        assert found["repeated"] == [], found["command"]
        assert found["problems"] == [], found["command"]


@pytest.mark.timeout(600)
def test_commands_interrupted_a_few_times(tmp_path: Path) -> None:
    interrupted(1, 1, 1, tmp_path, 590, "--commands=quantize,train")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_command_interrupted_forty_times(tmp_path: Path) -> None:
    interrupted(20, 10, 10, tmp_path, 3590)
