"""SIGKILL at any moment: nothing that was evaluated is lost, nothing is evaluated twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

SCRIPT = Path(__file__).parents[1] / "support" / "kill_a_study.py"


def killed(store: Path, kills: int, trials: int) -> dict[str, object]:
    command = [sys.executable, str(SCRIPT), str(store), str(kills), str(trials), "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def check(folder: Path, kills: int, trials: int) -> None:
    unbroken = killed(folder / "unbroken.db", 0, trials)
    broken = killed(folder / "broken.db", kills, trials)
    assert broken["killed"] == kills
    assert broken["keys"] == unbroken["keys"]  # the same sequence
    assert len(set(broken["keys"])) == trials  # type: ignore[arg-type]
    study = optuna.load_study(study_name="planted", storage=f"sqlite:///{folder / 'broken.db'}")
    finished = [t for t in study.trials if "outcome" in t.user_attrs]
    assert max(Counter(t.user_attrs["key"] for t in finished).values()) == 1  # nothing twice
    assert {t.user_attrs["key"] for t in finished} == set(broken["keys"])  # type: ignore[arg-type]
    for trial in study.trials:  # and nothing begun again after it was known
        known = [t for t in finished if t.user_attrs["key"] == trial.user_attrs["key"]]
        assert trial.number <= known[0].number
        assert trial.state in (TrialState.FAIL, TrialState.COMPLETE, TrialState.PRUNED, TrialState.WAITING)


def test_a_killed_search_loses_no_trial(tmp_path: Path) -> None:
    check(tmp_path, 6, 15)


@pytest.mark.slow
def test_fifty_kills_lose_no_trial(tmp_path: Path) -> None:
    check(tmp_path, 50, 60)
