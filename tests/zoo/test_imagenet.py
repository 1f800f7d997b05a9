"""The networks have the published sizes and torchvision's parameter names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bitwright.core.registry import NETWORKS

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
