"""The example `unequal_machines` as a user runs it: two processes, one with half of a core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitwright import Plan, load_workload
from bitwright.workload import call

EXAMPLE = Path(__file__).parents[2] / "examples" / "unequal_machines"


@pytest.mark.parametrize("name", ["resnet", "vgg", "bert", "roberta"])
def test_the_models_train(name: str) -> None:
    workload = load_workload(f"{EXAMPLE / 'workload.py'}:{name}")
    assert workload.training is not None
    assert workload.loss is not None
    inputs, target = workload.training()[0]
    batch = {k: v[None] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[None]
    loss = workload.loss(call(workload.model.eval(), batch), target[None])
    loss.backward()
    assert all(p.grad is not None for n, p in workload.model.named_parameters() if "pooler" not in n)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["vgg", "roberta"])
def test_from_profiles_to_a_trained_model(name: str, tmp_path: Path) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "ROUNDS": "3", "EPOCHS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [EXAMPLE / "run.sh", name, "out"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    plan = Plan.load(out / "plan.yaml")
    assert set(plan.devices) == {"fast", "slow"}
    assert sum(device.batch or 32 for device in plan.devices.values()) == 64
    assert "proportional" not in done.stdout + done.stderr  # half batches were measured
    assert "critical path" in done.stdout
    assert json.loads((out / "run" / "result.json").read_text())["metrics"][-1]["top1"] > 15
