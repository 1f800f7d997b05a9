from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
def test_a_killed_search_goes_on(configured: Path) -> None:
    out = configured / "out"
    arguments = ["tune", configured / "tune.yaml", "-o", out, "--strategy", "random", "--trials", "25"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bitwright", *map(str, arguments)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(3)]
    assert all(seen)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    time.sleep(0.1)
    done = bitwright(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(known)") >= 3
    again = bitwright(*arguments)
    assert again.returncode == 2
    assert "already exists" in again.stderr
