from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from step_cases import profile_of
from typer.testing import CliRunner

from bitwright.cli import app
from bitwright.profiling import DeviceProfile
from bitwright.profiling.profiler import samples_file
from bitwright.reports import read_json


def run(*arguments: str, code: int = 0) -> dict:  # type: ignore[type-arg]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_profile_predict_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, on a real workload: measure, predict, run, look at both."""
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path / "cache"))
    device, step = tmp_path / "device.json", tmp_path / "step.json"
    words = ["digits-untrained", "--batch", "8"]
    made = run(
        "profile", *words, "--precision", "int8", "--rounds", "3", "--no-casts", "-o", str(device), "--graph", str(step)
    )
    assert made["operators"] > 20
    assert DeviceProfile.load(device).host.engine > 0
    samples = samples_file("wall")
    lines = samples.read_text().count("\n")
    other = tmp_path / "other.json"
    run("profile", *words, "--precision", "int8", "--rounds", "3", "--no-casts", "-o", str(other))
    assert samples.read_text().count("\n") == lines  # nothing was measured again, though it goes to another file
    assert DeviceProfile.load(other).operators == DeviceProfile.load(device).operators

    float_ = run("predict", *words, "--profile", str(device), "--graph", str(step))
    trace = tmp_path / "trace.json"
    options = ["--precision", "int8", "--compare", "3", "--trace", str(trace), "--report", str(tmp_path)]
    int8 = run("predict", *words, "--profile", str(device), *options)
    assert 0 < float_["seconds"] < int8["seconds"]
    assert int8["devices"][0]["memory"]["saved"] > float_["devices"][0]["memory"]["saved"]
    pairs = {pair["name"]: pair for pair in int8["compared"]["groups"]}
    assert {"conv2d", "quantizers", "batch_norm", "loss"} <= pairs.keys()
    assert "relu" not in pairs  # within quantizers
    assert "clip" not in {pair["name"] for pair in int8["compared"]["phases"]}
    assert 0.2 < int8["compared"]["step"]["predicted"] / int8["compared"]["step"]["measured"] < 5
    assert json.loads(trace.read_text())["traceEvents"]

    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "bitwright_cluster: 1\nlink: {latency_us: 50, gbit_per_s: 1}\n"
        "devices: {here: {profile: device.json, count: 3}}\n"
    )
    together = run("predict", *words, "--cluster", str(cluster), "--exact", "--report", str(tmp_path))
    assert len(together["devices"]) == 3
    assert together["seconds"] > float_["seconds"]

    first, second = read_json(tmp_path / "report.json").forecasts
    assert first.measured is not None
    assert first.measured.step.measured_ms == pytest.approx(1e3 * int8["compared"]["step"]["measured"])
    (one,) = first.devices
    assert {span.kind for span in one.spans} >= {"forward", "backward", "tail"}
    assert sum(one.phases_ms.values()) == pytest.approx(first.step_ms, rel=1e-6)
    assert [device.name for device in second.devices] == ["here-0", "here-1", "here-2"]
    for found in second.devices:
        assert max(span.end_ms for span in found.spans) <= second.step_ms * 1.0001
        assert any(span.kind == "collective" for span in found.spans)

    missing = run("predict", *words, "--profile", str(device), "--amp", "bf16", code=2)
    assert "not in the profile" in missing["problems"][0]["what"]


def test_wrong_usage_is_said() -> None:
    assert [problem["code"] for problem in problems_of()] == ["option-missing"]
    both = ["--profile", "a.json", "--plan", "p.yaml", "--precision", "int8"]
    assert [problem["code"] for problem in problems_of(*both)] == ["ignored-option"]
    wrong = run("profile", "digits-untrained", "--clock", "sun", "--amp", "int8", code=2)["problems"]
    assert [problem["code"] for problem in wrong] == ["unknown-clock", "unknown-amp-type"]


def problems_of(*arguments: str) -> list[dict[str, str]]:
    return run("predict", "digits-untrained", *arguments, code=2)["problems"]  # type: ignore[no-any-return]


def test_all_files_that_cannot_be_used_are_said_together(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "bitwright_cluster: 1\ndevices:\n  a: {profile: none.json, plan: none.yaml}\n  b: {profile: bad.json}\n"
    )
    (tmp_path / "bad.json").write_text("{}")
    found = problems_of("--cluster", str(cluster), "--graph", str(tmp_path / "step.json"))
    places = " ".join(problem["where"] for problem in found)
    assert all(name in places for name in ("none.json", "none.yaml", "bad.json", "step.json"))
    assert all(problem["fix"] for problem in found)
    (one,) = problems_of("--profile", str(tmp_path / "no.json"))
    assert "no.json" in one["where"]
    (one,) = problems_of("--cluster", str(tmp_path / "no.yaml"))
    assert "no.yaml" in one["where"]
    assert one["fix"]


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", ":1:"), ("", "bitwright_cluster: 1"), ("- 1", "bitwright_cluster: 1")]
)
def test_a_file_that_is_no_cluster_is_said(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    (problem,) = problems_of("--cluster", str(tmp_path / "cluster.yaml"))
    assert words in problem["where"] + problem["fix"]
    assert problem["fix"]


@pytest.mark.parametrize(
    "text", ["{", '{"version": 1}', "[]", '{"version": 7}', '{"version": 1, "ops": 3}', "\x00\xff"]
)
def test_a_file_that_is_no_step_is_said(text: str, tmp_path: Path) -> None:
    file, device = tmp_path / "step.json", tmp_path / "device.json"
    file.write_bytes(text.encode("latin-1"))
    device.write_text(profile_of([]).to_json())
    problems = problems_of("--profile", str(device), "--graph", str(file))
    assert problems
    assert all("bitwright profile" in problem["fix"] for problem in problems)


def test_only_a_profile_of_this_device_is_compared(tmp_path: Path) -> None:
    device = tmp_path / "device.json"
    published = profile_of([]).model_copy(update={"source": "published", "device": "NVIDIA A100"})
    device.write_text(published.to_json())
    found = problems_of("--profile", str(device), "--compare", "3")
    assert [problem["where"] for problem in found] == ["source"]
    other = profile_of([]).model_copy(update={"threads": 1 + torch.get_num_threads()})
    device.write_text(other.to_json())
    found = problems_of("--profile", str(device), "--compare", "3")
    assert {problem["where"] for problem in found} == {"device", "threads"}
