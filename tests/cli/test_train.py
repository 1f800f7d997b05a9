"""`bitwright train` and `bitwright deploy`: three commands to a measured INT8 artefact; Ctrl-C and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.reports import read_json
from bitwright.workload.data import regrouped

TINY = f"{Path(__file__).parents[1] / 'training' / 'tiny.py'}:workload"
COMMON = ("--batch", "25", "--lr", "0.1", "--epochs", "2", "--log-steps", "1")


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_three_commands_from_amp_to_a_measured_artefact(tmp_path: Path) -> None:
    amp, qat, out = tmp_path / "amp", tmp_path / "qat", tmp_path / "out"
    words = run("train", TINY, *COMMON, "--amp", "bf16", "-o", amp).stderr
    assert "epoch 2/2: loss" in words
    run("train", TINY, *COMMON, "--amp", "bf16", "--init", amp, "--precision", "int8", "-o", qat)
    assert json.loads((qat / "result.json").read_text())["init"] == str(amp)
    assert (qat / "tensorboard").is_dir()
    facts = json.loads(run("deploy", TINY, qat, "-o", out, "--json").stdout)
    scores = {row["where"]: row["value"] for row in facts["report"]["accuracies"]}
    assert scores["float"] == json.loads((amp / "result.json").read_text())["metrics"][-1]["top1"]
    assert scores["onnxruntime"] == scores["simulated"] > 60
    assert {row["batch"] for row in facts["report"]["timings"]} == {1, 64}
    assert all(row["passed"] for row in facts["report"]["parities"])
    assert {"model.onnx", "model-float.onnx", "report.html"} <= set(facts["files"])
    training = facts["report"]["training"]
    assert training["metrics"] == json.loads((qat / "result.json").read_text())["metrics"]
    assert training["settings"]["amp"] == "bf16"
    assert read_json(amp / "report.json").training is not None  # a float run has a report, too
    shown = run("deploy", TINY, qat, "--reference", amp, "-o", tmp_path / "again").stdout
    assert "samples/s" in shown


def test_invalid_options_are_rejected_before_training(tmp_path: Path) -> None:
    result = run("train", TINY, "--epochs", "0", "--lr", "-1", "-o", tmp_path / "a", code=2)
    assert "epochs" in result.stderr
    assert "lr" in result.stderr
    result = run("train", TINY, "--weights", "int4/channel/sym", "-o", tmp_path / "b", code=2)
    assert 'add precision="int8"' in result.stderr
    result = run("train", TINY, "--precision", "int7x", "-o", tmp_path / "c", code=2)
    assert "unknown precision" in result.stderr
    result = run("train", TINY, "--precision", "int12", "--backend", "onnxruntime", "-o", tmp_path / "d", code=2)
    assert "can't run this precision" in result.stderr
    result = run("deploy", TINY, tmp_path / "nothing", "-o", tmp_path / "e", code=2)
    assert str(tmp_path / "nothing") in result.stderr
    result = run("train", TINY, "--amp", "int8", "-o", tmp_path / "f", code=2)
    assert "bf16" in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_epoch_is_told_by_its_mean_loss(tmp_path: Path) -> None:
    """It was that of the steps since the last line of the log: of one batch, if that was the step before."""
    told = [
        [line for line in run("train", TINY, *options, "-o", tmp_path / name).stderr.splitlines() if "epoch 1/" in line]
        for name, options in {"often": COMMON, "seldom": (*COMMON[:-1], "5")}.items()
    ]
    assert told[0] == told[1]
    lines = [json.loads(line) for line in (tmp_path / "often" / "history.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["epoch"] == 0 and "loss" in line]
    assert len(losses) > 1
    assert f"loss {sum(losses) / len(losses):.4f}," in told[0][0]


def test_a_missing_tensorboard_is_no_note(tmp_path: Path, monkeypatch: Any) -> None:
    class Trains:
        def __init__(self, *_: object, **__: object) -> None: ...

        def fit(self) -> Any:
            return SimpleNamespace(to_dict=dict, summary=list, failures=list)

    monkeypatch.setattr("bitwright.training.trainer.Trainer", Trains)
    monkeypatch.setattr("bitwright.training.callbacks.tensorboard_problem", lambda: "it isn't installed")
    assert "TensorBoard" not in run("train", TINY, "-o", tmp_path / "run").stderr


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGKILL))],
)
def test_an_interrupted_run_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    options = ["train", TINY, *COMMON, "--save-steps", "3", "--precision", "int8", "--no-tensorboard"]
    run(*options, "-o", tmp_path / "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "bitwright", *options, "-o", str(tmp_path / "parts")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    history = tmp_path / "parts" / "history.jsonl"
    for _ in range(1200):
        if (history.exists() and len(history.read_text().splitlines()) >= 5) or process.poll() is not None:
            break
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number, errors
        assert f"interrupted by {number.name}" in errors
        assert "rerun the command to resume" in errors
    run(*options, "-o", tmp_path / "parts")  # the same command
    ours, theirs = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("parts", "whole"))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert history.read_text() == (tmp_path / "whole" / "history.jsonl").read_text()


def test_batches_are_put_together_for_timing() -> None:
    small = [{"x": torch.full((3, 2), float(i)), "k": torch.tensor(1)} for i in range(3)]
    first, second = regrouped(small, 5)
    assert first["x"][:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert first["k"].tolist() == 1
    assert len(second["x"]) >= 5
    assert [len(x) for x in regrouped([torch.ones(8, 1)], 4)] == [8]


def test_adaptive_runs_plan_by_themselves_and_continue_with_a_fixed_plan(tmp_path: Path) -> None:
    paced = f"{Path(__file__).parents[1] / 'support' / 'paced.py'}:main_workload"
    run("profile", paced, "--published", "nvidia-t4", "--kernel", "int8", "--batch", 16, "-o", tmp_path / "device.json")
    cluster, scores, out = tmp_path / "cluster.yaml", tmp_path / "scores.json", tmp_path / "out"
    cluster.write_text("bitwright_cluster: 1\ndevices:\n  a: {profile: device.json}\n")
    run("score", paced, "--indicator", "gradient-variance", "--formats", "int8", "-o", scores)
    common = ("train", paced, "--no-tensorboard", "-o", out)
    run(*common, "--scores", scores, code=2)
    assert not out.exists()
    adaptive = ("--adaptive", cluster, "--scores", scores, "--keep-float", "first", "--batch", 16, "--lr", "0.05")
    words = run(*common, *adaptive).stderr
    assert "the plan for 1 rank: a 16" in words
    facts = json.loads((out / "result.json").read_text())
    assert facts["batches"] == [16]
    assert facts["adaptive"]["sections"] == ["a"]
    assert 'id="ranks"' in (out / "report.html").read_text()
    # the same plan, without adaptation
    run(*common, "--plan", out / "plan.yaml", "--device-kind", "a", "--lr", "0.05")
    other = "bitwright: 1\ndevices: {a: {batch: 8}}\n"
    (tmp_path / "other.yaml").write_text(other)
    result = CliRunner().invoke(app, [*map(str, common), "--plan", str(tmp_path / "other.yaml"), "--lr", "0.05"])
    assert result.exit_code != 0
    assert "samples per step" in result.output
