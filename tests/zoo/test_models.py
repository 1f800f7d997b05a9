from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from bitwright.workload import Workload, batches, evaluate
from bitwright.zoo.networks import EfficientNetLite0, ResNet20, same_padding
from bitwright.zoo.workloads import efficientnet_lite0_imagenet, resnet20_cifar10


def test_shapes_and_sizes() -> None:
    resnet, lite = ResNet20().eval(), EfficientNetLite0(image_size=64).eval()
    assert sum(p.numel() for p in resnet.parameters()) == 269_722
    assert sum(p.numel() for p in lite.parameters()) == 4_652_008
    with torch.no_grad():
        assert resnet(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert lite(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


@given(st.integers(1, 64), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2]))
def test_same_padding_gives_tensorflows_output_size(size: int, kernel: int, stride: int) -> None:
    before, after = same_padding(size, kernel, stride)
    assert after - before in (0, 1)
    padded = F.pad(torch.zeros(1, 1, size), (before, after))
    assert F.conv1d(padded, torch.zeros(1, 1, kernel), stride=stride).shape[-1] == -(-size // stride)


def test_lite_refuses_images_that_its_padding_is_not_for() -> None:
    with pytest.raises(ValueError, match=r"image_size=\.\.\."):
        EfficientNetLite0(image_size=64)(torch.zeros(1, 3, 65, 64))


def test_lite_exports_constant_padding() -> None:
    model = EfficientNetLite0(image_size=64).eval()
    program = torch.export.export(model, (torch.zeros(1, 3, 64, 64),), strict=False)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("pad" in target for target in targets) == 5  # the five convolutions of stride 2
    assert not any("sym_size" in target or "sub" in target for target in targets)


def head(workload: Workload, count: int) -> Workload:
    """The workload with only the first batches of its evaluation."""
    assert workload.evaluation is not None
    first = [pair for pair, _ in zip(workload.evaluation(), range(count), strict=False)]
    return Workload(name=workload.name, model=workload.model, inputs=workload.inputs, evaluation=lambda: first)


@pytest.mark.realdata
def test_resnet20_on_a_part_of_cifar10(data_dir: Path) -> None:
    workload = resnet20_cifar10(data_dir)
    assert sum(len(batch) for batch in batches(workload.calibration)) == 512
    assert evaluate(head(workload, 2), workload.model)["top1"] > 88.0


@pytest.mark.realdata
def test_efficientnet_lite0_on_a_part_of_imagenet(data_dir: Path) -> None:
    workload = efficientnet_lite0_imagenet(data_dir)
    assert sum(len(batch) for batch in batches(workload.calibration)) == 100
    assert evaluate(head(workload, 1), workload.model)["top1"] > 60.0


@pytest.mark.realdata
@pytest.mark.slow
def test_resnet20_has_its_reference_accuracy(data_dir: Path) -> None:
    workload = resnet20_cifar10(data_dir)
    assert evaluate(workload, workload.model) == {"top1": pytest.approx(91.73, abs=0.03), "n": 10_000.0}


@pytest.mark.realdata
@pytest.mark.slow
def test_efficientnet_lite0_has_its_reference_accuracy(data_dir: Path) -> None:
    workload = efficientnet_lite0_imagenet(data_dir)
    # One image is 0.1 %; JPEG decoders and convolution kernels may differ by about as much.
    assert evaluate(workload, workload.model) == {"top1": pytest.approx(73.7, abs=0.2), "n": 1000.0}
