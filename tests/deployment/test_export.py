"""What is written is what the plan says, and real runtimes compute what the simulation computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import ArtefactError, CalibrationError, ExportError, UncalibratedError
from bitwright.ptq import calibrate
from bitwright.quantizers import quantizers_of


class Residual(nn.Module):
    """Stem, residual block, depthwise convolution, pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.relu(x + self.bn1(self.conv1(x)))
        x = torch.nn.functional.relu6(self.depthwise(x))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    net = Residual()
    for _ in range(20):  # statistics worth folding
        net(torch.randn(16, 3, 16, 16) * 2 + 0.5)
    return net.eval()


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 16, 16, generator=generator) * 2 + 0.5 for _ in range(4)]


def nodes(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("strategy", [-1, 0, 1, 2, 3])
def test_every_way_to_fold_is_deployed(strategy: int, model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    quantized = bw.quantize(model, batches, fold=strategy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    calibrate(model.eval(), batches)  # weights and statistics have moved
    artefact = quantized.export(tmp_path / "model.onnx")
    assert nodes(artefact.path)["BatchNormalization"] == (2 if strategy == -1 else 0)
    assert quantized.check(artefact.path, batches).passed


def test_count_and_contents(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    quantized = bw.quantize(model, batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    onnx.checker.check_model(onnx.load(artefact.path), full_check=True)
    found = nodes(artefact.path)
    activations = [site for site, spec in quantized.plan.quantized if site.rpartition(":")[2] in ("input", "output")]
    assert found["QuantizeLinear"] == artefact.activation_pairs == len(activations)
    assert artefact.weights == 4
    assert artefact.int32_biases == 4
    assert found["DequantizeLinear"] == artefact.activation_pairs + 8
    assert "BatchNormalization" not in found  # folded
    file = onnx.load(artefact.path)
    assert file.opset_import[0].version >= 21
    types = {i.name: i.data_type for i in file.graph.initializer}
    assert types["conv1:weight.codes"] == onnx.TensorProto.INT8
    assert types["conv1:bias.codes"] == onnx.TensorProto.INT32
    large = [i for i in file.graph.initializer if i.data_type == onnx.TensorProto.FLOAT and np.prod(i.dims) > 64]
    assert not large, "float weights must not be in the file"
    assert next(p.value for p in file.metadata_props if p.key == "bitwright.plan") == quantized.plan.to_yaml()


def test_float_model_is_untouched_by_folding(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(batches[0])
    bw.quantize(model, batches).export(tmp_path / "model.onnx")
    bw.strip(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(model(batches[0]), expected)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_parity_and_dynamic_batch(model: nn.Module, batches: list[Tensor], tmp_path: Path, runtime: str) -> None:
    quantized = bw.quantize(model, batches, backend=runtime)
    artefact = quantized.export(tmp_path / "model.onnx")
    assert artefact.dynamic_batch
    result = quantized.check(artefact.path, [*batches, batches[0][:1], batches[1][:3]], runtime=runtime, per_site=True)
    assert result.passed
    assert result.first_divergence is None
    assert result.outputs[0].top1_agreement == 1.0
    assert result.samples == 36
    assert {site.site for site in result.sites} >= {"/relu#0:output", "stem:input"}


@pytest.mark.parametrize(
    ("weights", "activations", "type_name"),
    [
        ("int8/tensor/sym", "uint8/tensor/asym", "INT8"),
        ("int8/channel/sym/narrow", "int8/tensor/sym", "INT8"),
        ("uint8/channel/asym", "uint8/tensor/asym", "UINT8"),
        ("int16/channel/sym", "uint16/tensor/asym", "INT16"),
        ("int4/channel/sym", "uint8/tensor/asym", "INT4"),
        ("uint4/channel/asym", "uint8/tensor/asym", "UINT4"),
        ("int6/channel/sym", "uint6/tensor/asym", "INT8"),
        ("int3/channel/sym", "int8/tensor/sym/narrow", "INT4"),
    ],
)
def test_every_width_agrees_with_the_runtime(
    model: nn.Module, batches: list[Tensor], tmp_path: Path, weights: str, activations: str, type_name: str
) -> None:
    quantized = bw.quantize(model, batches, weights=weights, activations=activations)
    artefact = quantized.export(tmp_path / "model.onnx")
    types = {i.name: i.data_type for i in onnx.load(artefact.path).graph.initializer}
    assert types["conv1:weight.codes"] == getattr(onnx.TensorProto, type_name)
    result = quantized.check(artefact.path, batches)
    assert result.passed, result.outputs
    assert result.outputs[0].sqnr_db > 40


def test_groups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)).eval()
    batches = [torch.randn(16, 64) for _ in range(3)]
    quantized = bw.quantize(net, batches, weights="int4/group16/sym")
    artefact = quantized.export(tmp_path / "model.onnx")
    file = onnx.load(artefact.path)
    scales = next(i for i in file.graph.initializer if i.name == "0:weight.scale")
    assert sorted(scales.dims) == [4, 48]
    assert quantized.check(artefact.path, batches).outputs[0].sqnr_db > 40


def test_file_is_small(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    example = torch.randn(4, 512)
    reference = bw.export_float(net, tmp_path / "float.onnx", example)
    artefact = bw.quantize(net, [example]).export(tmp_path / "model.onnx")
    assert artefact.bytes <= 0.30 * reference.stat().st_size


def test_codes_are_those_of_the_quantizer(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    quantized = bw.quantize(model, batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    arrays = {i.name: numpy_helper.to_array(i) for i in onnx.load(artefact.path).graph.initializer}
    quantizer = quantizers_of(model)["head:weight"]
    assert np.array_equal(arrays["head:weight.codes"], quantizer.integers(model.head.weight).numpy())
    assert np.array_equal(arrays["head:weight.scale"], quantizer.grid().scale.numpy())


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    net[2].weight = net[0].weight
    batches = [torch.randn(8, 16)]
    quantized = bw.quantize(net, batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    assert artefact.weights == 1
    assert quantized.check(artefact.path, batches).outputs[0].sqnr_db > 40


def test_a_bias_that_does_not_fit_into_int32(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3)).eval()
    with torch.no_grad():
        net[0].weight.fill_(1e-9)
        net[0].bias.copy_(torch.tensor([1000.0, -5.0, 0.0]))
    batches = [torch.randn(8, 4)]
    quantized = bw.quantize(net, batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    result = bw.open_runtime("onnxruntime", artefact.path)(batches[0])
    assert torch.allclose(result, net(batches[0]), rtol=1e-4)
    assert torch.allclose(result, torch.tensor([1000.0, -5.0, 0.0]).expand(8, 3), rtol=1e-4, atol=1e-4)


def test_uncalibrated_model_writes_nothing(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    graph = bw.capture(model, batches[0])
    bw.prepare(model, bw.make_plan(graph), graph=graph)
    with raises_problem("uncalibrated", where="stem:input", kind=UncalibratedError):
        bw.export(model, tmp_path / "model.onnx", batches[0])
    assert list(tmp_path.iterdir()) == []


class LosesQuantizers(nn.Module):
    """Takes another path while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if torch.compiler.is_exporting() else self.second(x)


def test_lost_quantizers_are_an_error(tmp_path: Path) -> None:
    quantized = bw.quantize(LosesQuantizers().eval(), [torch.randn(4, 4)])
    with pytest.raises(ExportError) as caught:
        quantized.export(tmp_path / "model.onnx")
    assert "export-path-differs" in caught.value.codes
    assert list(tmp_path.iterdir()) == []


def saturating_net() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    with torch.no_grad():
        net[0].weight.copy_(torch.rand(8, 16, 1, 1) * 0.2 + 0.8)
    return net, [torch.rand(4, 16, 8, 8) * 0.2 + 0.8 for _ in range(2)]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_guard_keeps_saturating_machines_exact(tmp_path: Path, runtime: str) -> None:
    from bitwright.deployment import saturates

    if not saturates(runtime):
        pytest.skip(f"{runtime} doesn't saturate on this CPU")
    net, batches = saturating_net()
    naive = bw.quantize(net, batches, backend=runtime, saturating=False)
    assert not naive.check(naive.export(tmp_path / "naive.onnx").path, batches, runtime=runtime).passed
    net, batches = saturating_net()
    guarded = bw.quantize(net, batches, backend=runtime)
    assert guarded.plan.sites["0:weight"].guard == "int16-pairs"
    assert "saturating" in guarded.plan.sites["0:weight"].why
    result = guarded.check(guarded.export(tmp_path / "guarded.onnx").path, batches, runtime=runtime)
    assert result.outputs[0].sqnr_db > 40


def test_corrupt_and_missing_artefacts(model: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(ArtefactError) as caught:
        bw.open_runtime("onnxruntime", path)
    assert "no-such-artefact" in caught.value.codes
    path.write_bytes(b"not a model")
    for runtime in ("onnxruntime", "openvino"):
        with pytest.raises(ArtefactError) as caught:
            bw.open_runtime(runtime, path)
        assert caught.value.codes == ["damaged-artefact"]
        assert caught.value.problems[0].where == str(path)


class Keywords(nn.Module):
    """Keyword inputs in another order, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor, scale: Tensor | None = None) -> dict[str, object]:
        both = self.left(left) - self.right(right)
        return {"sum": both if scale is None else both * scale, "parts": (self.left(left),)}


def test_keyword_inputs_and_nested_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Keywords().eval()
    batches = [{"right": torch.randn(6, 5), "left": torch.randn(6, 4)} for _ in range(3)]
    quantized = bw.quantize(net, batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    result = quantized.check(artefact.path, batches)
    assert [output.name for output in result.outputs] == ["sum", "parts.0"]
    assert all(output.sqnr_db > 40 for output in result.outputs)


def test_a_guard_that_training_broke_is_noticed(tmp_path: Path) -> None:
    net, batches = saturating_net()
    quantized = bw.quantize(net, batches, saturating=True)
    with torch.no_grad():
        net[0].weight.mul_(1.5)
    with pytest.raises(CalibrationError) as caught:
        quantized.export(tmp_path / "model.onnx")
    assert caught.value.codes == ["weights-changed"]
    net[0].weight.grad = torch.zeros_like(net[0].weight)  # a weight that is trained may move
    with raises_problem("guard-violated", where="0:weight"):
        quantized.export(tmp_path / "model.onnx")
    bw.calibrate(net, batches)
    quantized.export(tmp_path / "model.onnx")


class Product(nn.Module):
    """A matrix product with a constant of some shape."""

    def __init__(self, code: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x, self.w)


@pytest.mark.parametrize(
    ("code", "shape", "given"),
    [
        (lambda x, w: x @ w.view(1, 8, 8), (8, 8), (4, 8)),
        (lambda x, w: x @ w[0], (3, 8, 8), (4, 8)),
        (torch.bmm, (1, 8, 8), (1, 5, 8)),
        (torch.bmm, (4, 8, 8), (4, 5, 8)),
        (lambda x, w: x @ w, (1, 1, 8, 6), (4, 2, 5, 8)),
        (lambda x, w: x @ w.mT, (2, 6, 8), (4, 2, 5, 8)),
        (lambda x, w: x @ w, (8,), (4, 8)),
    ],
    ids=["view", "index", "bmm of one", "bmm", "two leading ones", "transposed stack", "vector"],
)
def test_constants_of_every_rank_in_products(
    code: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], given: tuple[int, ...], tmp_path: Path
) -> None:
    """ONNX Runtime's integer kernels take scales per channel for matrices only, and failed at the first run."""
    torch.manual_seed(0)
    batches = [torch.randn(*given) for _ in range(4)]
    quantized = bw.quantize(Product(code, *shape).eval(), batches)
    artefact = quantized.export(tmp_path / "model.onnx")
    onnx.checker.check_model(onnx.load(artefact.path), full_check=True)
    for runtime in ("onnxruntime", "openvino"):
        assert quantized.check(artefact.path, batches, runtime=runtime, per_site=True).passed


class MovesCodes(nn.Module):
    """A site is moved by MaxPool, Reshape and Transpose to operators in float, and to another site."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.relu(self.first(x))
        pooled = torch.max_pool2d(x, 2)
        flat = x.transpose(1, 2).reshape(x.shape[0], -1)
        return torch.sin(pooled), torch.sin(flat), self.second(x), self.second(pooled), pooled


@pytest.mark.parametrize("weights", ["int8/channel/sym", "int4/channel/sym"])
@pytest.mark.parametrize("activations", ["int8/tensor/sym", "int8/tensor/sym/narrow", "int8/tensor/asym"])
def test_signed_codes_may_be_moved_to_float(tmp_path: Path, weights: str, activations: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    quantized = bw.quantize(MovesCodes().eval(), batches, weights=weights, activations=activations)
    artefact = quantized.export(tmp_path / "model.onnx")
    onnx.checker.check_model(artefact.path, full_check=True)
    assert quantized.check(artefact.path, batches).passed


@pytest.mark.parametrize("name", ["m", "m.xyz", "m.pte"])
def test_a_suffix_other_than_onnx_is_refused(
    name: str, model: nn.Module, batches: list[Tensor], tmp_path: Path
) -> None:
    quantized = bw.quantize(model, batches)
    with raises_problem("unknown-suffix", where=tmp_path / name):
        quantized.export(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_run_says_what_it_takes(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    runtime = bw.open_runtime("onnxruntime", bw.export_float(nn.Linear(4, 2), tmp_path / "model.onnx", x))
    [name] = runtime.inputs
    assert runtime.run({name: x.numpy()})[0].shape == (2, 2)
    for wrong in (x, [x], (x,), {"other": x.numpy()}, {name: x}):
        with raises_problem("wrong-inputs", mentions=name):
            runtime.run(wrong)
