"""Runtimes of torch's own programs: integer kernels really run, and every site has what the simulation has."""

from __future__ import annotations

from logging import ERROR, getLogger
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.backends import BackendTable
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import Runtime, available_runtimes, measurement, saturates
from bitwright.quantizers import weights_may_change
from bitwright.reports import environment

REASONS = available_runtimes()


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(REASONS[name] is not None, reason=f"{name}: {REASONS[name]}")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        return self.head(x.mean((2, 3)))


def table(activations: str) -> BackendTable:
    """ONNX Runtime's table, with outputs behind linears and these activations."""
    ort = bw.backend("onnxruntime")
    linear = ort.operators["linear"].model_copy(update={"output": True})
    return ort.model_copy(
        update={
            "activations": ort.activations.model_copy(update={"format": activations}),
            "operators": {**ort.operators, "linear": linear},
        }
    )


def quantized_for(kind: type[Runtime], batches: list[Tensor]) -> bw.Quantized:
    torch.manual_seed(0)
    net = Net()
    for batch in batches:
        net(batch)  # statistics worth folding
    graph = bw.capture(net.eval(), batches[0])
    plan = bw.make_plan(graph, table(kind.activations), saturating=True)
    return bw.quantize(net, batches, plan=plan)


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(n)) for n in ("inductor", "executorch")])
def test_integers_run_and_every_site_agrees(name: str, batches: list[Tensor], tmp_path: Path) -> None:
    kind: type[Runtime] = RUNTIMES.get(name)
    quantized = quantized_for(kind, batches)
    path = tmp_path / f"model{kind.suffix}"
    kind.write(quantized.model, path, batches[0])
    opened = bw.open_runtime(name, path, threads=1)
    assert opened.executed() == {"int8": 2, "float": 0}
    assert opened.batch == 8
    with torch.no_grad():
        expected = quantized.model(torch.cat(batches)[:11])
    torch.testing.assert_close(opened(torch.cat(batches)[:11]), expected, rtol=1e-5, atol=1e-5)  # piece by piece
    with raises_problem("runtime-failed", mentions="batch is 3"):
        opened.run(opened.feed(batches[0][:3]))
    result = quantized.check(path, batches, runtime=name, per_site=True)
    assert result.passed
    assert result.first_divergence is None
    assert result.unseen == ()
    assert all(site.differing == 0 for site in result.sites)
    assert {site.site for site in result.sites} == {site for site, _ in quantized.plan.quantized}
    assert result.probe is not None
    assert result.probe.outputs_identical


@pytest.mark.slow
@needs("inductor")
def test_a_damaged_program_is_named_at_its_site(batches: list[Tensor], tmp_path: Path) -> None:
    kind: type[Runtime] = RUNTIMES.get("inductor")
    quantized = quantized_for(kind, batches)
    path = tmp_path / "model.pt2"
    kind.write(quantized.model, path, batches[0])
    with torch.no_grad(), weights_may_change(quantized.model):
        quantized.model.head.weight[0, 0] += 0.5  # the artefact now has another weight than the model
        result = quantized.check(path, batches[:1], runtime="inductor", per_site=True)
    assert result.first_divergence == "head:weight"
    assert not result.passed


@needs("inductor")
def test_a_program_has_neither_float_weights_nor_traces(batches: list[Tensor], tmp_path: Path) -> None:
    kind: type[Runtime] = RUNTIMES.get("inductor")
    quantized = quantized_for(kind, batches)
    kind.write(quantized.model, tmp_path / "model.pt2", batches[0])
    program = torch.export.load(tmp_path / "model.pt2")
    large = [name for name, value in program.state_dict.items() if value.dtype.is_floating_point and value.numel() > 8]
    assert not large
    assert str(Path(__file__).parent) not in (tmp_path / "model.pt2").read_bytes().decode("latin-1")


@needs("inductor")
def test_what_the_compiler_refuses_is_told_once_with_its_cause(
    batches: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cause is on the second line of torch's error, after a traceback in its log."""
    kind: type[Runtime] = RUNTIMES.get("inductor")
    path = tmp_path / "model.pt2"
    kind.write(quantized_for(kind, batches).model, path, batches[0])

    def refuse(*_: object, **__: object) -> None:
        getLogger("torch._subclasses.fake_tensor").error("Traceback")
        raise RuntimeError("backend='inductor' raised:\nRuntimeError: 40 is not 36\n\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(torch, "compile", refuse)
    with raises_problem("artefact-not-loadable", mentions="RuntimeError: 40 is not 36"):
        bw.open_runtime("inductor", path)
    assert not [record for record in caplog.records if record.levelno >= ERROR]


@needs("inductor")
def test_formats_without_integer_kernels_are_refused(batches: list[Tensor], tmp_path: Path) -> None:
    quantized = bw.quantize(nn.Sequential(nn.Linear(8, 4)).eval(), [torch.randn(4, 8)], weights="int4/group4/sym")
    with raises_problem("unsupported-format", where="0:weight"):
        RUNTIMES.get("inductor").write(quantized.model, tmp_path / "model.pt2", torch.randn(4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(n)) for n in ("inductor", "executorch")])
def test_saturation_is_measured(name: str) -> None:
    """XNNPACK adds up in 32 bits on every CPU, inductor's kernels where the CPU has instructions for it."""
    exact = {"avx512_vnni", "avx_vnni", "amx_int8"} & set(environment().cpu_features)
    if name == "inductor" and not exact:
        pytest.skip("this CPU has no instruction for exact 8-bit products")
    assert saturates.__wrapped__(name) is False


@pytest.mark.parametrize(("value", "lossy"), [(16.0, False), (16.2, False), (15.0, True), (8.03, True)])
def test_lost_bits_are_seen(monkeypatch: pytest.MonkeyPatch, value: float, lossy: bool) -> None:
    """A runtime whose sums of 16 products 1 · 1 are cut off."""
    session = SimpleNamespace(inputs=["x"], run=lambda feeds: [np.full((1, 16, 8, 8), value, dtype=np.float32)])
    monkeypatch.setattr(measurement, "open_runtime", lambda name, path, threads: session)
    assert saturates.__wrapped__("onnxruntime") is lossy
