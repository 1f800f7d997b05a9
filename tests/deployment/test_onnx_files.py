"""Models that are too large for one protobuf: the tensors lie beside the file, and everything finds them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import ExportError
from bitwright.deployment import export_float, onnx_files
from bitwright.deployment.runtimes.base import open_runtime


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "_LARGEST", 4096)


def quantized(width: int = 64) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).eval()
    batches = [torch.randn(4, width) for _ in range(3)]
    bw.quantize(model, batches)
    return model, batches


@pytest.mark.usefixtures("low_limit")
def test_tensors_beside_the_file_are_found(tmp_path: Path) -> None:
    model, batches = quantized()
    artefact = bw.export(model, tmp_path / "model.onnx", batches[0])
    (data,) = onnx_files.data_files(artefact.path)
    assert data.name.startswith("model.onnx.")
    assert sorted(tmp_path.iterdir()) == sorted([artefact.path, data])
    assert artefact.bytes == artefact.path.stat().st_size + data.stat().st_size
    assert data.stat().st_size >= 2 * 64 * 64
    assert bw.check(model, artefact.path, batches, per_site=True).passed
    runtime = open_runtime("onnxruntime", artefact.path)
    assert runtime.executed()["int8"] == 2
    assert runtime.size(artefact.path) == artefact.bytes


@pytest.mark.usefixtures("low_limit")
def test_a_damaged_tensor_beside_the_file_is_found(tmp_path: Path) -> None:
    model, batches = quantized()
    artefact = bw.export(model, tmp_path / "model.onnx", batches[0])
    (data,) = onnx_files.data_files(artefact.path)
    raw = bytearray(data.read_bytes())
    raw[100] ^= 1
    data.write_bytes(raw)
    assert not bw.check(model, artefact.path, batches).passed


@pytest.mark.usefixtures("low_limit")
def test_an_export_replaces_the_tensors_of_the_one_before(tmp_path: Path) -> None:
    model, batches = quantized()
    path = bw.export(model, tmp_path / "model.onnx", batches[0]).path
    before = onnx_files.data_files(path)
    bw.export(model, path, batches[0])
    assert onnx_files.data_files(path) != before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("low_limit")
def test_a_failed_export_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = quantized()
    path = bw.export(model, tmp_path / "model.onnx", batches[0]).path
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(*_: object, **__: object) -> str:
        raise ExportError("the disk is full")

    monkeypatch.setattr(sys.modules["bitwright.deployment.export"], "frozen_size", fail)
    with pytest.raises(ExportError):
        bw.export(model, path, batches[0])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("low_limit")
def test_a_large_float_model_is_written(tmp_path: Path) -> None:
    model, batches = quantized()
    bw.strip(model)
    path = export_float(model, tmp_path / "model.onnx", batches[0])
    assert len(onnx_files.data_files(path)) == 1
    result = open_runtime("onnxruntime", path)(batches[0])
    torch.testing.assert_close(torch.as_tensor(result), model(batches[0]).detach())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(36_000, 16_384), nn.Linear(16_384, 8)).eval()  # 2.4 GB, kept in float
    batches = [torch.randint(0, 36_000, (2, 3)) for _ in range(2)]
    bw.quantize(model, batches, keep_float=["0"])
    artefact = bw.export(model, tmp_path / "model.onnx", batches[0])
    assert artefact.bytes > 2**31
    assert bw.check(model, artefact.path, batches).passed
