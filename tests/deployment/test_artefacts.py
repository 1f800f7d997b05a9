"""What tool chains are given: every scale, zero point and code comes back bit by bit."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import raises_problem
from schemas import json_schema
from target_blocks import block
from torch import Tensor, nn

import bitwright as bw
from bitwright.backends import backend
from bitwright.core.errors import ArtefactError, ExportError, PlanError
from bitwright.core.registry import ARTEFACTS, BACKENDS
from bitwright.deployment import open_runtime, read_artefact
from bitwright.deployment.artefacts import StoredGrid, TensorGrid
from bitwright.quantizers import tapped

torch.set_num_threads(1)

# -- files of numbers, whatever the numbers --------------------------------------------------------------------

scales = st.floats(2.0**-40, 2.0**40, width=32)
powers = st.integers(-40, 40).map(lambda exponent: 2.0**exponent)
CODES: dict[str, Any] = {
    "clip-ranges": st.just((-127, 127)),
    "ncnn-table": st.just((-127, 127)),
    "scale-text": st.just((0, 255)),
    "fix-positions": st.sampled_from([(-128, 127), (-8, 7), (-32768, 32767)]),
    "log-levels": st.just((-127, 127)),
    "encodings": st.sampled_from([(-127, 127), (-128, 127), (0, 255), (0, 15), (0, 65535)]),
    "ranges": st.sampled_from([(-127, 127), (-128, 127), (0, 255), (0, 15), (0, 65535), (-32768, 32767)]),
}
PER_TENSOR = {"scale-text", "fix-positions", "log-levels"}
WITH_ZERO_POINTS = {"scale-text", "encodings", "ranges"}


@st.composite
def tensors(draw: st.DrawFn, kind: str) -> list[TensorGrid]:
    grids = []
    for index in range(draw(st.integers(1, 3))):
        qmin, qmax = draw(CODES[kind])
        weight = draw(st.booleans())
        channels = draw(st.integers(1, 4)) if weight and kind not in PER_TENSOR else None
        size = channels or 1
        scale = draw(st.lists(powers if kind == "fix-positions" else scales, min_size=size, max_size=size))
        free = kind in WITH_ZERO_POINTS and (qmin == 0 or kind == "ranges")
        zero = draw(st.lists(st.integers(qmin, qmax) if free else st.just(0), min_size=size, max_size=size))
        if kind == "log-levels":
            zero = draw(st.lists(st.integers(-600, 600), min_size=1, max_size=1))
        shape = () if channels is None else (channels,)
        grid = StoredGrid(
            scale=np.array(scale, np.float32).reshape(shape),
            zero_point=np.array(zero, np.int64).reshape(shape),
            qmin=qmin,
            qmax=qmax,
        )
        name = f"tensor_{index}"
        axis = None if channels is None else 0
        grids.append(TensorGrid(tensor=name, grid=grid, weight=weight, axis=axis, layers=(name,)))
    return grids


@pytest.mark.parametrize("kind", CODES)
@settings(max_examples=50)
@given(data=st.data())
def test_every_number_comes_back(kind: str, data: st.DataObject) -> None:
    sidecar = ARTEFACTS.get(kind)()
    grids = data.draw(tensors(kind))
    assert all(sidecar.refusal(grid) is None for grid in grids)
    text = sidecar.write(grids)
    if sidecar.document is not None:
        jsonschema.validate(json.loads(text), json_schema(f"artefact-{kind}-1"))
    back = sidecar.read(text)
    assert set(back) == {key for grid in grids for key in sidecar.keys(grid)}
    for grid in grids:
        assert all(back[key].same(grid.grid) for key in sidecar.keys(grid)), (grid.grid, back)


WITHOUT_GRAPH = {"compressed-tensors", "gguf"}  # tests/deployment/test_language_artefacts.py


def test_all_kinds_are_tested() -> None:
    assert sorted(CODES) == [name for name in ARTEFACTS.names() if name not in WITHOUT_GRAPH]


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("text", ["{}", "a", '{"format": "other"}', "a b c d\n"])
def test_other_files_are_refused(kind: str, text: str) -> None:
    with pytest.raises(ArtefactError) as caught:
        ARTEFACTS.get(kind)().read(text)
    assert caught.value.codes[0] in ("invalid-json", "invalid-line", "invalid-value", "missing-key", "unknown-key")


# -- from a model to its artefact and back ---------------------------------------------------------------------


Exported = tuple[nn.Module, Any, bw.Quantized]
FOLDER = tempfile.TemporaryDirectory()


@cache  # an export takes seconds, and tests only look at it
def exported(name: str, kind: str | None = None) -> Exported:
    model, inputs = block("residual")
    quantized = bw.quantize(model, [inputs], backend=name)
    return model, quantized.export(Path(FOLDER.name) / f"{name}-{kind}.onnx", artefact=kind), quantized


# one target for each artefact; ranges also with scales per channel and with 16 bits
CASES = {
    "snpe": "encodings",
    "ppl_cuda": "ranges",
    "ppl_w8a16": "ranges",
    "tensorrt": "clip-ranges",
    "vitis": "fix-positions",
    "nnie": "log-levels",
    "tengine_u8": "scale-text",
    "ncnn": "ncnn-table",
    "tflitemicro": "qdq",
}


def test_tables_name_artefacts_that_exist() -> None:
    named = {kind for name in BACKENDS.names() for kind in backend(name).artefacts}
    assert named == set(CASES.values()) == {*ARTEFACTS.names(), "qdq"} - WITHOUT_GRAPH


@pytest.mark.parametrize(("name", "kind"), CASES.items())
def test_an_artefact_has_the_models_numbers(name: str, kind: str) -> None:
    model, artefact, _ = exported(name, kind)
    assert artefact.kind == kind
    onnx.checker.check_model(onnx.load(artefact.path), full_check=True)
    stored = read_artefact(artefact.path)
    codes: dict[str, Tensor] = {}

    def look(site: str, quantizer: Any, x: Tensor) -> None:
        codes[site] = quantizer.integers(x)

    with tapped(model, look), torch.no_grad():
        model(*block("residual")[1])
    quantizers = bw.quantizers_of(model)
    assert {site for site in quantizers if not site.endswith(":bias")} <= set(stored)
    for site, quantizer in quantizers.items():
        if site.endswith(":bias"):
            continue
        grid = stored[site].grid
        if kind == "log-levels":
            assert grid.scale.tobytes() == quantizer.scale.numpy().tobytes()
            continue
        wanted = quantizer.grid()
        assert grid.scale.tobytes() == wanted.scale.numpy().tobytes()
        assert np.array_equal(grid.zero_point.ravel(), wanted.zero_point.numpy().ravel())
        assert kind == "qdq" or (grid.qmin, grid.qmax) == (wanted.qmin, wanted.qmax)
        if site.endswith(":weight"):
            found, exact = stored[site].codes, codes[site].numpy()
            assert found is not None
            assert np.array_equal(found, exact) or np.array_equal(found, exact.T)


@pytest.mark.parametrize("name", ["snpe", "nnie", "vitis"])
def test_the_float_model_has_rounded_weights(name: str) -> None:
    """With activations in float, too, the simulated model is what the file computes."""
    model, artefact, quantized = exported(name, CASES[name])
    inputs = block("residual")[1]
    for site, quantizer in bw.quantizers_of(model).items():
        quantizer.enabled = site.endswith((":weight", ":bias"))
    with torch.no_grad():
        expected = model(*inputs)
    for quantizer in bw.quantizers_of(model).values():
        quantizer.enabled = True
    real = open_runtime("onnxruntime", artefact.path)(*inputs)
    assert torch.allclose(real, expected, atol=1e-5)
    assert not any(node.op_type.endswith("quantizeLinear") for node in onnx.load(artefact.path).graph.node)
    assert {"stem", "conv1", "conv2", "head"} <= {node.name for node in onnx.load(artefact.path).graph.node}
    with pytest.raises(ArtefactError) as caught:
        quantized.check(artefact.path)
    assert caught.value.codes == ["float-artefact"]


def test_the_same_model_as_pairs() -> None:
    _, artefact, quantized = exported("snpe", "qdq")
    assert artefact.sidecar is None
    assert quantized.check(artefact.path).passed


def test_unknown_kinds_and_levels(tmp_path: Path) -> None:
    _, artefact, quantized = exported("snpe", "encodings")
    with raises_problem("unknown-name", mentions="'encodings'"):
        quantized.export(tmp_path / "other.onnx", artefact="encoding")
    with raises_problem("unsupported-levels", mentions="log-levels"):
        quantized.export(tmp_path / "other.onnx", artefact="log-levels")
    with pytest.raises(PlanError) as caught:
        quantized.export(tmp_path / "other.onnx", artefact="fix-positions")
    assert len(caught.value.problems) == 11
    assert all(problem.where and problem.fix == "use int8/tensor/sym/pot" for problem in caught.value.problems)
    assert not (tmp_path / "other.onnx").exists()
    alone = tmp_path / "alone.onnx"
    alone.write_bytes(artefact.path.read_bytes())
    with pytest.raises(ArtefactError) as caught:
        read_artefact(alone)
    assert "missing-file" in caught.value.codes


def test_nnie_cannot_be_pairs(tmp_path: Path) -> None:
    _, _, quantized = exported("nnie", "log-levels")
    with raises_problem("unsupported-levels", mentions="nnie"):
        quantized.export(tmp_path / "pairs.onnx", artefact="qdq")


def test_one_grid_per_tensor(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * 2 + self.b(x)

    x = torch.randn(8, 4)
    model = Twice().eval()
    plan = bw.make_plan(bw.capture(model, x), "stpu")
    plan = plan.with_sites({"b:input": bw.SiteSpec(format=plan.sites["a:input"].format, observer="mse")})
    quantized = bw.quantize(model, [x], backend="stpu", plan=plan)
    with pytest.raises(ExportError) as caught:
        quantized.export(tmp_path / "model.onnx")
    assert "conflicting-grids" in caught.value.codes
