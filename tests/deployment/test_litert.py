"""LiteRT runs our .tflite files: integers where the plan has them, the numbers of the simulation, clear errors."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import ArtefactError, BitwrightError, PlanError
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import Runtime, available_runtimes

REASON = available_runtimes()["litert"]
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"litert: {REASON}")
PHONE = {"weights": "int8/channel/sym", "activations": "int8/tensor/asym"}
KERNELS = ["litert", "litert_reference"]


def litert() -> type[Runtime]:
    kind: type[Runtime] = RUNTIMES.get("litert")
    return kind


class Net(nn.Module):
    """Odd pads, ReLU6, depthwise and grouped convolutions, a shortcut, pooling, two paths, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(12)
        self.depth = nn.Conv2d(12, 24, 3, padding=1, groups=12)
        self.point = nn.Conv2d(24, 12, 1)
        self.left = nn.Conv2d(12, 5, (1, 3), padding=(0, 1))
        self.right = nn.Conv2d(12, 8, 3, padding=2, dilation=2, groups=4)
        self.head = nn.Linear(13 * 3 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn(self.stem(x)))
        x = F.relu(x + self.point(F.relu6(self.depth(x))))
        x = F.max_pool2d(x, 3, 2, 1)
        x = torch.cat([self.left(x), self.right(x)], 1)
        return self.head(F.avg_pool2d(x, 2, (1, 1)).flatten(1))


def trained(net: nn.Module, batches: list[Any]) -> nn.Module:
    """Statistics worth folding."""
    for batch in batches:
        net(batch)
    return net.eval()


def images(*shape: int, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def written(net: nn.Module, batches: list[Any], folder: Path, **options: Any) -> tuple[bw.Quantized, Path]:
    quantized = bw.quantize(net, batches, backend="tflitemicro", measure=False, **options)
    path = folder / "model.tflite"
    litert().write(quantized.model, path, batches[0])
    return quantized, path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[bw.Quantized, Path, list[Tensor]]:
    torch.manual_seed(0)
    batches = images(4, 3, 15, 18)
    return *written(trained(Net(), batches), batches, tmp_path_factory.mktemp("litert"), **PHONE), batches


@pytest.mark.parametrize("runtime", KERNELS)
def test_integers_run_and_every_site_agrees(made: tuple[bw.Quantized, Path, list[Tensor]], runtime: str) -> None:
    quantized, path, batches = made
    opened = bw.open_runtime(runtime, path, threads=1)
    assert opened.executed() == {"int8": 6, "float": 0}
    assert opened.left_in_float() == ()
    assert opened.batch == 4
    check = quantized.check(path, batches, runtime=runtime, per_site=True)
    assert check.passed
    assert check.probe is not None
    assert check.probe.outputs_identical
    assert check.unseen == ()
    assert max(site.largest for site in check.sites) <= 2  # a flipped code may move the next sum by another one
    averaged = (
        "/avg_pool2d#0:output",
        "/flatten#0:output",
        "head:output",
    )  # LiteRT rounds a mean of four codes away from zero
    assert max(site.differing for site in check.sites if site.site not in averaged) < 0.05
    assert [site.differing for site in check.sites if site.stored] == [0.0] * 12


@pytest.mark.parametrize("formats", [PHONE, {}], ids=["channel", "powers-of-two"])
def test_the_simulation_of_the_reference_kernels_is_exact(formats: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = images(4, 3, 15, 18)
    quantized, path = written(trained(Net(), batches), batches, tmp_path, **formats)
    outputs = quantized.check(path, batches, runtime="litert_reference", measure=False).outputs
    assert [output.max_error for output in outputs] == [0.0]


def test_the_backend_is_checked_on_litert(made: tuple[bw.Quantized, Path, list[Tensor]]) -> None:
    quantized, path, batches = made
    assert quantized.check(path, batches).runtime == "litert"


def test_any_number_of_samples_runs_in_the_batches_of_the_file(made: tuple[bw.Quantized, Path, list[Tensor]]) -> None:
    _, path, batches = made
    opened = bw.open_runtime("litert", path)
    everything = torch.cat(batches)[:7]
    assert torch.equal(opened(everything)[:4], opened(batches[0]))
    assert opened(everything).shape == (7, 4)
    with pytest.raises(ArtefactError) as raised:
        opened.run(opened.feed(everything))
    assert raised.value.codes == ["runtime-failed"]


def test_the_float_model_agrees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = images(4, 3, 15, 18)
    net = trained(Net(), batches)
    path = tmp_path / "float.tflite"
    litert().write_float(net, path, batches[0])
    torch.testing.assert_close(bw.open_runtime("litert", path)(batches[0]), net(batches[0]), rtol=1e-4, atol=1e-5)


class Lines(nn.Module):
    """One spatial axis, two norms, a shuffle of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1, stride=2)
        self.depth = nn.Conv1d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(F.max_pool1d(self.conv(x), 2))
        x = x.reshape(x.shape[0], 2, 4, -1).transpose(1, 2).reshape(x.shape[0], 8, -1)
        return self.head(self.depth(x).mean(2))


class Maps(nn.Module):
    """Functions of images, a transposed convolution, resizing, slices and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        self.scale = nn.Parameter(torch.rand(1, 6, 1, 1) + 0.5)
        self.b = nn.Conv2d(6, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.a(F.pad(x, (1, 2, 0, 1), mode="reflect")), 0.1)
        x = F.gelu(self.up(x)) * self.scale
        x = F.hardtanh(x[:, :, 1:-1:2], -0.25, 2.0)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        y = self.b(F.pad(x, (0, 1, 1, 0)))
        return torch.softmax(y, 1) - torch.sigmoid(y[:, :1]) / (y.abs() + 1).sqrt()


class Encoder(nn.Module):
    """Embeddings, attention, norms, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.randn(8, 16) * 0.1)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.words(x) + self.positions)[:, 0])


class Attention(nn.Module):
    """Products of two activations, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(2, (2, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = (q @ k.transpose(2, 3)).masked_fill(~self.mask, -1e4)  # type: ignore[operator]
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "lines": (Lines, lambda: images(6, 4, 17)),
    "maps": (Maps, lambda: images(2, 3, 9, 7)),
    "encoder": (Encoder, lambda: [torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(2))]),
    "attention": (Attention, lambda: images(4, 5, 8)),
}


@pytest.mark.parametrize(
    ("model", "formats"), [(name, PHONE) for name in MODELS] + [(name, {}) for name in ("lines", "attention")]
)
def test_models_agree_at_every_site(model: str, formats: dict[str, str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, data = MODELS[model]
    batches = data()
    quantized, path = written(kind().eval(), batches, tmp_path, **formats)
    for runtime in KERNELS:
        check = quantized.check(path, batches, runtime=runtime, per_site=True, measure=False)
        assert check.passed
        assert check.damages == ()
        assert not any(site.damaged for site in check.sites)
        assert len(check.sites) > 8
    executed = bw.open_runtime("litert", path).executed()
    assert executed is not None
    assert executed["int8"] >= 2


def test_scales_are_powers_of_two_as_in_the_table(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = images(2, 3, 9, 7)
    _, path = written(Maps().eval(), batches, tmp_path)
    scales = [array for name, array in litert().stored(path).items() if name.endswith(".scale")]
    assert len(scales) > 8
    assert all(np.array_equal(np.log2(scale), np.rint(np.log2(scale))) for scale in scales)


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_convolutions_of_some_shapes_agree(data: st.DataObject) -> None:
    convolution_agrees(data)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_convolutions_of_all_shapes_agree(data: st.DataObject) -> None:
    convolution_agrees(data)


def convolution_agrees(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    kind = data.draw(st.sampled_from(["plain", "depthwise", "grouped", "transposed"]))
    groups = 1 if kind in ("plain", "transposed") else draw(2, 4)
    inputs = groups if kind == "depthwise" else groups * draw(1, 3)
    outputs = groups * draw(1, 3)
    kernel, stride = (draw(1, 4), draw(1, 4)), (draw(1, 3), draw(1, 3))
    bias = data.draw(st.booleans())
    pads = (draw(0, kernel[0] - 1), draw(0, kernel[1] - 1))
    dilation = (1, 1) if kind == "transposed" else (draw(1, 2), draw(1, 2))
    size = (draw(4, 9), draw(4, 9))
    torch.manual_seed(draw(0, 99))
    conv: nn.Module
    if kind == "transposed":
        more = (draw(0, stride[0] - 1), draw(0, stride[1] - 1))
        conv = nn.ConvTranspose2d(inputs, outputs, kernel, stride, pads, more, bias=bias)
    else:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, pads, dilation, groups, bias=bias)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        assume(all(n + 2 * p > r for n, p, r in zip(size, pads, reach, strict=True)))
    activation = data.draw(st.sampled_from([nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.3, 0.4)]))
    batch = images(2, inputs, *size, count=1)
    formats = data.draw(st.sampled_from([PHONE, {}]))
    with TemporaryDirectory() as folder:
        quantized, path = written(nn.Sequential(conv, activation).eval(), batch, Path(folder), **formats)
        for runtime in KERNELS:
            check = quantized.check(path, batch, runtime=runtime, per_site=True, measure=False)
            assert check.damages == ()
            assert max(site.largest for site in check.sites) <= 1
            assert check.passed


def test_one_error_lists_all_operators_that_litert_has_not(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(torch.erf(self.conv(x)), 2) + torch.det(x[..., :3, :3])[..., None, None].sum(1, True)

    with pytest.raises(PlanError) as raised:
        written(Odd().eval(), images(2, 3, 9, 7), tmp_path, **PHONE)
    assert len(raised.value.problems) >= 3
    assert set(raised.value.codes) == {"operator-without-translation"}
    assert all(problem.where and problem.fix for problem in raised.value.problems)
    assert {problem.value for problem in raised.value.problems} >= {"Erf", "CumSum", "Det"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["onnxruntime", "ncnn"])
def test_formats_of_other_targets_are_refused_with_the_operator(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = images(2, 3, 15, 18)
    quantized = bw.quantize(trained(Net(), batches), batches, backend=backend, measure=False)
    with pytest.raises(PlanError) as raised:
        litert().write(quantized.model, tmp_path / "model.tflite", batches[0])
    assert any("stem" in (problem.where or "") for problem in raised.value.problems)
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_byte_is_found(made: tuple[bw.Quantized, Path, list[Tensor]], tmp_path: Path) -> None:
    """Each changes nothing that LiteRT or Bitwright reads (padding), or it is found before the file runs."""
    _, path, batches = made
    raw = path.read_bytes()
    expected = bw.open_runtime("litert", path)(batches[0])
    changed = tmp_path / "model.tflite"
    generator = np.random.default_rng(0)
    unseen = 0
    for position in generator.choice(len(raw), 100, replace=False):
        data = bytearray(raw)
        data[position] ^= 1 << int(generator.integers(8))
        changed.write_bytes(data)
        try:
            if not litert().damages(changed):
                assert torch.equal(bw.open_runtime("litert", changed)(batches[0]), expected)
                unseen += 1
        except BitwrightError as error:
            assert error.codes[0] in {"damaged-artefact", "artefact-not-loadable", "invalid-value", "invalid-json"}  # noqa: PT017
    assert unseen < 33


def test_a_flipped_weight_fails_the_check_with_its_name(
    made: tuple[bw.Quantized, Path, list[Tensor]], tmp_path: Path
) -> None:
    quantized, path, batches = made
    codes = litert().stored(path)["depth:weight.codes"]
    raw = bytearray(path.read_bytes())
    start = raw.index(codes.tobytes())
    raw[start + 5] ^= 1
    changed = tmp_path / "model.tflite"
    changed.write_bytes(raw)
    check = quantized.check(changed, batches)
    assert not check.passed
    assert [damage.site for damage in check.damages] == ["depth:weight"]
