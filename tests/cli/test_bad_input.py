"""Bad input: one clear message, an exit code that isn't 0, no traceback, nothing half-written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bitwright.core.registry import RUNTIMES

PLAN = "bitwright: 1\nsites:\n  conv:weight: int8/channel/sym\n  conv:input: uint8/tensor/asym\n"


def fails(ran, *words: str, code: int = 2) -> None:
    assert ran.code == code, (ran.out, ran.err)
    assert ran.err.count("error: ") == 1
    assert "Traceback" not in ran.err + ran.out
    for word in words:
        assert word in ran.err


@pytest.fixture
def output(tmp_path: Path):
    """Where a verb would write; afterwards there must be nothing, not even a temporary file."""
    folder = tmp_path / "results"
    yield folder / "out"
    assert not folder.exists() or not list(folder.rglob("*"))


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nowhere.py:small", ["the workload file does not exist", "nowhere.py"]),
        ("digit", ["unknown workload", "did you mean 'digits'"]),
        ("{file}:smal", ["no function 'smal'", "did you mean 'small'"]),
        ("{file}", ["names no function"]),
        ("{file}:empty", ["yields no batch"]),
        ("{file}:nan", ["NaN in the calibration data", "conv:input"]),
        ("{file}:broken_loader", ["calibration loader raised FileNotFoundError", "0001.jpg"]),
        ("{file}:no_calibration", ["no calibration data"]),
        ("{file}:words", ["returned no tensor", "'str'"]),
        ("{file}:fails", ["the model fails on its own example inputs", "RuntimeError"]),
    ],
)
def test_workloads(run, workloads, output, reference, words):
    fails(run("quantize", reference.format(file=workloads), "-o", output), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["can't read the plan", "plan.yaml"]),
        ("sites: [", ["not valid YAML", "plan.yaml:1"]),
        ("- 1\n", ["a plan must be a mapping"]),
        ("bitwright: 7\n", ["unsupported schema version", "7"]),
        ("bitwright: 1\nsite: {}\n", ["did you mean 'sites'"]),
        (PLAN.replace("conv:input", "convv:input"), ["no such site", "did you mean 'conv:input'"]),
        (PLAN.replace("uint8/", "uint9x/"), ["unknown number format", "uint9x"]),
        (PLAN + "  head:weight: {format: int8, observer: minmaxx}\n", ["did you mean 'minmax'"]),
        (PLAN + "backend: onnxruntim\n", ["unknown backend", "did you mean 'onnxruntime'"]),
        (PLAN.replace("uint8/tensor/asym", "int12/tensor/sym"), ["can't run this format here"]),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_plans(run, small, tmp_path, output, verb, text, words):
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    fails(run(verb, small, "--plan", path, "-o", output), *words)


def test_all_problems_of_a_plan_are_listed(run, small, tmp_path, output):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN + "  heat:weight: int8\n  head:weight: {format: int8, observer: nope}\n")
    ran = run("quantize", small, "--plan", path, "-o", output)
    fails(ran, "(2)", "heat:weight", "nope")
    machine = run("quantize", small, "--plan", path, "-o", output, "--json").json
    assert len(machine["problems"]) == 2


@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_wrong_names_hide_no_wrong_formats(run, small, tmp_path, output, verb):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("uint8", "int12") + "  heat:weight: int8\n  'hea*:weight': int8/channel/sym\n")
    fails(run(verb, small, "--plan", path, "-o", output), "(2)", "heat:weight", "can't run this format here")


def test_a_plan_of_another_model_is_named(run, small, made, tmp_path, output):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN + "  heat:weight: int8\nmodel: another\n")
    message = "it was made for 'another', but this model is 'small'"
    fails(run("quantize", small, "--plan", path, "-o", output), message)
    sources = ["--plan", path, "--checkpoint", made / "checkpoint.safetensors"]
    fails(run("check", small, made / "model.onnx", *sources), message)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "onnxruntim"], ["unknown backend", "did you mean 'onnxruntime'"]),
        (["--backend", "nowhere.yaml"], ["can't read the backend table"]),
        (["--weights", "int99"], ["int99"]),
        (["--weights", "bf16"], ["onnxruntime can't run this weight format"]),
        (["--activations", "uint8/tensr"], ["did you mean 'tensor'"]),
        (["--observer", "minmaxx"], ["unknown observer", "did you mean 'minmax'"]),
        (["--weight-observer", "mze"], ["unknown observer", "did you mean 'mse'"]),
        (["--fold", "9"], ["unknown folding strategy", "-1 (no folding)", "4 (folded for rounding"]),
        (["--quantizer", "lsqq"], ["unknown quantizer", "did you mean 'lsq'"]),
        (["--weight-quantizer", "dorefaa"], ["unknown quantizer", "did you mean 'dorefa'"]),
        (["--quantizer", "apot"], ["Apot supports only symmetric formats", "use int8/tensor/sym"]),
        (["--keep-float", "hed"], ["matches no operator", "did you mean 'head'"]),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_plan_options(run, small, output, verb, options, words):
    ran = run(verb, small, *options, "-o", output)
    fails(ran, *words)
    assert ran.err.count("fix: ") <= 1, "one problem, not one for each site"


def test_all_problems_of_options_are_listed(run, small, output):
    options = ["--weights", "int8/chanel", "--observer", "mmse", "--keep-float", "hed", "--fold", "9"]
    ran = run("quantize", small, *options, "-o", output)
    fails(ran, "(4)", "did you mean 'channel'", "did you mean 'mse'", "did you mean 'head'", "folding strategy")


NO_PAIRS = ["this quantizer has levels that QuantizeLinear can't write", "keep these sites in float"]


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        (["--quantizer", "nnie"], ["conv:input, conv:weight, ", ", head:weight: ", "(got 'nnie')"]),
        (["--weight-quantizer", "apot"], ["conv:weight, head:weight: ", "(got 'apot')"]),
        (["--quantizer", "qil"], ["conv:input, /relu#0:output, /mean#0:output: ", "(got 'qil')"]),
        (["--quantizer", "nnie", "--weight-quantizer", "apot"], ["(got 'nnie')", "(got 'apot')"]),
    ],
)
def test_levels_that_no_artefact_has_are_found_before_calibration(run, small, output, monkeypatch, options, sites):
    def never(*args, **kwargs):
        raise AssertionError("this is long work")

    monkeypatch.setattr("bitwright.ptq.quantize.find_ranges", never)
    monkeypatch.setattr("bitwright.workflows.deployment.evaluate", never)
    ran = run("quantize", small, *options, "--activations", "int8/tensor/sym", "-o", output)
    fails(ran, *NO_PAIRS, *sites)
    assert ran.err.count("fix: ") == sum(option.endswith("quantizer") for option in options)


def test_levels_that_no_artefact_has_can_be_planned(run, small, tmp_path, output):
    plan = tmp_path / "plan.yaml"
    ran = run("plan", small, "--quantizer", "nnie", "--activations", "int8/tensor/sym", "-o", plan)
    assert ran.code == 0, ran.err
    fails(run("quantize", small, "--plan", plan, "-o", output), *NO_PAIRS)


def test_plan_options_beside_a_plan(run, small, made, output):
    ran = run("quantize", small, "--plan", made / "plan.yaml", "--observer", "mse", "-o", output)
    assert (ran.code, ran.codes) == (2, ["ignored-option"])


@pytest.mark.parametrize("verb", ["plan", "quantize", "export"])
def test_output_that_cannot_be_written(run, small, tmp_path, verb):
    file = tmp_path / "file"
    file.write_text("here")
    options = ["--float"] if verb == "export" else []
    fails(run(verb, small, *options, "-o", file / "out"), "file", "fix: choose another folder", str(file))
    assert file.read_text() == "here"
    if os.geteuid() != 0:  # root may write anywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        fails(run(verb, small, *options, "-o", locked / "out"), "can't write there", "Permission denied")


@pytest.mark.parametrize("verb", ["plan", "export"])
def test_output_that_is_a_folder(run, small, tmp_path, verb):
    options = ["--float"] if verb == "export" else []
    fails(run(verb, small, *options, "-o", tmp_path), str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"no model at all" * 20, None, "half"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "all"])
def test_artefacts(run, small, made, tmp_path, content, runtime):
    path = tmp_path / "model.onnx"
    if content == "half":
        content = (made / "model.onnx").read_bytes()[:900]
    if content is not None:
        path.write_bytes(content)
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    fails(run("check", small, path, *sources, "--runtime", runtime), "artefact", str(path))


def test_an_artefact_of_another_model(run, workloads, small, made, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(
        "import torch\nfrom bitwright import Workload\n"
        "def build():\n"
        "    return Workload(name='o', model=torch.nn.Linear(4, 2), inputs=(torch.ones(1, 4),))\n"
    )
    path = tmp_path / "other.onnx"
    assert run("export", f"{other}:build", "--float", "-o", path).code == 0
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    fails(run("check", small, path, *sources))


def test_an_artefact_of_another_runtime_names_it(run, small, made, tmp_path):
    """ONNX Runtime was given whatever there was, and the fix was to export it again."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"a program")
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    ran = run("check", small, path, *sources, "--runtime", "onnxruntime")
    fails(ran, "onnxruntime reads .onnx files", "--runtime inductor")
    fails(run("check", small, path, *sources), "model.pt2")


def test_a_runtime_that_is_not_here_writes_no_file(run, small, made, output, monkeypatch):
    """model.pte was ONNX by content where ExecuTorch isn't installed, without a word."""
    kind = RUNTIMES.get("executorch")
    monkeypatch.setattr(kind, "missing", staticmethod(lambda: "the package executorch is not installed"))
    output = output.with_suffix(".pte")
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    for options in (sources, ["--float"]):
        ran = run("export", small, *options, "-o", output)
        fails(ran, "no available runtime reads this file", "executorch is not installed", "bitwright doctor")


def test_an_unknown_runtime(run, small, made):
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    fails(
        run("check", small, made / "model.onnx", *sources, "--runtime", "onnxruntim"),
        "unknown runtime",
        "did you mean 'onnxruntime'",
    )


def test_checkpoints(run, small, made, tmp_path, output):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((made / "checkpoint.safetensors").read_bytes()[:500])
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(PLAN)
    for plan, checkpoint, word in (
        (made / "plan.yaml", damaged, "can't be read"),
        (made / "plan.yaml", tmp_path / "none.safetensors", "the checkpoint doesn't exist"),
        (fewer, made / "checkpoint.safetensors", "the checkpoint has a quantizer, but the plan has none here"),
    ):
        fails(run("export", small, "--plan", plan, "--checkpoint", checkpoint, "-o", output), word)
    assert run("export", small, "-o", output).codes == ["option-missing"]


def test_a_checkpoint_without_ranges(run, small, made, tmp_path, output):
    import bitwright

    floats = bitwright.save_checkpoint(bitwright.load_workload(small).model, tmp_path / "float.safetensors")
    fails(
        run("export", small, "--plan", made / "plan.yaml", "--checkpoint", floats, "-o", output),
        "doesn't have all ranges",
        "conv:weight",
    )


def test_usage(run):
    assert run("quantise").code == 2
    assert run("plan").code == 2
    assert run("list", "observer").code == 2
