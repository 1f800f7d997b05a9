"""Site by site: the first one where an artefact leaves the simulated model is named, exactly that one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

import bitwright as bw


class Net(nn.Module):
    """A residual block and a square head, whose weight looks the same shape transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.conv(x))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def quantized() -> bw.Quantized:
    """One model for all tests; none of them changes it."""
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    return bw.quantize(Net().eval(), batches)


@pytest.fixture(scope="module")
def exported(quantized: bw.Quantized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized.export(tmp_path_factory.mktemp("sites") / "model.onnx").path


@pytest.fixture
def artefact(exported: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copy(exported, tmp_path / "model.onnx"))


def change(path: Path, name: str, how: NDArray[np.generic] | float) -> None:
    """Write other numbers into one constant of the artefact: all of them times `how`, or its first one another."""
    file = onnx.load(path)
    constant = next(i for i in file.graph.initializer if i.name == name)
    array = numpy_helper.to_array(constant).copy()
    if isinstance(how, float):
        array = (array * how).astype(array.dtype)
    else:
        array.ravel()[: how.size] += how.astype(array.dtype)
    constant.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(file, path)


ONE = np.ones(1)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("constant", "how", "site"),
    [
        ("stem:weight.codes", ONE, "stem:weight"),  # one weight, one code
        ("conv:weight.codes", -1.0, "conv:weight"),
        ("head:weight.codes", ONE, "head:weight"),
        ("conv:bias.codes", ONE, "conv:bias"),
        ("conv:weight.scale", 1.001, "conv:weight"),
        ("/relu#0:output.scale", 1.02, "/relu#0:output"),
        ("stem:input.zero_point", ONE, "stem:input"),
    ],
)
def test_the_damaged_site_is_the_first_that_diverges(
    quantized: bw.Quantized, artefact: Path, runtime: str, constant: str, how: NDArray[np.generic] | float, site: str
) -> None:
    change(artefact, constant, how)
    result = quantized.check(artefact, runtime=runtime, per_site=True)
    assert result.first_divergence == site
    assert not result.passed


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_sites_come_in_the_order_of_execution(quantized: bw.Quantized, artefact: Path, runtime: str) -> None:
    result = quantized.check(artefact, runtime=runtime, per_site=True)
    assert result.first_divergence is None
    order = [site.site for site in result.sites]
    named = ["stem:input", "stem:weight", "stem:bias", "/relu#0:output", "conv:weight", "head:weight"]
    assert [site for site in order if site in named] == named
    assert {*order, *result.unseen} == {site for site, _ in quantized.plan.quantized}
    assert all(site.stored == site.site.endswith(("weight", "bias")) for site in result.sites)
    assert all(site.differing == 0 and site.largest == 0 for site in result.sites if site.stored)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_copy_that_shows_its_sites_computes_the_same(quantized: bw.Quantized, artefact: Path, runtime: str) -> None:
    result = quantized.check(artefact, runtime=runtime, per_site=True)
    assert result.probe is not None
    assert result.probe.outputs_identical
    assert result.probe.outputs == sum(not site.stored for site in result.sites)
    assert quantized.check(artefact, runtime=runtime).probe is None
