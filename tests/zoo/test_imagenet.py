"""The networks have the published sizes and their parameter names: torchvision's, or those of ResNeSt's authors."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import bitwright as bw
from bitwright.core.registry import NETWORKS
from bitwright.zoo.imagenet import ResNeSt, SplitAttention

# Published: parameters, tensors of the state dict, millions of multiplications for one image of 224 x 224.
PUBLISHED = {
    "resnet18": (11_689_512, 122, 1814),
    "resnet50": (25_557_032, 320, 4089),
    "mobilenet_v2": (3_504_872, 314, 301),
    "regnetx_600m": (6_196_040, 320, 606),
    "regnetx_800m": (7_259_656, 320, 800),
    "efficientnetlite_b0": (4_652_008, 296, 385),
    "vgg16": (138_357_544, 32, 15470),
}
# Some of torchvision's names, with shapes.
NAMES = {
    "resnet18": {
        "bn1.num_batches_tracked": (),
        "layer1.1.conv2.weight": (64, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer4.0.downsample.1.running_var": (512,),
        "fc.weight": (1000, 512),
    },
    "resnet50": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer3.5.bn3.bias": (1024,),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "fc.bias": (1000,),
    },
    "mobilenet_v2": {
        "features.0.0.weight": (32, 3, 3, 3),
        "features.1.conv.0.0.weight": (32, 1, 3, 3),
        "features.1.conv.1.weight": (16, 32, 1, 1),
        "features.1.conv.2.running_mean": (16,),
        "features.2.conv.0.1.weight": (96,),
        "features.17.conv.1.0.weight": (960, 1, 3, 3),
        "features.17.conv.3.bias": (320,),
        "features.18.1.running_var": (1280,),
        "classifier.1.weight": (1000, 1280),
    },
    "regnetx_800m": {
        "stem.0.weight": (32, 3, 3, 3),
        "trunk_output.block1.block1-0.proj.0.weight": (64, 32, 1, 1),
        "trunk_output.block3.block3-6.f.b.0.weight": (288, 16, 3, 3),
        "trunk_output.block4.block4-0.f.a.1.running_mean": (672,),
        "trunk_output.block4.block4-4.f.c.0.weight": (672, 672, 1, 1),
        "fc.weight": (1000, 672),
    },
    "vgg16": {
        "features.0.bias": (64,),
        "features.28.weight": (512, 512, 3, 3),
        "classifier.0.weight": (4096, 25088),
        "classifier.6.bias": (1000,),
    },
    "regnetx_600m": {"trunk_output.block4.block4-6.f.b.0.weight": (528, 24, 3, 3), "fc.weight": (1000, 528)},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_size(name: str) -> None:
    with torch.device("meta"):
        model = NETWORKS.get(name)().eval()
        with FlopCounterMode(display=False) as counter:
            assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
    parameters, tensors, millions = PUBLISHED[name]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.state_dict()) == tensors
    assert counter.get_total_flops() / 2e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        state = NETWORKS.get(name)().state_dict()
    assert {key: tuple(state[key].shape) for key in NAMES[name]} == NAMES[name]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "vgg16"])  # which has no norms
def test_options(name: str) -> None:
    def norm(channels: int, **own: float) -> nn.Module:
        return nn.BatchNorm2d(channels, **{**own, "momentum": 0.25})

    with torch.device("meta"):
        model = NETWORKS.get(name)(classes=7, dropout=0.5, norm=norm, image_size=64)
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {module.momentum for module in norms} == {0.25}
    assert {module.eps for module in norms} == {1e-3 if name == "efficientnetlite_b0" else 1e-5}
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5]


def test_initial_weights_follow_the_fan_out() -> None:
    torch.manual_seed(0)
    model = NETWORKS.get("resnet18")()
    expected = (2 / (512 * 9)) ** 0.5
    assert model.layer4[1].conv1.weight.std().item() == pytest.approx(expected, rel=0.01)


@pytest.mark.realdata
def test_a_published_checkpoint_loads_strictly(data_dir: Path) -> None:
    model = NETWORKS.get("efficientnetlite_b0")()
    assert model.load_state_dict(load_file(data_dir / "imagenet-val" / "efficientnet_lite0.safetensors"))


def test_a_partial_norm_is_accepted() -> None:
    with torch.device("meta"):
        model = NETWORKS.get("mobilenet_v2")(norm=partial(nn.BatchNorm2d, affine=False))
    assert "features.0.1.weight" not in model.state_dict()


_RESNEST_NAMES = "e997f93bd64f4478a28a76c143e638f77eb892f3610a215453d202a0c5dd9b13"


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
    assert hashlib.sha256(lines.encode()).hexdigest() == _RESNEST_NAMES
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


def test_options_of_resnest() -> None:
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
