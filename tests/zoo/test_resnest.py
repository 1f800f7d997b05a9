"""ResNeSt-50 has the authors' names and size, and works from capture to parity."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import bitwright as bw
from bitwright.core.registry import NETWORKS
from bitwright.zoo.resnest import ResNeSt, SplitAttention

_NAMES = "e997f93bd64f4478a28a76c143e638f77eb892f3610a215453d202a0c5dd9b13"


def test_size_and_names_are_those_of_the_authors_package() -> None:
    with torch.device("meta"):
        model = NETWORKS.get("resnest50")().eval()
        with FlopCounterMode(display=False) as counter:
            assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
    state = model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == 27_483_240  # 27.5 M
    assert counter.get_total_flops() / 2e9 == pytest.approx(5.4, rel=0.01)  # the paper's GFLOPs
    # The names and shapes of the package `resnest` 0.0.5, in its order.
    assert len(state) == 476
    lines = "\n".join(f"{name} {tuple(value.shape)}" for name, value in state.items())
    assert hashlib.sha256(lines.encode()).hexdigest() == _NAMES
    names = {
        "conv1.0.weight": (32, 3, 3, 3),
        "conv1.4.running_var": (32,),
        "conv1.6.weight": (64, 32, 3, 3),
        "bn1.num_batches_tracked": (),
        "layer1.0.conv2.conv.weight": (128, 32, 3, 3),
        "layer1.0.conv2.bn0.weight": (128,),
        "layer1.0.conv2.fc1.weight": (32, 64, 1, 1),
        "layer1.0.conv2.bn1.running_mean": (32,),
        "layer1.0.conv2.fc2.bias": (128,),
        "layer1.0.downsample.1.weight": (256, 64, 1, 1),
        "layer1.0.downsample.2.bias": (256,),
        "layer4.2.conv2.fc2.weight": (1024, 256, 1, 1),
        "layer4.2.bn3.running_mean": (2048,),
        "fc.weight": (1000, 2048),
    }
    assert {name: tuple(state[name].shape) for name in names} == names


def test_options() -> None:
    with torch.device("meta"):
        model = NETWORKS.get("resnest50")(classes=7, dropout=0.5, norm=nn.SyncBatchNorm, image_size=64)
        assert model.eval()(torch.zeros(2, 3, 65, 65)).shape == (2, 7)
    assert {type(module) for module in model.modules() if "Norm" in type(module).__name__} == {nn.SyncBatchNorm}
    assert model.dropout.p == 0.5


@pytest.mark.parametrize(("radix", "groups"), [(2, 1), (3, 2), (1, 1)])
def test_split_attention_is_the_papers_formula(radix: int, groups: int) -> None:
    torch.manual_seed(0)
    width = 12
    layer = SplitAttention(width, 1, radix, groups, nn.BatchNorm2d).eval()
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.running_mean)
    x = torch.randn(2, width, 5, 5)
    u = F.relu(layer.bn0(layer.conv(x))).view(2, radix, groups, width // groups, 5, 5)
    pooled = u.sum(1).mean((-1, -2)).view(2, width, 1, 1)
    scores = layer.fc2(F.relu(layer.bn1(layer.fc1(pooled)))).view(2, groups, radix, width // groups)
    shares = scores.exp() / scores.exp().sum(2, keepdim=True) if radix > 1 else scores.sigmoid()
    expected = torch.einsum("brgchw,bgrc->bgchw", u, shares).reshape(2, width, 5, 5)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("runtime", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.slow)])
def test_from_capture_to_parity(runtime: str, tmp_path: Path) -> None:
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    model = ResNeSt((1, 1), width=8, classes=5).eval()
    batches = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    graph = bw.capture(model, batches[0])
    kinds = {op.kind for op in graph.ops}
    assert {"conv2d", "linear", "mul", "add"} <= kinds
    quantized = bw.quantize(model, batches, backend=runtime)
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert {f"{name}:weight" for name in convolutions} <= quantized.plan.sites.keys()
    quantized.export(tmp_path / "model.onnx")
    check = quantized.check(tmp_path / "model.onnx", batches, per_site=runtime == "onnxruntime")
    assert check.passed, check.to_dict()
    assert quantized.check(tmp_path / "model.onnx", [torch.randn(3, 3, 32, 32)]).passed  # another batch


def test_quantized_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = ResNeSt((1, 1), width=8, classes=3)
    batches = [torch.randn(6, 3, 24, 24)]
    target = torch.tensor([0, 1, 2, 0, 1, 2])
    qat = bw.Qat(model, batches, precision="int8")
    optimizer = torch.optim.Adam(qat.model.parameters(), lr=0.01)
    losses: list[Tensor] = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(qat.model(batches[0]), target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
