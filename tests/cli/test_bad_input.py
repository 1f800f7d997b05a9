"""Bad input: one clear message, an exit code that isn't 0, no traceback, nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bitwright.core.registry import RUNTIMES

PLAN = "bitwright: 1\nsites:\n  conv:weight: int8/channel/sym\n  conv:input: uint8/tensor/asym\n"


def fails(ran, *codes: str, facts: Sequence[str] = (), code: int = 2) -> None:
    """Check that a verb reported these problems, and that the message contains these names, values or suggestions."""
    assert ran.code == code, (ran.out, ran.err)
    assert ran.err.count("error: ") == 1
    assert "Traceback" not in ran.err + ran.out
    assert sorted(ran.codes) == sorted(codes), ran.err
    for fact in facts:
        assert fact in ran.err


@pytest.fixture
def output(tmp_path: Path):
    """Where a verb would write; afterwards there must be nothing, not even a temporary file."""
    folder = tmp_path / "results"
    yield folder / "out"
    assert not folder.exists() or not list(folder.rglob("*"))


@pytest.mark.parametrize(
    ("reference", "code", "facts"),
    [
        ("nowhere.py:small", "workload-file-missing", ["nowhere.py"]),
        ("digit", "unknown-name", ["'digits'"]),
        ("{file}:smal", "unknown-function", ["'smal'", "'small'"]),
        ("{file}", "invalid-reference", []),
        ("{file}:empty", "no-data", []),
        ("{file}:nan", "not-finite", ["conv:input"]),
        ("{file}:broken_loader", "user-code-failed", ["FileNotFoundError", "0001.jpg"]),
        ("{file}:no_calibration", "no-calibration-data", []),
        ("{file}:words", "no-tensor", ["'str'"]),
        ("{file}:fails", "model-fails", ["RuntimeError"]),
    ],
)
def test_workloads(run, workloads, output, reference, code, facts):
    fails(run("quantize", reference.format(file=workloads), "-o", output), code, facts=facts)


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        (None, "unreadable-file", ["plan.yaml"]),
        ("sites: [", "invalid-yaml", ["plan.yaml:1"]),
        ("- 1\n", "not-a-mapping", ["plan.yaml"]),
        ("bitwright: 7\n", "wrong-version", ["7"]),
        ("bitwright: 1\nsite: {}\n", "unknown-key", ["'sites'"]),
        (PLAN.replace("conv:input", "convv:input"), "unknown-site", ["convv:input", "'conv:input'"]),
        (PLAN.replace("uint8/", "uint9x/"), "unknown-format", ["conv:input", "uint9x"]),
        (PLAN + "  head:weight: {format: int8, observer: minmaxx}\n", "unknown-name", ["head:weight", "'minmax'"]),
        (PLAN + "backend: onnxruntim\n", "unknown-name", ["'onnxruntime'"]),
        (PLAN.replace("uint8/tensor/asym", "int12/tensor/sym"), "unsupported-format", ["conv:input"]),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_plans(run, small, tmp_path, output, verb, text, code, facts):
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    fails(run(verb, small, "--plan", path, "-o", output), code, facts=facts)


def test_all_problems_of_a_plan_are_listed(run, small, tmp_path, output):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN + "  heat:weight: int8\n  head:weight: {format: int8, observer: nope}\n")
    ran = run("quantize", small, "--plan", path, "-o", output)
    fails(ran, "unknown-name", "unknown-site", facts=["heat:weight", "nope"])
    machine = run("quantize", small, "--plan", path, "-o", output, "--json").json
    assert len(machine["problems"]) == 2


@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_wrong_names_hide_no_wrong_formats(run, small, tmp_path, output, verb):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("uint8", "int12") + "  heat:weight: int8\n  'hea*:weight': int8/channel/sym\n")
    ran = run(verb, small, "--plan", path, "-o", output)
    fails(ran, "unknown-site", "unsupported-format", facts=["heat:weight", "conv:input"])


def test_a_plan_of_another_model_is_named(run, small, made, tmp_path, output):
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN + "  heat:weight: int8\nmodel: another\n")
    models = ["'another'", "'small'"]
    fails(run("quantize", small, "--plan", path, "-o", output), "unknown-site", facts=models)
    sources = ["--plan", path, "--checkpoint", made / "checkpoint.safetensors"]
    fails(run("check", small, made / "model.onnx", *sources), "unknown-site", facts=models)


@pytest.mark.parametrize(
    ("options", "code", "facts"),
    [
        (["--backend", "onnxruntim"], "unknown-name", ["'onnxruntime'"]),
        (["--backend", "nowhere.yaml"], "unreadable-file", ["nowhere.yaml"]),
        (["--weights", "int99"], "invalid-format", ["int99"]),
        (["--weights", "bf16"], "unsupported-format", ["onnxruntime"]),
        (["--activations", "uint8/tensr"], "invalid-format", ["'tensor'"]),
        (["--observer", "minmaxx"], "unknown-name", ["observer: ", "'minmax'"]),
        (["--weight-observer", "mze"], "unknown-name", ["weight_observer: ", "'mse'"]),
        (["--fold", "9"], "unknown-folding-strategy", ["-1 (no folding)", "4 (folded for rounding"]),
        (["--quantizer", "lsqq"], "unknown-name", ["quantizer: ", "'lsq'"]),
        (["--weight-quantizer", "dorefaa"], "unknown-name", ["weight_quantizer: ", "'dorefa'"]),
        (["--quantizer", "apot"], "unsupported-format", ["Apot", "int8/tensor/sym"]),
        (["--keep-float", "hed"], "unknown-operator", ["'head'"]),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "quantize"])
def test_plan_options(run, small, output, verb, options, code, facts):
    ran = run(verb, small, *options, "-o", output)
    fails(ran, code, facts=facts)
    assert ran.err.count("fix: ") <= 1, "one problem, not one for each site"


def test_all_problems_of_options_are_listed(run, small, output):
    options = ["--weights", "int8/chanel", "--observer", "mmse", "--keep-float", "hed", "--fold", "9"]
    ran = run("quantize", small, *options, "-o", output)
    codes = ["unknown-name", "invalid-format", "unknown-operator", "unknown-folding-strategy"]
    fails(ran, *codes, facts=["'channel'", "'mse'", "'head'"])


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
    fails(ran, *["unsupported-levels"] * sum(option.endswith("quantizer") for option in options), facts=sites)


def test_levels_that_no_artefact_has_can_be_planned(run, small, tmp_path, output):
    plan = tmp_path / "plan.yaml"
    ran = run("plan", small, "--quantizer", "nnie", "--activations", "int8/tensor/sym", "-o", plan)
    assert ran.code == 0, ran.err
    fails(run("quantize", small, "--plan", plan, "-o", output), "unsupported-levels")


def test_plan_options_beside_a_plan(run, small, made, output):
    ran = run("quantize", small, "--plan", made / "plan.yaml", "--observer", "mse", "-o", output)
    assert (ran.code, ran.codes) == (2, ["ignored-option"])


@pytest.mark.parametrize("verb", ["plan", "quantize", "export"])
def test_output_that_cannot_be_written(run, small, tmp_path, verb):
    file = tmp_path / "file"
    file.write_text("here")
    options = ["--float"] if verb == "export" else []
    fails(run(verb, small, *options, "-o", file / "out.onnx"), "not-a-folder", facts=[str(file)])
    assert file.read_text() == "here"
    if os.geteuid() != 0:  # root may write anywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        fails(run(verb, small, *options, "-o", locked / "out.onnx"), "not-writable", facts=[str(locked)])


@pytest.mark.parametrize("verb", ["plan", "export"])
def test_output_that_is_a_folder(run, small, tmp_path, verb):
    options = ["--float"] if verb == "export" else []
    folder = tmp_path / "model.onnx"
    folder.mkdir()
    fails(run(verb, small, *options, "-o", folder), "is-a-folder", facts=[str(folder)])
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty-artefact"),
        (b"no model at all" * 20, "damaged-artefact"),
        (None, "no-such-artefact"),
        ("half", "damaged-artefact"),
    ],
)
@pytest.mark.parametrize("runtime", ["onnxruntime", "all"])
def test_artefacts(run, small, made, tmp_path, content, code, runtime):
    path = tmp_path / "model.onnx"
    if content == "half":
        content = (made / "model.onnx").read_bytes()[:900]
    if content is not None:
        path.write_bytes(content)
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    fails(run("check", small, path, *sources, "--runtime", runtime), code, facts=[str(path)])


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
    fails(run("check", small, path, *sources), "runtime-failed")


def test_an_artefact_of_another_runtime_names_it(run, small, made, tmp_path):
    """ONNX Runtime was given whatever there was, and the fix was to export it again."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"a program")
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    ran = run("check", small, path, *sources, "--runtime", "onnxruntime")
    fails(ran, "other-runtime", facts=[".onnx", "--runtime inductor"])
    fails(run("check", small, path, *sources), "damaged-artefact", facts=["model.pt2"])


def test_a_runtime_that_is_not_here_writes_no_file(run, small, made, output, monkeypatch):
    """model.pte was ONNX by content where ExecuTorch isn't installed, without a word."""
    kind = RUNTIMES.get("executorch")
    monkeypatch.setattr(kind, "missing", staticmethod(lambda: "the package executorch is not installed"))
    output = output.with_suffix(".pte")
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    for options in (sources, ["--float"]):
        ran = run("export", small, *options, "-o", output)
        fails(ran, "runtime-unavailable", facts=["executorch is not installed", "bitwright doctor"])


def test_an_unknown_runtime(run, small, made):
    sources = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    fails(
        run("check", small, made / "model.onnx", *sources, "--runtime", "onnxruntim"),
        "unknown-name",
        facts=["'onnxruntime'"],
    )


def test_checkpoints(run, small, made, tmp_path, output):
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((made / "checkpoint.safetensors").read_bytes()[:500])
    fewer = tmp_path / "fewer.yaml"
    fewer.write_text(PLAN)
    for plan, checkpoint, codes in (
        (made / "plan.yaml", damaged, ["damaged-checkpoint"]),
        (made / "plan.yaml", tmp_path / "none.safetensors", ["no-such-checkpoint"]),
        (fewer, made / "checkpoint.safetensors", ["unexpected-quantizer"] * 3),
    ):
        fails(run("export", small, "--plan", plan, "--checkpoint", checkpoint, "-o", f"{output}.onnx"), *codes)
    assert run("export", small, "-o", f"{output}.onnx").codes == ["option-missing"]


def test_a_checkpoint_without_ranges(run, small, made, tmp_path, output):
    import bitwright

    floats = bitwright.save_checkpoint(bitwright.load_workload(small).model, tmp_path / "float.safetensors")
    ran = run("export", small, "--plan", made / "plan.yaml", "--checkpoint", floats, "-o", f"{output}.onnx")
    fails(ran, *["no-range"] * 7, facts=["conv:weight"])


def test_usage(run):
    assert run("quantise").code == 2
    assert run("plan").code == 2
    assert run("list", "observer").code == 2


def test_a_plan_with_problems_of_schema_and_model_lists_both(run, small, tmp_path, output):
    text = "bitwright: 1\nfolds: {}\nsites:\n  con:weight: int8/channel/sym\n  conv:weight: int8/channel/sym\n"
    (tmp_path / "plan.yaml").write_text(text)
    ran = run("quantize", small, "--plan", tmp_path / "plan.yaml", "-o", output)
    fails(ran, "unknown-key", "unknown-site", facts=["'fold'", "'conv:weight'"])


def test_formats_of_kernels_need_an_indicator(run, small, output):
    fails(run("score", small, "--formats", "int8"), "option-missing", facts=["--indicator"])
    fails(run("score", small, "-o", f"{output}.json"), "wrong-suffix", facts=["--indicator"])


def test_an_artefact_of_an_unknown_kind(run, small, output):
    fails(run("export", small, "--float", "-o", f"{output}.xyz"), "unknown-suffix", facts=[".onnx"])


def test_a_file_system_that_takes_no_files(run, small):
    fails(run("plan", small, "-o", "/proc/bitwright.yaml"), "no-permission", facts=["/proc"])


def test_a_missing_workload_is_found_before_torch_is_imported():
    code = (
        "import sys; from bitwright.cli import main; sys.argv = ['bitwright', 'quantize'];"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (2, "False"), ran.stderr
