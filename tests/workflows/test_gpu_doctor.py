"""`doctor --gpu` on simulated devices, and on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bitwright
from bitwright.kernels import products
from bitwright.kernels.triton import launch
from bitwright.workflows import gpu_doctor
from bitwright.workflows.gpu_doctor import GpuDiagnosis, KernelCheck, Rate, StepTime, device_facts, diagnose_gpu

T4 = SimpleNamespace(name="Tesla T4", major=7, minor=5, multi_processor_count=40, total_memory=15 << 30)
H100 = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
V100 = SimpleNamespace(name="Tesla V100", major=7, minor=0, multi_processor_count=80, total_memory=16 << 30)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The properties that torch reports for a GPU."""
    facts = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (facts.major, facts.minor))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch, "_first_product", lambda device: None)
    launch._missing_on.cache_clear()
    yield facts
    launch._missing_on.cache_clear()


@pytest.mark.parametrize(
    ("device", "capability", "int8", "convolutions", "fp8"),
    [
        (T4, "7.5", "cuBLAS and Triton", "cuBLAS and Triton", "simulated: compute capability 7.5"),
        (H100, "9.0", "Triton", "Triton", "cuBLAS"),
        (V100, "7.0", "cuBLAS", "need Triton", "simulated: compute capability 7.0"),
    ],
    indirect=["device"],
)
def test_a_device_says_what_multiplies_on_it(
    device: Any, capability: str, int8: str, convolutions: str, fp8: str
) -> None:
    facts = device_facts(torch.device("cuda"))
    assert (facts.name, facts.capability, facts.processors) == (device.name, capability, device.multi_processor_count)
    assert facts.memory == device.total_memory
    assert facts.engines["int8"] == int8
    assert convolutions in facts.engines["int8, convolutions"]
    assert facts.engines["fp8"].startswith(fp8)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two measurements of each run instead of half a second."""

    def seconds(self: Any, run: Any) -> float:
        run()
        run()
        return 1e-3

    monkeypatch.setattr(gpu_doctor._Measurement, "seconds", seconds)


@pytest.mark.skipif(products.missing() is not None, reason=f"no integer products: {products.missing()}")
def test_everything_is_measured_on_a_cpu_and_written(quick: None, tmp_path: Path) -> None:
    found = diagnose_gpu("cpu")
    assert found.failures() == []
    assert not found.skipped
    names = [check.name for check in found.checks]
    assert len(names) == len(set(names)) == 24
    assert {"codes, stochastic", "strided convolution, gradient of the input", "linear"} <= set(names)
    assert {(step.model, step.format) for step in found.steps} >= {
        ("convolutions", "float32"),
        ("convolutions", "int8"),
        ("linear layers", "int8"),
    }
    assert {rate.unit for rate in found.rates} == {"GB/s", "TFLOP/s"}
    data, page = found.save(tmp_path)
    written = json.loads(data.read_text())
    assert written["version"] == 1
    assert written["checks"][0]["problem"] is None
    html = page.read_text()
    assert "strided convolution" in html
    assert "Training steps" in html
    for secret in (str(Path.home()), str(tmp_path)):
        assert secret not in data.read_text()


def test_a_wrong_kernel_is_found_and_a_broken_one_hides_nothing(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = products.conv2d

    def wrong(*args: Any, simulate: bool, **kwargs: Any) -> torch.Tensor:
        return real(*args, simulate=simulate, **kwargs) * (1 if simulate else 1.01)

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("out of registers\nat line 3")

    monkeypatch.setattr(products, "conv2d", wrong)
    monkeypatch.setattr(products, "transposed", broken)
    monkeypatch.setattr(gpu_doctor._Measurement, "rate", lambda self: None)
    monkeypatch.setattr(gpu_doctor._Measurement, "step", lambda self: None)
    failures = diagnose_gpu("cpu").failures()
    assert "linear, gradient of the weight: RuntimeError: out of registers" in failures
    assert any(text.startswith("convolution: the error exceeds") for text in failures)
    assert not any(text.startswith(("codes", "linear:")) for text in failures)


def test_the_time_limit_leaves_the_rest_out() -> None:
    found = diagnose_gpu("cpu", minutes=0)
    assert (found.checks, found.rates, found.steps) == ([], [], [])
    assert "convolution: the time limit" in found.skipped
    assert any(text.startswith("linear layers in int8") for text in found.skipped)


def test_the_verb_writes_both_files_and_fails_for_wrong_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from bitwright.cli import app

    facts = device_facts(torch.device("cpu"))
    wrong = GpuDiagnosis(
        device=facts,
        checks=[KernelCheck(name="linear", error=0.5, problem="the error exceeds 1e-05")],
        rates=[Rate(what="copy", format="float32", milliseconds=1.0, rate=300.0, unit="GB/s")],
        steps=[StepTime(model="m", format="int8", milliseconds=2.0, of_float=0.5, peak_bytes=1 << 20, notes=[])],
        skipped=["x: the time limit"],
    )
    asked = []
    monkeypatch.setattr(gpu_doctor, "diagnose_gpu", lambda **options: asked.append(options["minutes"]) or wrong)
    ran = CliRunner().invoke(app, ["doctor", "--gpu", "--minutes", "2", "-o", str(tmp_path / "out")])
    assert ran.exit_code == 1
    assert asked == [2.0]
    assert "the error exceeds" in ran.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu-doctor.html", "gpu-doctor.json"]


def test_it_is_public() -> None:
    assert bitwright.diagnose_gpu is diagnose_gpu
