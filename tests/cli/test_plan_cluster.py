"""From a profile to a plan for machines that differ, on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitwright import Plan
from bitwright.planners import all_float
from bitwright.registry import PLANNERS

SPIRALS = f"{Path(__file__).parents[1] / 'spirals.py'}:workload"


def bitwright(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "bitwright", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_profile_score_plan_and_predict(tmp_path: Path) -> None:
    profile = ["profile", SPIRALS, "--batch", "96", "--kernel", "int8", "--rounds", "3", "--no-casts", "--half-batch"]
    bitwright(tmp_path, *profile, "-o", "fast.json", "--quiet")
    known = json.loads((tmp_path / "fast.json").read_text())
    assert any(one["format"].startswith("kernel int8") for one in known["operators"])
    # what so small a net takes is noise: let times follow the batch, so that what the planner has to do is known
    for name, pace in (("fast", 1e-6), ("slow", 20e-6)):
        for cost in known["operators"]:
            for way in ("forward", "backward"):
                if cost.get(way) is not None:
                    cost[way]["seconds"] = pace * (96 if "[96," in cost["operator"] else 48)
        (tmp_path / f"{name}.json").write_text(json.dumps(known))
    score = ["score", SPIRALS, "--indicator", "gradient-variance", "--formats", "int8"]
    bitwright(tmp_path, *score, "-o", "indications.json", "--quiet")
    (tmp_path / "cluster.yaml").write_text(
        "bitwright_cluster: 1\nlink: {latency_us: 20, gbit_per_s: 10}\n"
        "devices:\n  fast: {profile: fast.json}\n  slow: {profile: slow.json, count: 2}\n"
    )
    plan = ["plan", SPIRALS, "--cluster", "cluster.yaml", "--indications", "indications.json", "--batch", "96"]
    told = json.loads(bitwright(tmp_path, *plan, "--planner", "recover+split", "-o", "plan.yaml", "--json"))
    rows = told["allocations"]
    assert {"recover", "recover+split", "batches", "float", "all int8"} <= set(rows)
    assert rows["recover+split"]["seconds"] <= min(row["seconds"] for row in rows.values()) * 1.03
    made = Plan.load(tmp_path / "plan.yaml")
    assert set(made.devices) == {"fast", "slow"}
    told = bitwright(tmp_path, *plan, "--planner", "recover", "-o", "other.yaml")  # splitting is better by far here
    assert "recover+split is" in told or "batches is" in told
    assert "torchrun --nproc-per-node 3" in told or "nothing is won" in told
    batches = rows["recover+split"]["batches"]
    assert batches["fast"] > batches["slow"]
    predict = ["predict", SPIRALS, "--cluster", "cluster.yaml", "--quantize", "plan.yaml", "--batch", "96", "--json"]
    predicted = json.loads(bitwright(tmp_path, *predict))
    assert predicted["seconds"] == pytest.approx(
        rows["recover+split"]["seconds"]
    )  # with the batches, on the same lines


def test_planners_are_found_by_name(run, workloads, tmp_path):
    """A plugin's as well as ours; a wrong one before anything is measured."""
    ask = ("plan", f"{workloads}:with_loss", "--cluster", tmp_path / "none.yaml", "--planner")
    wrong = run(*ask, "recovre")
    assert wrong.code == 2
    assert "did you mean 'recover'" in wrong.err
    PLANNERS.register("mine", lambda machine: all_float(machine))
    try:
        assert "nothing says how much operators suffer" in run(*ask, "mine").err
        listed = {row["name"] for row in run("list", "planners", "--json").json["planners"]}
    finally:
        PLANNERS.unregister("mine")
    assert {"recover", "recover+split", "fastest", "batches", "float", "mine"} <= listed
