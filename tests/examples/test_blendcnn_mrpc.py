"""The example `blendcnn_mrpc` as a user runs it, on the data that scikit-learn has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from problems import raises_problem

import bitwright as bw
from bitwright.core.errors import BitwrightError

EXAMPLE = Path(__file__).parents[2] / "examples" / "blendcnn_mrpc"


@pytest.mark.slow  # its parts are tested by themselves
@pytest.mark.timeout(600)
def test_three_commands_from_nothing_to_measured_int8(tmp_path: Path) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", "EPOCHS": "2", "TRIALS": "1", "RUNS": "5"}
    done = subprocess.run(
        [EXAMPLE / "run.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "descriptions"
    assert json.loads((run / "float" / "result.json").read_text())["best"]["top1"] > 75
    tuned = json.loads((run / "int8" / "tuning.json").read_text())
    assert tuned["met_goal"] is True
    figures = json.loads((run / "bench.json").read_text())
    (row,) = figures["runtimes"]
    assert row["executed"] == {"int8": 10, "float": 0}  # eight convolutions, two linears
    assert row["parity"]["passed"]
    scores = {(one["where"], one["metric"]): one["value"] for one in row["accuracies"]}
    assert scores["float", "majority"] == 50.0
    assert scores["float", "top1"] > 75
    assert abs(scores["quantized", "top1"] - scores["float", "top1"]) < 3
    assert {(one["batch"], one["variant"]) for one in row["timings"]} == {
        (batch, variant) for batch in (1, 32) for variant in ("float", "quantized")
    }
    for words in ("goal met", "majority 50", "f1", "p99", "fastest with batch 32"):
        assert words in done.stdout, done.stdout


def test_the_readme_shows_what_the_script_runs() -> None:
    shown = re.findall(r"^(?:bitwright|export) .*(?:\\\n.*)?$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    script = (EXAMPLE / "run.sh").read_text()
    for name, value in {
        "${workload}": "workload.py:mrpc",
        "$workload": "workload.py:mrpc",
        "$out": "runs/mrpc",
    }.items():
        script = script.replace(name, value)
    script = re.sub(r"\$\{\w+:-(\d+)\}", r"\1", script).replace("$rate", "0.001").replace('"', "")
    assert len(shown) == 4
    assert [line for line in shown if line not in script] == []


def test_an_untrained_model_is_not_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workload = f"{EXAMPLE}/workload.py:descriptions"
    monkeypatch.delenv("BLENDCNN_FLOAT", raising=False)
    with pytest.raises(BitwrightError) as raised:
        bw.load_workload(workload)
    assert raised.value.problems[0].code == "weights-required"
    assert bw.load_workload(f"{workload}_choose").training is not None
    monkeypatch.setenv("BLENDCNN_FLOAT", str(tmp_path))
    with raises_problem("no-such-checkpoint"):
        bw.load_workload(f"{workload}_choose")


def test_an_unknown_task_is_usage() -> None:
    done = subprocess.run([EXAMPLE / "run.sh", "imagenet"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:5]) == (2, "usage")
