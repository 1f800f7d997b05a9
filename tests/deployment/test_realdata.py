"""The accuracy of INT8 artefacts on real data, on the real runtime."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

import bitwright as bw
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import available_runtimes
from bitwright.zoo.workloads import efficientnet_lite0_imagenet, resnet20_cifar10

pytestmark = [pytest.mark.realdata, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("build", "reference", "allowed", "samples"),
    [
        pytest.param(resnet20_cifar10, 91.73, 0.3, 10_000, marks=pytest.mark.slow),
        pytest.param(efficientnet_lite0_imagenet, 73.7, 1.0, 1_000, marks=pytest.mark.slow),
    ],
    ids=["resnet20", "efficientnet-lite0"],
)
def test_int8_keeps_the_accuracy(
    build: Callable[[Path], bw.Workload], reference: float, allowed: float, samples: int, data_dir: Path, tmp_path: Path
) -> None:
    workload = build(data_dir)
    assert workload.calibration is not None
    assert workload.evaluation is not None
    size = bw.export_float(workload.model, tmp_path / "float.onnx", workload.inputs).stat().st_size
    quantized = bw.quantize(workload.model, workload.calibration(), example=workload.inputs)
    artefact = quantized.export(tmp_path / "int8.onnx")
    assert artefact.bytes <= 0.31 * size  # the digests of all tensors are 1 % of it
    result = bw.evaluate(workload, bw.open_runtime("onnxruntime", artefact.path))
    assert result["n"] == samples
    assert result["top1"] >= reference - allowed
    check = quantized.check(artefact.path, [x for x, _ in islice(workload.evaluation(), 1)], per_site=True)
    assert check.passed
    assert check.first_divergence is None


@pytest.mark.parametrize(
    ("build", "allowed", "samples"),
    [
        pytest.param(resnet20_cifar10, 1.0, 250, id="resnet20"),
        pytest.param(efficientnet_lite0_imagenet, 4.0, 50, marks=pytest.mark.slow, id="efficientnet-lite0"),
    ],
)
def test_litert_predicts_what_the_simulation_predicts(
    build: Callable[[Path], bw.Workload], allowed: float, samples: int, data_dir: Path, tmp_path: Path
) -> None:
    """On a part of the images; `benchmarks/litert.py` measures all of them."""
    if reason := available_runtimes()["litert"]:
        pytest.skip(reason)
    workload = build(data_dir)
    assert workload.calibration is not None
    assert workload.evaluation is not None
    images, labels = next(iter(workload.evaluation()))
    assert len(images) == samples
    with torch.no_grad():
        before = workload.model.eval()(images).argmax(1)
    quantized = bw.quantize(
        workload.model,
        workload.calibration(),
        example=workload.inputs,
        backend="tflitemicro",
        weights="int8/channel/sym",
        activations="int8/tensor/asym",
        measure=False,
    )
    path = tmp_path / "model.tflite"
    RUNTIMES.get("litert").write(quantized.model, path, images[:10])
    (output,) = quantized.check(path, images.split(10), runtime="litert_reference", measure=False).outputs
    assert output.top1_agreement == 1.0
    assert output.max_error == 0.0  # the simulation rounds as these kernels do
    found = bw.open_runtime("litert_reference", path)(images).argmax(1)
    change = 100 * float((found == labels).float().mean() - (before == labels).float().mean())
    assert change >= -allowed
