"""One flipped bit of an artefact's numbers fails the check, with the site's name, whatever the outputs show."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import read_artefact
from bitwright.deployment.onnx_files import DIGESTS, site_of
from bitwright.deployment.runtimes.base import Runtime


class Net(nn.Module):
    """A convolution with a folded norm, a linear layer without bias in integers, and a head in float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        return self.head(torch.relu(self.hidden(x.mean((2, 3)))))


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 3, 8, 8) for _ in range(4)]


@pytest.fixture(scope="module")
def exported(batches: list[Tensor], tmp_path_factory: pytest.TempPathFactory) -> tuple[bw.Quantized, Path]:
    torch.manual_seed(0)
    model = Net()
    for batch in batches:
        model(batch)
    quantized = bw.quantize(model.eval(), batches, keep_float=["head*"])
    return quantized, quantized.export(tmp_path_factory.mktemp("integrity") / "model.onnx").path


def flip(path: Path, name: str, *, position: int, bit: int = 0) -> None:
    """Change one bit of a constant; in place, with the digests left as they were."""
    file = onnx.load(path)
    constant = next(i for i in file.graph.initializer if i.name == name)
    array = numpy_helper.to_array(constant).copy()
    raw = bytearray(array.tobytes())
    raw[position % len(raw)] ^= 1 << bit
    array = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
    constant.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(file, path)


def constants(path: Path) -> list[str]:
    return [constant.name for constant in onnx.load(path).graph.initializer if constant.dims or constant.raw_data]


def test_an_artefact_that_nobody_touched_passes(exported: tuple[bw.Quantized, Path], batches: list[Tensor]) -> None:
    check = exported[0].check(exported[1], batches)
    assert check.passed
    assert check.damages == ()


@pytest.mark.parametrize("trial", range(12))
def test_every_flipped_bit_is_found_and_named(
    trial: int, exported: tuple[bw.Quantized, Path], batches: list[Tensor], tmp_path: Path
) -> None:
    """Codes, scales, zero points, int32 biases, and the weight and bias that stayed in float."""
    quantized, path = exported
    names = constants(path)
    kinds = [name for name in names if name.endswith((".codes", ".scale", ".zero_point")) or name.startswith("head")]
    assert {"conv:weight.codes", "conv:weight.scale", "conv:input.zero_point"} <= set(kinds)
    assert any("bias" in name for name in kinds)
    assert any(name.startswith("head") for name in kinds)
    name = kinds[trial * len(kinds) // 12]
    copy = tmp_path / "model.onnx"
    copy.write_bytes(path.read_bytes())
    flip(copy, name, position=31 * trial)
    check = quantized.check(copy, batches[:1])
    assert not check.passed
    assert site_of(name) in [damage.site for damage in check.damages]


@pytest.mark.parametrize("name", ["conv:weight.codes", "conv:weight.scale", "hidden:weight.codes"])
def test_without_digests_the_models_own_codes_tell(
    name: str, exported: tuple[bw.Quantized, Path], batches: list[Tensor], tmp_path: Path
) -> None:
    quantized, path = exported
    file = onnx.load(path)
    kept = [entry for entry in file.metadata_props if entry.key != DIGESTS]
    del file.metadata_props[:]
    file.metadata_props.extend(kept)
    onnx.save(file, tmp_path / "model.onnx")
    assert quantized.check(tmp_path / "model.onnx", batches[:1]).passed
    flip(tmp_path / "model.onnx", name, position=5)
    check = quantized.check(tmp_path / "model.onnx", batches[:1])
    assert check.first_divergence == site_of(name)
    assert not check.passed


def test_an_artefact_of_other_weights_fails_though_it_is_whole(
    exported: tuple[bw.Quantized, Path], batches: list[Tensor], tmp_path: Path
) -> None:
    quantized, path = exported
    weight = quantized.model.get_parameter("hidden.weight")
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[3, 5] += 0.02
        check = quantized.check(path, batches[:1])
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert not check.passed
    assert [damage.site for damage in check.damages] == ["hidden:weight"]


@pytest.mark.parametrize(("runtime", "backend"), [("inductor", "torch_inductor"), ("ncnn", "ncnn")])
def test_files_of_other_runtimes(runtime: str, backend: str, batches: list[Tensor], tmp_path: Path) -> None:
    kind: type[Runtime] = RUNTIMES.get(runtime)
    if (reason := kind.missing()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    quantized = bw.quantize(Net().eval(), batches, backend=backend)
    path = tmp_path / f"model{kind.suffix}"
    kind.write(quantized.model, path, batches[0])
    assert kind.damages(path) == []
    if runtime == "ncnn":
        weights = path.with_suffix(".bin")
        raw = bytearray(weights.read_bytes())
        raw[len(raw) // 2] ^= 1
        weights.write_bytes(raw)
    else:
        from bitwright.deployment import exported_program as program_file

        program, found = program_file.load_program(path)
        assert found is not None
        name = next(name for name, place in found.constants.items() if place == "conv:weight.codes")
        program.state_dict[name].view(-1)[3] ^= 1
        files = {"bitwright-sites.json": ""}
        torch.export.load(path, extra_files=files)
        torch.export.save(program, path, extra_files=files)
    assert kind.damages(path) != []


def test_a_file_of_grids_that_was_changed_is_refused(batches: list[Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    quantized = bw.quantize(Net().eval(), batches, backend="snpe")
    artefact = quantized.export(tmp_path / "model.onnx")
    assert artefact.sidecar is not None
    read_artefact(artefact.path)
    text = artefact.sidecar.read_text(encoding="utf-8")
    document = json.loads(text)
    assert document
    artefact.sidecar.write_text(text.replace("0.", "1.", 1), encoding="utf-8")
    with pytest.raises(PlanError) as raised:
        read_artefact(artefact.path)
    assert raised.value.codes == ["damaged-artefact"]


@pytest.mark.parametrize(
    ("runtime", "backend"),
    [("inductor", "torch_inductor"), pytest.param("executorch", "executorch_xnnpack", marks=pytest.mark.slow)],
)
def test_every_flipped_bit_of_a_program_is_found(
    runtime: str, backend: str, batches: list[Tensor], tmp_path: Path
) -> None:
    kind: type[Runtime] = RUNTIMES.get(runtime)
    if (reason := kind.missing()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    quantized = bw.quantize(Net().eval(), batches, backend=backend, measure=False)
    path = tmp_path / f"model{kind.suffix}"
    kind.write(quantized.model, path, batches[0])
    program = path.with_suffix(".pt2")
    assert kind.damages(path) == []
    raw = program.read_bytes()
    with zipfile.ZipFile(program) as archive:
        members = [member for member in archive.infolist() if member.file_size and ".data" not in member.filename]
    assert len(members) > 5
    for member in members:
        start = member.header_offset + 30 + int.from_bytes(raw[member.header_offset + 26 :][:2], "little")
        start += int.from_bytes(raw[member.header_offset + 28 :][:2], "little")
        changed = bytearray(raw)
        changed[start + member.file_size // 2] ^= 1
        program.write_bytes(changed)
        with pytest.raises(BitwrightError) as raised:
            kind.damages(path)
        assert raised.value.codes == ["damaged-artefact"], member.filename
    program.write_bytes(raw[:-30])
    with pytest.raises(BitwrightError) as raised:
        kind.damages(path)
    assert raised.value.codes == ["damaged-artefact"]


def test_a_changed_value_in_the_notes_of_ncnn_is_found(batches: list[Tensor], tmp_path: Path) -> None:
    kind: type[Runtime] = RUNTIMES.get("ncnn")
    if (reason := kind.missing()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    quantized = bw.quantize(Net().eval(), batches, backend="ncnn", measure=False)
    path = tmp_path / "model.param"
    kind.write(quantized.model, path, batches[0])
    assert kind.damages(path) == []
    notes = path.with_suffix(".json")
    data = json.loads(notes.read_text(encoding="utf-8"))
    site = next(iter(data["sites"]))
    data["sites"][site]["pads"][0] += 1
    notes.write_text(json.dumps(data), encoding="utf-8")
    assert [damage.site for damage in kind.damages(path)] == ["model.json"]


SIDECARS = ["snpe", "nnie", "vitis", "tengine_u8", "stpu", "ppl_cuda"]


@pytest.mark.parametrize("backend", SIDECARS)
def test_check_finds_a_changed_digit_in_a_file_of_grids(backend: str, batches: list[Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    quantized = bw.quantize(Net().eval(), batches, backend=backend, measure=False)
    artefact = quantized.export(tmp_path / "model.onnx")
    assert artefact.sidecar is not None
    with pytest.raises(BitwrightError) as raised:
        quantized.check(artefact.path, batches)
    assert raised.value.codes == ["float-artefact"]
    text = artefact.sidecar.read_text(encoding="utf-8")
    digits = [index for index, letter in enumerate(text) if letter.isdigit()]
    for index in digits[:: max(1, len(digits) // 8)]:
        changed = text[:index] + str((int(text[index]) + 1) % 10) + text[index + 1 :]
        artefact.sidecar.write_text(changed, encoding="utf-8")
        with pytest.raises(BitwrightError) as raised:
            quantized.check(artefact.path, batches)
        assert raised.value.codes == ["damaged-artefact"], (index, text[index - 20 : index + 5])
    assert digits


@pytest.mark.parametrize(
    ("operator", "attribute"), [("Gemm", "transB"), ("Conv", "pads"), ("DequantizeLinear", "axis")]
)
def test_a_changed_attribute_is_found(
    operator: str, attribute: str, exported: tuple[bw.Quantized, Path], batches: list[Tensor], tmp_path: Path
) -> None:
    quantized, path = exported
    file = onnx.load(path)
    found = next(a for n in file.graph.node if n.op_type == operator for a in n.attribute if a.name == attribute)
    if found.type == onnx.AttributeProto.FLOAT:
        found.f *= 1.001
    elif found.type == onnx.AttributeProto.INTS:
        found.ints[:] = [value + 1 for value in found.ints[:2]] + [value - 1 for value in found.ints[2:]]
    else:
        found.i -= 4 if found.i == 0 else 1
    changed = tmp_path / "changed.onnx"
    onnx.save(file, changed)
    try:
        result = quantized.check(changed, batches)
    except bw.BitwrightError:  # the runtime refuses it
        return
    assert not result.passed
    assert "graph" in [damage.site for damage in result.damages]


def test_an_artefact_without_digests_is_told(
    exported: tuple[bw.Quantized, Path], batches: list[Tensor], tmp_path: Path
) -> None:
    quantized, path = exported
    file = onnx.load(path)
    kept = [entry for entry in file.metadata_props if entry.key != DIGESTS]
    del file.metadata_props[:]
    file.metadata_props.extend(kept)
    onnx.save(file, tmp_path / "without.onnx")
    assert "no-digests" in [w.code for w in quantized.check(tmp_path / "without.onnx", batches).warnings]
    assert "no-digests" not in [w.code for w in quantized.check(path, batches).warnings]
