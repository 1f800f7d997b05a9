"""ncnn runs our files: integers where the plan has them, the numbers of the simulation, and clear errors else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import raises_problem
from torch import Tensor, nn
from typer.testing import CliRunner

import bitwright as bw
from bitwright.cli import app
from bitwright.core.errors import ExportError
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import Runtime, available_runtimes, saturates
from bitwright.deployment.runtimes.ncnn import load
from bitwright.zoo.workloads import efficientnet_lite0_imagenet, resnet20_cifar10

REASON = available_runtimes()["ncnn"]
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"ncnn: {REASON}")


def ncnn() -> type[Runtime]:
    kind: type[Runtime] = RUNTIMES.get("ncnn")
    return kind


class Net(nn.Module):
    """A padding of its own, ReLU6, a depthwise convolution, a shortcut, two paths, a head.

    Twelve channels: ncnn's x86 kernel of depthwise convolutions is only exact if eight don't divide them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        self.stem = nn.Conv2d(3, 12, 3, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(12)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.point = nn.Conv2d(12, 12, 1)
        self.left = nn.Conv2d(12, 5, (1, 3), padding=(0, 1))
        self.right = nn.Conv2d(12, 7, 3, padding=2, dilation=2)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn(self.stem(self.pad(x))))
        x = x + self.point(F.relu6(self.depth(x)))
        x = F.relu(torch.cat([self.left(x), self.right(x)], 1))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 14, 14, generator=generator) for _ in range(2)]


@pytest.fixture(scope="module")
def made(batches: list[Tensor], tmp_path_factory: pytest.TempPathFactory) -> tuple[bw.Quantized, Path]:
    torch.manual_seed(0)
    net = Net()
    for batch in batches:
        net(batch)  # statistics worth folding
    quantized = bw.quantize(net.eval(), batches, backend="ncnn")
    path = tmp_path_factory.mktemp("ncnn") / "model.param"
    ncnn().write(quantized.model, path, batches[0])
    return quantized, path


def test_integers_run_and_every_site_agrees(made: tuple[bw.Quantized, Path], batches: list[Tensor]) -> None:
    quantized, path = made
    opened = bw.open_runtime("ncnn", path, threads=1)
    assert opened.executed() == {"int8": 6, "float": 0}
    assert opened.batch is None
    everything = torch.cat(batches)[:7]
    with torch.no_grad():
        expected = quantized.model(everything)
    torch.testing.assert_close(opened(everything), expected, rtol=1e-5, atol=1e-5)
    result = quantized.check(path, batches, runtime="ncnn", per_site=True)
    assert result.passed
    assert result.first_divergence is None
    assert result.unseen == ()
    assert all(site.differing == 0 for site in result.sites)
    assert {site.site for site in result.sites} == {site for site, _ in quantized.plan.quantized}
    assert result.probe is not None
    assert result.probe.outputs_identical


def test_layers_are_fused_as_ncnn_runs_them(made: tuple[bw.Quantized, Path]) -> None:
    lines = [line.split() for line in made[1].read_text(encoding="utf-8").splitlines()[2:]]
    layers = {line[1]: line for line in lines}
    assert not {"Padding", "ReLU", "Clip", "Quantize"} & {line[0] for line in lines} - {"ReLU"}
    assert [line[0] for line in lines].count("ReLU") == 1  # behind the concatenation
    assert "8=101" in layers["depth"]  # the next convolution reads its codes
    assert "8=2" in layers["stem"]  # one reader adds it in float
    assert {"15=1", "16=1", "4=0", "14=0"} <= set(layers["stem"])  # the padding before it
    assert ncnn().size(made[1]) == sum(made[1].with_suffix(suffix).stat().st_size for suffix in (".param", ".bin"))


def test_a_damaged_weight_is_named_at_its_site(
    made: tuple[bw.Quantized, Path], batches: list[Tensor], tmp_path: Path
) -> None:
    quantized, original = made
    path = tmp_path / original.name
    for suffix in (".param", ".bin", ".json"):
        shutil.copy(original.with_suffix(suffix), path.with_suffix(suffix))
    whole = path.with_suffix(".bin").read_bytes()
    for name, change in (("point:weight.codes", 1), ("left:weight.factor", 0x40)):
        raw = bytearray(whole)
        raw[load(path).pieces[name].offset + (2 if "factor" in name else 0)] ^= change
        path.with_suffix(".bin").write_bytes(raw)
        result = quantized.check(path, batches[:1], runtime="ncnn", per_site=True)
        assert not result.passed
        assert result.first_divergence == name.rpartition(".")[0]
    path.with_suffix(".bin").write_bytes(whole[:-4])
    with raises_problem("damaged-artefact", mentions=f"{len(whole) - 4} bytes of {len(whole)}"):
        bw.open_runtime("ncnn", path)
    path.with_suffix(".bin").write_bytes(whole)
    path.write_text("\n".join(path.read_text(encoding="utf-8").splitlines()[:-1]), encoding="utf-8")
    with raises_problem("damaged-artefact", mentions="12 layers of 13"):
        bw.open_runtime("ncnn", path)
    path.with_suffix(".json").unlink()
    with raises_problem("unreadable-file", mentions="model.json"):
        bw.open_runtime("ncnn", path)


def test_other_shapes_never_reach_ncnn(made: tuple[bw.Quantized, Path], batches: list[Tensor]) -> None:
    opened = bw.open_runtime("ncnn", made[1])
    with raises_problem("runtime-failed", mentions="[4, 3, 9, 14]"):
        opened(batches[0][:, :, :9])
    with raises_problem("runtime-failed", mentions="float64"):
        opened(batches[0].double())


class Operators(nn.Module):
    """One of each that can be written beside convolutions and linears."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 4, 3, groups=2)
        self.linear = nn.Linear(5, 3, bias=False)
        self.register_buffer("shift", torch.arange(6.0).reshape(6, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = x.split([2, 4], 1)
        return (
            F.max_pool2d(x, 3, 2, padding=1, ceil_mode=True),
            F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False),
            F.avg_pool2d(x, 3, 2, padding=1),
            x[:, :, ::2, 1::3] * 2,
            F.pad(x[:, 1:4], (0, 0, 0, 0, 1, 2)),
            F.pad(x, (2, 1, 1, 2), mode="reflect"),
            F.pad(x, (1, 0, 2, 0), value=0.5),
            torch.cat([second, first, second], 1),
            F.hardswish(x) - F.hardsigmoid(x),
            F.leaky_relu(x, 0.1) / (1 + torch.sigmoid(x)),
            2 / (1 + torch.exp(-x)) + torch.sqrt(x.abs()),
            torch.tanh(x) * torch.sigmoid(x.mean((2, 3), keepdim=True)),
            F.elu(1 - x) + self.shift,
            x.clamp(max=0.25).mean(1),
            self.bn(x),
            self.grouped(x).flatten(1),
            F.softmax(x, 1),
            F.adaptive_max_pool2d(x, 1),
            torch.maximum(first, second[:, 2:]).reshape(-1, 9, 2, 7),
            self.linear(y) @ torch.ones(3, 2),
            y.unsqueeze(1),
        )


def test_every_operator_computes_what_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Operators()
    x, y = torch.randn(3, 6, 9, 7), torch.randn(3, 5)
    model(x, y)
    model.eval()
    path = tmp_path / "float.param"
    ncnn().write_float(model, path, (x, y))
    opened = bw.open_runtime("ncnn", path, threads=1)
    assert opened.executed() == {"int8": 0, "float": 3}
    with torch.no_grad():
        expected = model(x, y)
    for index, (ours, theirs) in enumerate(zip(opened(x, y), expected, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda text, i=index: f"output {i}: {text}")


class Unwritable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = F.max_pool2d(x.unsqueeze(1), 2, return_indices=True)[1]
        return torch.erf(self.conv(x)).cumsum(2).flip(0), places


def test_all_operators_that_cant_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError) as caught:
        ncnn().write_float(Unwritable().eval(), tmp_path / "model.param", torch.randn(2, 2, 8))
    for name in ("Erf: erf", "CumSum: cumsum", "1 spatial axes"):
        assert name in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("backend", "site"),
    [("onnxruntime", "0:input"), pytest.param("fbgemm", "0:weight", marks=pytest.mark.slow)],
    ids=["onnxruntime", "fbgemm"],
)
def test_plans_for_other_grids_are_refused_at_their_site(backend: str, site: str, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    quantized = bw.quantize(nn.Sequential(nn.Linear(8, 4)).eval(), [x], backend=backend)
    with raises_problem("operator-without-translation", mentions=f"at {site}"):
        ncnn().write(quantized.model, tmp_path / "model.param", x)


@pytest.mark.slow
def test_groups_of_channels_have_one_scale_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2)).eval(), torch.randn(2, 4, 7, 7)
    quantized = bw.quantize(model, [x], backend="ncnn")
    path = tmp_path / "model.param"
    with raises_problem("operator-without-translation", mentions="0:weight"):
        ncnn().write(quantized.model, path, x)
    bw.strip(model)
    quantized = bw.quantize(model, [x], backend="ncnn", weights="int8/tensor/sym/narrow")
    ncnn().write(quantized.model, path, x)
    assert bw.open_runtime("ncnn", path).executed() == {"int8": 1, "float": 0}
    assert all(site.differing == 0 for site in quantized.check(path, [x], runtime="ncnn", per_site=True).sites)
    with torch.no_grad():
        torch.testing.assert_close(bw.open_runtime("ncnn", path)(x), quantized.model(x), rtol=1e-5, atol=1e-5)


def test_what_is_rounded_between_float_operators_is_rounded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = bw.backend("ncnn")
    linear = table.operators["linear"].model_copy(update={"output": True})
    table = table.model_copy(update={"operators": {**table.operators, "linear": linear}})
    model, x = nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(16, 8)
    quantized = bw.quantize(model, [x], plan=bw.make_plan(bw.capture(model, x), table))
    path = tmp_path / "model.param"
    ncnn().write(quantized.model, path, x)
    result = quantized.check(path, [x], runtime="ncnn", per_site=True)
    assert [(site.site, site.differing) for site in result.sites] == [("0:input", 0), ("0:weight", 0), ("0:output", 0)]
    assert len(np.unique(bw.open_runtime("ncnn", path)(x).numpy())) < 64
    with torch.no_grad():
        torch.testing.assert_close(bw.open_runtime("ncnn", path)(x), quantized.model(x), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_its_products_dont_saturate() -> None:
    assert saturates("ncnn") is False


@pytest.mark.slow
def test_the_command_line_writes_checks_and_measures(tmp_path: Path) -> None:
    def run(*args: str) -> str:
        result = CliRunner().invoke(app, list(args))
        assert result.exit_code == 0, result.output
        return result.output

    made, file = tmp_path / "made", tmp_path / "model.param"
    run("quantize", "digits-untrained", "--backend", "ncnn", "-o", str(made))
    files = ["--plan", str(made / "plan.yaml"), "--checkpoint", str(made / "checkpoint.safetensors")]
    run("export", "digits-untrained", *files, "-o", str(file))
    assert "agrees" in run("check", "digits-untrained", *files, str(file), "--runtime", "ncnn", "--per-site")
    assert "ncnn" in run("bench", "digits-untrained", "--runtimes", "ncnn", "--runs", "5", "--samples", "32")


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("build", "reference", "allowed"),
    [(resnet20_cifar10, 91.73, 0.3), (efficientnet_lite0_imagenet, 73.7, 1.5)],
    ids=["resnet20", "efficientnet-lite0"],
)
def test_int8_keeps_the_accuracy(
    build: Callable[[Path], bw.Workload], reference: float, allowed: float, data_dir: Path, tmp_path: Path
) -> None:
    workload = build(data_dir)
    assert workload.calibration is not None
    assert workload.evaluation is not None
    quantized = bw.quantize(workload.model, workload.calibration(), backend="ncnn", example=workload.inputs)
    path = tmp_path / "model.param"
    ncnn().write(quantized.model, path, workload.inputs)
    opened = bw.open_runtime("ncnn", path, threads=1)  # more than there are cores would wait for each other, spinning
    assert opened.executed() == {"int8": sum(op.macs > 0 for op in quantized.graph.ops), "float": 0}
    assert opened.accuracy(workload)["top1"] >= reference - allowed
    images = next(iter(workload.evaluation()))[0][:16]
    assert quantized.check(path, [images], runtime="ncnn", per_site=True, threads=1).passed
