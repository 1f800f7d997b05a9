"""The example `unequal_machines` as a user runs it: two processes, one with half of a core."""

from __future__ import annotations

import json
import os
import shutil
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


def _emulates_machines() -> bool:
    """Whether this process may create network namespaces with limited links, and CPU quotas."""
    group = Path(f"/sys/fs/cgroup/cpu/bitwright-test-{os.getpid()}")
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    try:
        group.mkdir()
        group.rmdir()
    except OSError:
        return False
    name = f"bwtest{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False, timeout=20)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True, timeout=20)
    return made.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("separate", [True, False], ids=["namespaces", "plain"])
def test_three_machines_change(separate: bool, tmp_path: Path) -> None:
    """One of them loses half of its CPU for a while; another one dies and joins again."""
    if separate and not _emulates_machines():
        pytest.skip("needs root, network namespaces (ip, tc) and CPU quotas of cgroup v1")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "ROUNDS": "3", "EVENTS": "10 25 40"}
    environment |= {"EPOCHS": "16"} if separate else {"PLAIN": "1", "EPOCHS": "100"}  # steps are faster without limits
    done = subprocess.run(
        [EXAMPLE / "machines.sh", "digits-untrained", "out"],
        cwd=tmp_path,
        env={**environment, "CPUS": "60 60 40"},
        capture_output=True,
        text=True,
        check=False,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine 2 is dead" in done.stdout
    facts = json.loads((tmp_path / "out" / "run" / "result.json").read_text())
    assert any("2 ranks instead of 3" in switch["reason"] for switch in facts["adaptive"]["switches"])
    assert any("3 ranks instead of 2" in switch["reason"] for switch in facts["adaptive"]["switches"])
    assert sum(facts["batches"]) == 96
    assert facts["processes"] == 3
    assert 'id="ranks"' in (tmp_path / "out" / "run" / "report.html").read_text()
    profile = json.loads((tmp_path / "out" / "machine.rank2.json").read_text())
    assert {cost["world"] for cost in profile["collectives"]} == {3}
    if separate:
        assert "127.0.0.1" not in done.stderr
