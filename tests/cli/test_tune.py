from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import optuna
import pytest
import sqlalchemy

from bitwright.reports import read_json

CODE = Path(__file__).parents[1] / "support" / "planted.py"
WORKLOAD = """\
import sys
sys.path.insert(0, {tests!r})
from planted import workload

def sensitive():
    return workload(20, (7,))
"""


def bitwright(*arguments: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitwright", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=110, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORKLOAD.format(tests=str(CODE.parent)))
    (tmp_path / "tune.yaml").write_text(
        "workload: work.py:sensitive\ngoal: {drop: 10%}\nbackend: tensorrt\n"
        "space: {weights: int8/channel/sym, observer: minmax, steps: [[]]}\n"
    )
    return tmp_path


def test_tune_from_a_file(configured: Path) -> None:
    done = bitwright("tune", configured / "tune.yaml", "-o", configured / "out", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["met_goal"] is True
    assert result["best"]["candidate"]["float"] == ["7"]
    names = {Path(file).name for file in result["files"]}
    assert {"plan.yaml", "model.onnx", "checkpoint.safetensors", "tuning.json", "report.html", "study.db"} <= names
    tuning = read_json(configured / "out/report.json").tuning
    assert tuning is not None
    assert len(tuning.trials) == len(result["history"])
    assert [trial.number for trial in tuning.trials if trial.best] == [
        row["number"] + 1 for row in result["history"] if row["candidate"] == result["best"]["candidate"]
    ]
    assert tuning.limit == pytest.approx(0.9 * result["float"]["top1"])
    assert tuning.goal == "top1: at most 10% lost"


def test_a_missed_goal_is_exit_code_1_and_everything_is_written(configured: Path) -> None:
    file = configured / "tune.yaml"
    file.write_text(file.read_text().replace("steps: [[]]}", "steps: [[]], operators: {'*': {keep: quantized}}}"))
    done = bitwright("tune", file, "-o", configured / "out")
    assert done.returncode == 1
    assert "the goal was missed by" in done.stderr
    assert (configured / "out/model.onnx").is_file()


@pytest.mark.slow
def test_a_killed_search_resumes(configured: Path) -> None:
    out = configured / "out"
    arguments = ["tune", configured / "tune.yaml", "-o", out, "--strategy", "random", "--trials", "25"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bitwright", *map(str, arguments)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 90
    while len(finished_trials(out)) < 3:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = finished_trials(out)
    done = bitwright(*arguments)
    assert done.returncode == 0, done.stderr
    after = finished_trials(out)
    assert before.items() <= after.items()
    assert len(after) > len(before)
    again = bitwright(*arguments)  # as after a kill in the last moment
    assert again.returncode == 0, again.stderr
    assert finished_trials(out) == after


def finished_trials(output: Path) -> dict[int, datetime | None]:
    """When each trial of the study in a folder ended."""
    if not (output / "study.db").is_file():
        return {}
    storage = optuna.storages.RDBStorage(f"sqlite:///{output}/study.db")
    try:
        (study,) = storage.get_all_studies()
        trials = storage.get_all_trials(study._study_id, states=(optuna.trial.TrialState.COMPLETE,))
    except (ValueError, sqlalchemy.exc.SQLAlchemyError):  # being created
        return {}
    finally:
        storage.engine.dispose()
    return {trial.number: trial.datetime_complete for trial in trials}
