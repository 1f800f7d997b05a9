"""The example `float_to_int8` as a user runs it: a shell script, in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "float_to_int8"


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds on a quiet machine; bf16 is emulated on most CPUs
def test_three_commands_from_nothing_to_measured_int8(tmp_path: Path) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment |= {"FLOAT_EPOCHS": "1", "INT8_EPOCHS": "1"}
    done = subprocess.run(
        [EXAMPLE / "run.sh", "digits"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run, deployed = tmp_path / "runs" / "digits", tmp_path / "runs" / "digits" / "deploy"
    for folder in ("float", "int8"):
        assert (run / folder / "checkpoint.safetensors").is_file()
    assert json.loads((run / "float" / "result.json").read_text())["config"]["amp"] == "bf16"
    files = {file.name for file in deployed.iterdir()}
    assert {"model.onnx", "model-float.onnx", "plan.yaml", "report.html", "report.json"} <= files

    report = json.loads((deployed / "report.json").read_text())
    scores = {row["where"]: row["value"] for row in report["accuracies"]}
    assert {"float", "simulated", "onnxruntime"} <= scores.keys()
    assert scores["float"] == json.loads((run / "float" / "result.json").read_text())["metrics"][-1]["top1"]
    assert abs(scores["onnxruntime"] - scores["simulated"]) <= 0.4  # two of 500 images
    assert scores["onnxruntime"] > scores["float"] - 2  # an epoch more, and quantized
    assert all(row["passed"] for row in report["parities"])
    for words in (f"{scores['onnxruntime']:.2f} %", "latency, onnxruntime, batch 64", "samples/s"):
        assert words in done.stdout, done.stdout


def test_the_readme_shows_what_the_script_runs() -> None:
    shown = re.findall(r"^bitwright .*$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    script = (EXAMPLE / "run.sh").read_text()
    for name, value in {"$out": "runs/digits", "$workload": "digits-untrained"}.items():
        script = script.replace(f'"{name}', f'"{value}').replace(name, value)
    script = re.sub(r'"\$\{\w+:-(\d+)\}"', r"\1", script).replace('"', "")
    assert len(shown) == 5
    assert [line for line in shown[:3] if line not in script] == []


def test_an_unknown_task_is_usage() -> None:
    done = subprocess.run([EXAMPLE / "run.sh", "imagenet"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:5]) == (2, "usage")
