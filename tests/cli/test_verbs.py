"""Every verb on a tiny model: what it prints, what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import onnx
import pytest
import torch

import bitwright
from bitwright.plan import FoldSpec, Plan
from bitwright.reports import new_record, read_json, write_report
from bitwright.sensitivity import OperatorScores

FILES = ["checkpoint.safetensors", "model.onnx", "plan.yaml", "report.html", "report.json", "report.md"]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_version_and_help(run):
    assert run("--version").out == f"bitwright {bitwright.__version__}\n"
    for verb in (
        "inspect",
        "plan",
        "quantize",
        "score",
        "report",
        "grid leaderboard",
        "export",
        "check",
        "list",
        "doctor",
        "quickstart",
    ):
        ran = run(*verb.split(), "--help")
        assert ran.code == 0
        assert "Examples:\n" in ran.out
        assert f"bitwright {verb}" in ran.out
        assert "--json" in ran.out


def test_inspect(run, small):
    ran = run("inspect", small)
    assert ran.code == 0
    assert "conv2d" in ran.out
    assert "5 operators" in ran.out
    assert "195 parameters" in ran.out  # 8·2·9 + 8, twice 8 of the norm, 3·8 + 3
    graph = bitwright.Graph.from_json(run("inspect", small, "--json").out)
    assert [op.kind for op in graph.ops] == ["conv2d", "batch_norm", "relu", "mean", "linear"]
    assert run("inspect", small, "--batches", 2, "--quiet").out == ""


def test_inspect_marks_operators_that_only_some_runs_reach(run, tmp_path):
    path = tmp_path / "branch.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom bitwright import Workload\n"
        "class Net(nn.Module):\n"
        "    def forward(self, x):\n        return torch.relu(x) if x.sum() > 0 else torch.tanh(x)\n"
        "def build():\n"
        "    return Workload(name='b', model=Net(), inputs=(torch.ones(1, 2),),\n"
        "                    calibration=lambda: [-torch.ones(1, 2)])\n"
    )
    assert "1 of 2 runs" in run("inspect", f"{path}:build", "--batches", 1).out


def test_score(run, tmp_path):
    path = tmp_path / "better.yaml"
    coarse = ("--backend", "academic", "--weights", "int3/channel/sym", "--activations", "int3/tensor/sym/adasign")
    ran = run("score", "digits", *coarse, "-o", path, "--samples", 64, "--top", 3)
    assert ran.code == 0
    assert "all sites" in ran.out
    assert "in float: +" in ran.out
    table = json.loads(run("score", "digits", "--plan", path, "--samples", 64, "--json").out)
    assert table["samples"] == 64
    sites = [site["loss_change"] for site in table["sites"]]
    assert sites == sorted(sites, reverse=True)
    assert Plan.load(path).float
    refused = run("score", "digits", "--plan", path, "--weights", "int8/channel/sym")
    assert refused.code == 2
    assert "--weights" in refused.err


def test_score_by_an_indicator(run, small, tmp_path):
    path, workload = tmp_path / "scores.json", small.replace(":small", ":with_loss")
    ran = run(
        "score", workload, "--indicator", "gradient-variance", "--formats", "int8,bf16", "-o", path, "--samples", 16
    )
    assert ran.code == 0, ran.err
    assert "16 samples" in ran.out
    found = OperatorScores.load(path)
    assert set(found.values) == {"conv", "head"}
    # which of the two is the larger one depends on the CPU: without VNNI int8 has one bit less for weights
    assert all(min(values["int8"], values["bf16"]) > values["float"] for values in found.values.values())
    for wrong in (["--weights", "int8/channel/sym"], ["--formats", "int9"]):
        refused = run("score", workload, "--indicator", "random", *wrong)
        assert refused.code == 2
        assert wrong[-1] in refused.err or wrong[0] in refused.err
    assert "loss=" in run("score", small, "--indicator", "random").err  # the workload has none


def test_score_without_a_metric(run, small, tmp_path):
    bare = small.replace(":small", ":no_metric")
    report = tmp_path / "report"
    ran = run("score", bare, "--report", report)
    assert ran.code == 0
    assert "no suggestion" in ran.out
    record = read_json(report / "report.json")
    assert record.sensitivity is not None
    assert {site.site for site in record.sensitivity.sites} >= {"conv:weight", "head:weight"}
    assert [node.kind for node in record.graph] == ["conv2d", "batch_norm", "relu", "mean", "linear"]
    write_report(new_record("another"), tmp_path / "report")
    other = run("score", bare, "--report", report)  # rejected before anything is scored
    assert (other.code, other.codes) == (2, ["other-workload"])
    assert run("score", bare, "-o", tmp_path / "plan.yaml").code == 2


def test_weight_and_activation_quantizers_are_independent(run, small, tmp_path):
    path = tmp_path / "plan.yaml"
    assert run("plan", small, "-o", path, "--quantizer", "pact", "--weight-quantizer", "lsq").code == 0
    chosen = {site.rpartition(":")[2]: spec.quantizer for site, spec in Plan.load(path).quantized}
    assert chosen == {"input": "pact", "output": "pact", "weight": "lsq", "bias": "product"}
    assert run("plan", small, "-o", path, "--quantizer", "pact").code == 0
    assert {spec.quantizer for _, spec in Plan.load(path).quantized} == {"pact", "dorefa", "product"}
    output = tmp_path / "out"
    assert run("quantize", small, "--quantizer", "lsqplus", "--weight-quantizer", "tqt", "-o", output).code == 0
    used = {row.quantizer for row in read_json(output / "report.json").sites}
    assert used == {"lsqplus", "tqt", "product"}


def test_plan(run, small, tmp_path):
    path = tmp_path / "plan.yaml"
    ran = run("plan", small, "-o", path, "--keep-float", "head", "--no-saturating", "--observer", "mse")
    assert ran.code == 0, ran.err
    plan = Plan.load(path)
    assert plan.model == "small"
    assert "head" in plan.float
    assert not any(spec.guard for _, spec in plan.quantized)
    assert run("plan", small, "--no-saturating").out == run("plan", small, "--no-saturating", "--quiet").out
    guarded = run("plan", small, "--saturating", "--json").json
    assert "int16-pairs" in guarded["plan"]


@pytest.mark.parametrize(("strategy", "fold"), [(-1, {}), (0, 0), (2, 2), (4, "conv")])
def test_how_norms_are_folded(run, small, tmp_path, strategy, fold):
    path = tmp_path / "plan.yaml"
    expected = {"bn": FoldSpec(into="conv", strategy=fold)} if isinstance(fold, int) else fold and {"bn": fold}
    assert run("plan", small, "--fold", strategy, "-o", path).code == 0
    assert Plan.load(path).fold == expected
    ran = run("quantize", small, "--fold", strategy, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert Plan.load(tmp_path / "out" / "plan.yaml").fold == expected


def test_plan_against_another(run, small, tmp_path):
    before, after = tmp_path / "before.yaml", tmp_path / "after.yaml"
    run("plan", small, "-o", before)
    after.write_text(before.read_text().replace("int8/channel/sym", "int8/tensor/sym"))
    ran = run("plan", small, "--plan", after, "--against", before)
    assert ran.code == 0, ran.err
    assert "~ conv:weight: int8/channel/sym" in ran.out
    assert run("plan", small, "--plan", before, "--against", before).out == "no changes\n"


def test_plan_schema(run, small, tmp_path):
    schema = run("plan", "--schema").json
    jsonschema.validate({"bitwright": 1, "sites": {"conv:weight": "int8"}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"bitwright": 1, "sites": {"conv:weight": 8}}, schema)


def test_quantize_writes_everything(made):
    assert names(made) == FILES
    record = read_json(made / "report.json")
    assert [accuracy.where for accuracy in record.accuracies] == ["float", "simulated", "onnxruntime"]
    assert record.parities[0].passed
    assert record.parities[0].samples == 32
    assert {row.site for row in record.sites} >= {"conv:input", "conv:weight", "head:weight"}
    assert record.folds == {"bn": "conv"}
    assert onnx.load(made / "model.onnx").producer_name == "bitwright"


def test_quantize_prints_a_summary(run, workloads, tmp_path):
    ran = run("quantize", f"{workloads}:no_metric", "-o", tmp_path / "out", "--samples", 12)
    assert ran.code == 0, ran.err
    assert "small for onnxruntime" in ran.out
    assert "parity, onnxruntime" in ran.out
    assert str(tmp_path / "out" / "model.onnx") in ran.out
    assert "top1" not in ran.out


def test_quantize_with_a_plan_and_json(run, small, made, tmp_path):
    ran = run("quantize", small, "--plan", made / "plan.yaml", "-o", tmp_path / "again", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["report"]["backend"] == "onnxruntime"
    assert Path(ran.json["files"]["plan.yaml"]).read_text() == (made / "plan.yaml").read_text()


def test_export_repeats_what_quantize_wrote(run, small, made, tmp_path):
    path = tmp_path / "model.onnx"
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    ran = run("export", small, *sources, "-o", path)
    assert ran.code == 0, ran.err
    assert path.read_bytes() == (made / "model.onnx").read_bytes()


def test_export_with_a_fixed_batch_can_be_checked(run, small, made, tmp_path):
    path = tmp_path / "fixed.onnx"
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    facts = run("export", small, *sources, "-o", path, "--static-batch", "--json").json
    assert facts["dynamic_batch"] is False
    ran = run("check", small, path, *sources, "--json")
    assert ran.code == 0, ran.err
    assert ran.json[0]["samples"] == 32


def test_a_target_whose_tools_read_other_files(run, small, tmp_path):
    folder, path = tmp_path / "out", tmp_path / "again.onnx"
    ran = run("quantize", small, "--backend", "snpe", "-o", folder)
    assert ran.code == 0, ran.err
    assert "model.encodings.json" in names(folder)
    assert "the artefact is not checked: only Qualcomm SNPE reads" in ran.err
    sources = ["--plan", folder / "plan.yaml", "--checkpoint", folder / "checkpoint.safetensors"]
    facts = run("export", small, *sources, "-o", path, "--json").json
    beside = tmp_path / "again.encodings.json"
    assert (facts["kind"], facts["sidecar"]) == ("encodings", str(beside))
    assert beside.read_bytes() == (folder / "model.encodings.json").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.encodings.json", "again.onnx", "out"]
    ran = run("check", small, path, *sources)
    assert ran.code == 2
    assert "--artefact qdq" in ran.err
    assert run("export", small, *sources, "-o", path, "--artefact", "qdq").code == 0
    ran = run("check", small, path, *sources, "--runtime", "reference", "--per-site")
    assert ran.code == 0, ran.err


def test_export_float(run, small, tmp_path):
    path = tmp_path / "float.onnx"
    assert run("export", small, "--float", "-o", path).code == 0
    runtime = bitwright.open_runtime("onnxruntime", path)
    workload = bitwright.load_workload(small)
    torch.testing.assert_close(runtime(*workload.inputs), workload.model(*workload.inputs))


def test_check(run, small, made):
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    ran = run("check", small, made / "model.onnx", *sources, "--runtime", "all", "--per-site", "--samples", 5)
    assert ran.code == 0, ran.err
    assert "agrees" in ran.out
    assert "conv:input" in ran.out


def test_check_names_the_first_site_that_diverges(run, small, made, tmp_path):
    model = onnx.load(made / "model.onnx")
    weights = next(i for i in model.graph.initializer if i.name.startswith("conv:weight.codes"))
    weights.raw_data = bytes(len(weights.raw_data))  # all zero
    path = tmp_path / "wrong.onnx"
    onnx.save(model, path)
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    ran = run("check", small, path, *sources)
    assert ran.code == 1
    assert "first diverging site: conv:weight\n" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "kind",
    ["observers", "quantizers", "backends", "artefacts", "runtimes", "workloads", "steps", "formats", "importers"],
)
def test_list(run, kind):
    entries = run("list", kind, "--json").json[kind]
    assert entries
    assert all(entry["name"] and entry["about"] for entry in entries)
    assert entries[0]["name"] in run("list").out


def test_list_the_keys_of_an_importer(run):
    found = {row["key"]: row["handling"] for row in run("list", "importers", "lpot", "--json").json["keys"]}
    assert found["tuning.accuracy_criterion.relative"] == "honoured"
    assert found["tuning.tensorboard"] == "noted"
    assert found["pruning"] == "rejected"
    assert "evaluation.performance.configs.kmp_blocktime" in run("list", "importers", "lpot").out
    assert run("list", "importers", "nothing").code == 2
    assert run("list", "backends", "lpot").code == 2


def test_doctor(run, monkeypatch):
    from bitwright.deployment import saturates
    from bitwright.profiling import microbenchmarks
    from bitwright.profiling.microbenchmarks import judge

    speeds = [judge("int8", [0.5] * 5), judge("bf16", [1.5] * 5), judge("fp16", [0.5, 9.0, 1.0, 30.0, 2.0])]
    monkeypatch.setattr(microbenchmarks, "kernel_speeds", lambda: speeds)
    ran = run("doctor")
    assert ran.code == 0
    assert "onnxruntime" in ran.out
    assert re.search(r"int8\W+yes(, in oneDNN)?\W+0\.50\W", ran.out)
    assert "1.50: slower" in ran.out
    assert "too busy to tell" in " ".join(ran.out.split())
    facts = run("doctor", "--json").json
    assert facts["environment"]["packages"]["torch"] == torch.__version__
    assert facts["runtimes"]["onnxruntime"]["saturates"] is saturates("onnxruntime")
    assert facts["kernels"] == [speed.to_dict() for speed in speeds]


def test_quickstart(quickstart):
    ran, folder = quickstart
    assert ran.code == 0, ran.err
    assert names(folder) == sorted([*FILES, "model-float.onnx"])
    record = read_json(folder / "report.json")
    assert json.loads(record.model_dump_json()) == ran.json["report"]
    accuracy = {row.where: row.value for row in record.accuracies}
    assert accuracy["float"] - accuracy["onnxruntime"] <= 0.5
    assert accuracy["simulated"] == accuracy["onnxruntime"]
    assert all(parity.passed and parity.top1_agreement == 1.0 for parity in record.parities)
    assert {timing.batch for timing in record.timings} == {1, 64}
    html = (folder / "report.html").read_text()
    assert "conv1:weight" in html
    assert f"{accuracy['float']:.2f} %" in html


def test_runs_on_one_page(run, made, tmp_path):
    page = tmp_path / "page.html"
    ran = run("report", made, made / "report.json", "-o", page)
    assert ran.code == 0, ran.err
    assert "2 runs" in ran.out
    text = page.read_text()
    assert "Other runs" in text
    assert 'id="graph"' in text
    assert run("report", made, "-o", tmp_path / "page.md").code == 0
    assert "## Plan" in (tmp_path / "page.md").read_text()
    assert "conv:weight" in run("report", made, "-o", tmp_path / "page.json", "--json").out
    assert run("report", made, "-o", tmp_path / "page.pdf").code == 2
    assert run("report", tmp_path / "nothing", "-o", page).code == 2


def test_histograms_can_be_left_out(run, small, made, tmp_path):
    assert all(row.histogram is not None for row in read_json(made / "report.json").sites)
    assert run("quantize", small, "-o", tmp_path / "out", "--no-histograms").code == 0
    assert all(row.histogram is None for row in read_json(tmp_path / "out/report.json").sites)


def test_internal_errors(run, small, monkeypatch):
    def boom(*arguments: object) -> None:
        raise ZeroDivisionError("on the way")

    monkeypatch.setattr("bitwright.graph.capture", boom)
    plain, debug = run("inspect", small), run("inspect", small, "--debug")
    assert plain.code == debug.code == 70
    assert plain.err == ("error: internal error: ZeroDivisionError: on the way; run with --debug for the traceback\n")
    assert "Traceback" in debug.err


def test_progress_is_for_terminals_only(run, small):
    assert run("inspect", small).err == ""


def test_bench(run, small, tmp_path):
    ran = run(
        "bench",
        small,
        "--runtimes",
        "onnxruntime,openvino",
        "--runs",
        3,
        "-o",
        tmp_path / "figures.json",
        "--report",
        tmp_path,
    )
    assert ran.code == 0, ran.err
    assert read_json(tmp_path / "report.json").comparison is not None
    assert 'id="runtimes"' in (tmp_path / "report.html").read_text()
    assert all(words in ran.out for words in ("fastest with batch 1: ", "p50", "p90", "p99"))
    kept = json.loads((tmp_path / "figures.json").read_text())
    assert [row["runtime"] for row in kept["runtimes"]] == ["onnxruntime", "openvino"]
    assert kept["runtimes"][0]["executed"] == {"int8": 2, "float": 0}
    assert run("bench", small, "--runtimes", "nothing").code == 2


def test_bench_refuses_what_contradicts_itself(run, small, tmp_path):
    for options, code in {
        ("--plan", tmp_path / "plan.yaml"): "option-missing",
        ("--model", tmp_path, "--plan", tmp_path / "plan.yaml"): "ignored-option",
        ("--model", tmp_path): "no-saved-model",
        ("--cores", 1, "--threads", 1): "contradicting-arguments",
    }.items():
        ran = run("bench", small, *options)
        assert (ran.code, ran.codes) == (2, [code]), ran.err
    for options, words in {
        ("--instances", 1000): "1000 × 1",
        ("--mode", "speed"): "accuracy",
    }.items():
        ran = run("bench", small, *options)
        assert (ran.code, words in ran.err) == (2, True), ran.err


def test_steps_are_listed_and_run(run, small, tmp_path):
    rows = run("list", "steps", "--json").json["steps"]
    names = {"equalize", "smoothquant", "awq", "bias-correction", "gptq", "token-clip", "adaround", "brecq", "qdrop"}
    names |= {"hqq", "imatrix", "rotate", "signround"}
    assert names <= {row["name"] for row in rows}
    assert all(row["about"] and row["problem"] is None for row in rows)
    out = tmp_path / "out"
    ran = run("quantize", small, "-o", out, "--step", "equalize", "--algorithm", "adaround:iterations=3", "--json")
    assert ran.code == 0, ran.err
    made = json.loads((out / "steps.json").read_text())
    assert [one["step"] for one in made] == ["equalize", "adaround:iterations=3"]
    assert not (out / ".steps").exists()
    # the float model is measured before steps change it
    assert ran.json["report"]["accuracies"][0]["value"] == 100.0


def test_wrong_steps_end_before_the_workload_is_opened(run, tmp_path):
    ran = run("quantize", "nowhere.py:f", "-o", tmp_path / "out", "--step", "adaroun", "--step", "gptq:dam=2", "--json")
    assert ran.code == 2
    assert len(ran.json["problems"]) == 2
    assert "'adaround'" in ran.json["error"]
    assert not (tmp_path / "out").exists()


def test_doctor_says_what_works_here_and_what_to_install(run, monkeypatch, tmp_path):
    (tmp_path / "cifar10").mkdir()
    monkeypatch.setenv("BITWRIGHT_DATA", str(tmp_path))
    from bitwright.workflows import doctor

    def data():
        return next(tool for tool in doctor._tools() if tool.tool.startswith("data"))

    assert data().found == "cifar10"
    monkeypatch.delenv("BITWRIGHT_DATA")
    assert data().found is None
    assert "set BITWRIGHT_DATA" in data().fix
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "openvino" else "1.0")
    lacking = {extra.extra: extra.fix for extra in doctor._extras()}
    assert lacking["openvino"] == "pip install 'bitwright[openvino]'"
    assert lacking["postgresql"] is None
    assert "test" not in lacking
    monkeypatch.setenv("PATH", str(tmp_path))
    tools = {tool.tool: tool for tool in doctor._tools()}
    assert tools["C++ compiler"].found is None
    assert "g++" in tools["C++ compiler"].fix
