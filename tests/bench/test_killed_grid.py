"""SIGKILL at any moment, several workers: every row once, and the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import optuna
import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "kill_a_grid.py"


def start(folder: Path, kills: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), str(kills)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(process: subprocess.Popen[str]) -> list[list[object]]:
    output, problem = process.communicate(timeout=600)
    assert process.returncode == 0, problem[-2000:]
    found: list[list[object]] = json.loads(output.splitlines()[-1])["rows"]
    return found


def outcomes(folder: Path) -> Counter[str]:
    study = optuna.load_study(study_name="small", storage=f"sqlite:///{folder / 'grid.db'}")
    return Counter(t.user_attrs["key"] for t in study.trials if "outcome" in t.user_attrs)


@pytest.mark.slow
def test_a_killed_grid_and_one_of_two_workers_end_as_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = rows(start(tmp_path / "unbroken", 0))
    assert [row[1] for row in unbroken] == ["done"] * 8
    assert rows(start(tmp_path / "broken", 6)) == unbroken
    workers = [start(tmp_path / "shared", 0) for _ in range(2)]
    for worker in workers:
        assert rows(worker) == unbroken
    for folder in ("broken", "shared"):
        assert set(outcomes(tmp_path / folder).values()) == {1}
        assert len(outcomes(tmp_path / folder)) == 8
