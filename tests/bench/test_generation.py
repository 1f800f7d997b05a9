"""Prefill and decode speed of decoders on four runtimes, and `check` and `bench` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.language_models import write_folder, write_text
from typer.testing import CliRunner

import bitwright as bw
from bitwright.bench.benchmark import _wanted
from bitwright.bench.comparison import Skipped
from bitwright.cli import app
from bitwright.deployment.measurement import measure_generation

for _package in ("transformers", "gguf", "xllamacpp", "compressed_tensors"):
    pytest.importorskip(_package)
RUNTIMES = ("onnxruntime", "openvino", "llamacpp", "transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tiny model, and the folder of its quantization."""
    folder = tmp_path_factory.mktemp("decoder")
    source = write_folder(folder / "tiny", num_hidden_layers=1)
    reference = f"hf:{source},text={write_text(folder / 'text.txt')},sequence=24,samples=4"
    workload = bw.load_workload(reference)
    made = bw.quantize(workload.model, workload.calibration, "w4a16", group=32, example=workload.inputs, measure=False)
    made.save(folder / "out")
    return reference, folder / "out"


@pytest.mark.slow  # the memory is measured in a process for each of eight artefacts
def test_four_runtimes_are_measured_in_one_table(saved: tuple[str, Path]) -> None:
    reference, folder = saved
    workload = bw.load_workload(reference)
    comparison = bw.benchmark(workload, RUNTIMES, runs=2, warmup=0, saved=folder)
    assert comparison.skipped == ()
    assert [one.runtime for one in comparison.runtimes if one.parity.passed] == list(RUNTIMES)
    measured = {(row.runtime, row.variant) for row in comparison.generation}
    assert measured == {(name, variant) for name in RUNTIMES for variant in ("float", "quantized")}
    for row in comparison.generation:
        assert row.prompt == 24
        assert row.prefill > row.decode > 0
        assert row.memory > 0
    accuracies = [one.accuracies[1].value for one in comparison.runtimes]
    assert max(accuracies) < 1.01 * min(accuracies)
    assert "decode, tokens/s" in str(list(comparison.summary())[2].heads)  # type: ignore[union-attr]


def test_runtimes_without_a_cache_are_left_out(tmp_path: Path) -> None:
    model, ids = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 4)), torch.zeros(1, 3).long()
    bw.export_float(model, tmp_path / "model.onnx", ids)
    opened = {"plain": bw.open_runtime("onnxruntime", tmp_path / "model.onnx")}
    assert measure_generation(opened, ids.numpy(), tokens=1, runs=1) == {}


def test_decoders_are_measured_in_turns(saved: tuple[str, Path], tmp_path: Path) -> None:
    reference, folder = saved
    workload = bw.load_workload(reference)
    made = bw.load(folder, reference)
    made.export(tmp_path / "m.gguf")
    files = {"onnxruntime": folder, "openvino": folder, "llamacpp": tmp_path / "m.gguf"}
    opened = {name: bw.open_runtime(name, path, threads=1) for name, path in files.items()}
    speeds = measure_generation(opened, workload.inputs["input_ids"][:1].numpy(), tokens=2, runs=2)
    assert sorted(speeds) == sorted(files)
    assert {speed.prompt for speed in speeds.values()} == {24}
    assert min(speed.prefill for speed in speeds.values()) > 0 < min(speed.decode for speed in speeds.values())


def test_other_models_are_not_compared_on_runtimes_of_decoders() -> None:
    skipped: list[Skipped] = []
    of_decoders = {"llamacpp", "transformers"}
    assert set(_wanted(None, skipped, decoder=True)) - set(_wanted(None, skipped, decoder=False)) == of_decoders
    assert _wanted(["llamacpp"], skipped, decoder=False) == ["llamacpp"]


@pytest.mark.parametrize(
    ("artefact", "options", "runtime"),
    [("m.gguf", (), "llamacpp"), ("packed", ("--artefact", "compressed-tensors"), "transformers")],
)
def test_export_and_check_on_the_command_line(
    saved: tuple[str, Path],
    artefact: str,
    options: tuple[str, ...],
    runtime: str,
    tmp_path: Path,
) -> None:
    reference, folder = saved
    path = str(tmp_path / artefact)
    written = CliRunner().invoke(app, ["export", reference, "--model", str(folder), "-o", path, *options])
    assert written.exit_code == 0, written.output
    ran = CliRunner().invoke(app, ["check", reference, path, "--model", str(folder), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    found = found[0] if isinstance(found, list) else found
    assert (found["runtime"], found["passed"]) == (runtime, True)
    assert found["distance"]["outputs"]
    assert {output["name"] for output in found["outputs"]} == {"logits", "prompt", "decoding"}
