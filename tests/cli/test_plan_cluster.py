"""From a profile to a plan for machines that differ, on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitwright import Plan
from bitwright.cluster.planners import all_float
from bitwright.core.registry import PLANNERS

pytestmark = pytest.mark.timeout(400)  # seconds of work, but test machines are shared
SPIRALS = f"{Path(__file__).parents[1] / 'support' / 'spirals.py'}:workload"


def bitwright(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "bitwright", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two profiles, a cluster of them, and sensitivity scores."""
    tmp_path = tmp_path_factory.mktemp("cluster")
    profile = ["profile", SPIRALS, "--batch", "96", "--kernel", "int8", "--rounds", "3", "--no-casts", "--half-batch"]
    bitwright(tmp_path, *profile, "-o", "fast.json", "--quiet")
    known = json.loads((tmp_path / "fast.json").read_text())
    assert any(one["format"].startswith("kernel int8") for one in known["operators"])
    # what so small a net takes is noise: let times follow the batch, so that what the planner has to do is known
    for name, pace in (("fast", 1e-6), ("slow", 20e-6)):
        for cost in known["operators"]:
            for way in ("forward", "backward"):
                if cost.get(way) is not None:
                    seconds = pace * (96 if "[96," in cost["operator"] else 48)
                    cost[way].update(seconds=seconds, low=seconds, high=seconds)  # certain, also on a busy machine
        (tmp_path / f"{name}.json").write_text(json.dumps(known))
    score = ["score", SPIRALS, "--indicator", "gradient-variance", "--formats", "int8"]
    bitwright(tmp_path, *score, "-o", "scores.json", "--quiet")
    (tmp_path / "cluster.yaml").write_text(
        "bitwright_cluster: 1\nlink: {latency_us: 20, gbit_per_s: 10}\n"
        "devices:\n  fast: {profile: fast.json}\n  slow: {profile: slow.json, count: 2}\n"
    )
    return tmp_path


def test_profile_score_plan_and_predict(measured: Path) -> None:
    tmp_path = measured
    plan = ["plan-cluster", SPIRALS, "--cluster", "cluster.yaml", "--scores", "scores.json", "--batch", "96"]
    told = json.loads(bitwright(tmp_path, *plan, "--planner", "recover+split", "-o", "plan.yaml", "--json"))
    rows = told["allocations"]
    assert {"recover", "recover+split", "batches", "float", "all int8"} <= set(rows)
    assert rows["recover+split"]["seconds"] <= min(row["seconds"] for row in rows.values()) * 1.03
    made = Plan.load(tmp_path / "plan.yaml")
    assert set(made.devices) == {"fast", "slow"}
    told = bitwright(tmp_path, *plan, "--planner", "recover", "-o", "other.yaml")  # splitting is better by far here
    known = {name: row["seconds"] for name, row in rows.items() if name in PLANNERS}
    best = min(known, key=lambda name: known[name])
    assert best in ("recover+split", "batches")
    words = " ".join(told.split())
    assert f"{best} is {known['recover'] / known[best]:.2g} times as fast: --planner {best}" in words
    low = any(rows["recover"]["low"].values())
    assert ("torchrun --nproc-per-node 3 -m bitwright train" in words) is low
    assert ("low precision gives no speedup" in words) is not low
    batches = rows["recover+split"]["batches"]
    assert batches["fast"] > batches["slow"]
    predict = ["predict", SPIRALS, "--cluster", "cluster.yaml", "--plan", "plan.yaml", "--batch", "96", "--json"]
    predicted = json.loads(bitwright(tmp_path, *predict))
    assert predicted["seconds"] == pytest.approx(
        rows["recover+split"]["seconds"]
    )  # with the batches, on the same lines


@pytest.fixture
def plan(run: Any, measured: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `bitwright plan-cluster` in that folder."""
    monkeypatch.chdir(measured)

    def asked(*options: str, cluster: str = "cluster.yaml", scores: str = "scores.json") -> Any:
        return run("plan-cluster", SPIRALS, "--cluster", cluster, "--scores", scores, "--batch", "96", *options)

    return asked


def test_plans_contain_every_batch_size(plan: Any, measured: Path) -> None:
    """Also those that all have: `train` has no other word for it."""
    assert plan("--planner", "uniform", "-o", "uniform.yaml").code == 0
    assert {device.batch for device in Plan.load(measured / "uniform.yaml").devices.values()} == {96}


def test_the_command_that_trains_is_whole_and_the_plan_has_the_layout(plan: Any, measured: Path) -> None:
    told = plan("--planner", "batches", "-o", "whole.yaml").out
    assert f"-m bitwright train {SPIRALS} --plan whole.yaml --device-kind fast,slow,slow -o run" in told
    assert {device.channels_last for device in Plan.load(measured / "whole.yaml").devices.values()} == {False}
    told = plan("--planner", "batches", "-o", "last.yaml", "--channels-last").out
    assert f"train {SPIRALS} --channels-last --plan last.yaml" in told
    assert {device.channels_last for device in Plan.load(measured / "last.yaml").devices.values()} == {True}


def test_problems_of_files_are_reported_with_a_fix(plan: Any, measured: Path) -> None:
    text = (measured / "cluster.yaml").read_text()
    (measured / "typo.yaml").write_text(text.replace("count", "cuont"))
    ran = plan(cluster="typo.yaml")
    assert [(problem.code, problem.where) for problem in ran.problems] == [("unknown-key", "devices.slow.cuont")]
    assert "'count'" in ran.err
    ran = plan(scores="none.json")
    assert [(problem.code, problem.where) for problem in ran.problems] == [("unreadable-file", "none.json")]
    assert "--indicator gradient-variance" in ran.err


def test_profiles_of_another_batch_are_one_problem(run: Any, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(measured)
    given = ["--cluster", "cluster.yaml", "--scores", "scores.json"]
    ran = run("plan-cluster", SPIRALS, *given, "--batch", "80")
    assert (ran.code, ran.codes) == (2, ["batch-not-profiled"])
    assert "80 samples" in ran.err
    assert "fast with batch 96" in ran.err
    assert len(ran.err.splitlines()) == 2


def test_a_profile_with_another_memory_layout_is_reported(
    measured: Path, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = json.loads((measured / "fast.json").read_text())
    one["operators"].append(
        {**one["operators"][0], "operator": "conv2d(input=f32[96,8,4,4]@128,1,32,8+, weight=f32[8,8,3,3]+)"}
    )
    (measured / "last.json").write_text(json.dumps(one))
    assert "add --channels-last" in plan("--profiles", "slow=last.json").err
    assert "channels-last" not in plan("--profiles", "slow=last.json", "--channels-last").err
    assert "channels-last" not in plan().err


@pytest.mark.parametrize("planner", ["ilp", "uniform", "fastest", "batches", "float"])
def test_each_planner_has_a_name(plan: Any, planner: str) -> None:
    assert plan("--planner", planner, "--json").json["planner"] == planner


def test_profiles_can_be_given_beside_the_cluster(plan: Any, measured: Path) -> None:
    text = (measured / "cluster.yaml").read_text()
    bare = text.replace("{profile: fast.json}", "{}").replace("profile: slow.json, ", "")
    (measured / "bare.yaml").write_text(bare)
    missing = plan(cluster="bare.yaml")
    assert [(problem.code, problem.where) for problem in missing.problems] == [
        ("profile-required", "fast"),
        ("profile-required", "slow"),
    ]
    given = plan("--profiles", "fast.json", "--profiles", "slow=slow.json", "--json", cluster="bare.yaml")
    assert given.json["allocations"] == plan("--json").json["allocations"]
    assert (
        plan("--profiles", "slow=fast.json,fast=fast.json", "--json").json["allocations"] != given.json["allocations"]
    )
    wrong = plan("--profiles", "slwo=slow.json")
    assert wrong.codes == ["unknown-device-kind"]
    assert "'slow'" in wrong.err


def test_options_of_the_other_plan_verb_are_rejected(plan: Any, run: Any) -> None:
    for option in ("--weights", "--against", "--mapper", "--backend", "--plan"):
        assert plan(option, "x").code == 2
    assert run("plan", SPIRALS, "--cluster", "cluster.yaml").code == 2


def test_scores_that_do_not_fit_the_model_are_named(plan: Any, measured: Path) -> None:
    known = json.loads((measured / "scores.json").read_text())
    values = dict(known["values"])
    (measured / "other.json").write_text(json.dumps({**known, "values": {"conv9": {"int8": 1.0}}}))
    (problem,) = plan("--json", scores="other.json").json["problems"]
    assert problem["code"] == "scores-of-another-model"
    assert "conv9" in problem["what"]
    lost = next(iter(values))
    some = {**{name: own for name, own in values.items() if name != lost}, "conv9": {"int8": 1.0}}
    (measured / "part.json").write_text(json.dumps({**known, "values": some}))
    ran = plan(scores="part.json")
    assert ran.code == 0
    notes = " ".join(ran.err.split())
    assert f"{lost} stay in float" in notes
    assert "conv9" in notes
    (problem,) = plan("--keep-float", "*", "--json").json["problems"]
    assert problem["code"] == "all-operators-kept-float"


def test_a_planner_that_can_does_not_fail_for_one_that_cannot(plan: Any, measured: Path) -> None:
    """What doesn't fit with equal batches is said in its row; float's needs are marked."""
    free = plan("--planner", "float", "--json").json["allocations"]["float"]["memory"]["slow"]
    text = (measured / "cluster.yaml").read_text()
    process = json.loads((measured / "slow.json").read_text())["memory"]["process"]
    tight = (process + 0.9 * (free - process)) / 1e9
    (measured / "tight.yaml").write_text(
        text.replace("slow.json, count: 2", f"slow.json, count: 2, memory_gb: {tight / 0.9:.9f}, memory_reserve: 0.1")
    )
    split = plan("--planner", "recover+split", "--json", cluster="tight.yaml")
    assert split.code == 0
    assert split.json["allocations"]["recover+split"]["memory"]["slow"] <= tight * 1e9
    batches = plan("--planner", "batches", "--json", cluster="tight.yaml")
    assert batches.code == 0
    assert batches.json["allocations"]["batches"]["memory"]["slow"] <= tight * 1e9
    none = process / 1e9
    (measured / "none.yaml").write_text(
        text.replace("slow.json, count: 2", f"slow.json, count: 2, memory_gb: {none:.9f}")
    )
    plain = plan("--planner", "float", "--json", cluster="none.yaml")
    assert plain.code == 0
    assert "on `slow`, limit" in plain.json["failed"]["recover"][0]
    assert "float doesn't fit" in plain.err
    wrong = plan("--planner", "recover", cluster="none.yaml")
    assert wrong.code == 2
    assert "largest contributors the process itself" in " ".join(wrong.err.split())


@pytest.mark.slow
def test_planners_and_predictions_keep_the_same_reserve(plan: Any, measured: Path) -> None:
    """A limit that float needs to its last byte: it was said to fit, and processes need some percent more by chance."""
    free = plan("--planner", "float", "--json").json["allocations"]["float"]["memory"]["slow"]
    text = (measured / "cluster.yaml").read_text()
    (measured / "full.yaml").write_text(
        text.replace("slow.json, count: 2", f"slow.json, count: 2, memory_gb: {(free + 1000) / 1e9:.9f}")
    )
    (measured / "all.yaml").write_text((measured / "full.yaml").read_text() + "memory_reserve: 0\n")
    ask = ("predict", SPIRALS, "--batch", "96", "--cluster")
    fits = {}
    for name in ("full.yaml", "all.yaml"):
        told = plan("--planner", "float", "--json", cluster=name)
        limit = told.json["limits"]["slow"]
        assert limit["total"] == pytest.approx(free + 1000, abs=2)
        slow = json.loads(bitwright(measured, *ask, name, "--json"))["devices"][1]
        assert (slow["memory_limit"], slow["memory_usable"]) == (limit["total"], limit["usable"])
        fits[name] = slow["fits"]
        assert ("float doesn't fit" in told.err) is (not fits[name])
    assert fits == {"full.yaml": False, "all.yaml": True}
    shown = " ".join(plan("--planner", "float", cluster="full.yaml").out.split())
    assert "less 7 % in reserve" in shown
    assert "memory_reserve in cluster.yaml" in shown
    assert "less 7 % in reserve" in " ".join(bitwright(measured, *ask, "full.yaml").split())


def test_planners_are_found_by_name(run, workloads, tmp_path):
    """A plugin's as well as ours; a wrong one before anything is measured."""
    ask = ("plan-cluster", f"{workloads}:with_loss", "--cluster", tmp_path / "none.yaml", "--planner")
    wrong = run(*ask, "recovre")
    assert (wrong.code, wrong.codes) == (2, ["unknown-name"])
    assert "'recover'" in wrong.err
    PLANNERS.register("mine", lambda machine: all_float(machine))
    try:
        assert run(*ask, "mine", "--json").json["problems"][0]["code"] == "option-missing"
        listed = {row["name"] for row in run("list", "planners", "--json").json["planners"]}
    finally:
        PLANNERS.unregister("mine")
    assert {"recover", "recover+split", "fastest", "batches", "ilp", "uniform", "float", "mine"} <= listed
