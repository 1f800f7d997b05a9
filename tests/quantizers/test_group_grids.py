"""Grids of weight groups: signed scales that use every code, and the search of scales, against plain NumPy."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from problems import raises_problem
from torch import nn

import bitwright as bw
from bitwright.core.formats import Format
from bitwright.quantizers import prepare, quantizers_of, strip
from bitwright.quantizers.grid import grid_from_range
from bitwright.quantizers.observers.base import extremes
from bitwright.quantizers.observers.histogram import Mse, best_range

FULL = "int4/group32/sym/full"


def rows(count: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)) * 0.3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False)).eval()


def tokens() -> torch.Tensor:
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))


def rounded(x: torch.Tensor, format: str, ends: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    grid = grid_from_range(*ends, Format.parse(format))
    scale, zero = grid.scale[:, None], grid.zero_point[:, None]
    return (torch.clamp(torch.round(x / scale) + zero, grid.qmin, grid.qmax) - zero) * scale


def test_the_largest_value_gets_the_lowest_code() -> None:
    x = rows()
    expected = np.empty_like(x.numpy())
    for index, row in enumerate(x.numpy()):
        scale = row[np.abs(row).argmax()] / np.float32(-8)  # the group's value of largest magnitude, with its sign
        expected[index] = np.clip(np.rint(row / scale), -8, 7) * scale
    np.testing.assert_allclose(rounded(x, FULL, extremes(x)).numpy(), expected, rtol=1e-6)
    grid = grid_from_range(*extremes(x), Format.parse(FULL))
    assert {bool(sign) for sign in grid.scale > 0} == {True, False}
    usual = rounded(x, "int4/group32/sym", extremes(x))
    assert (torch.from_numpy(expected) - x).square().sum() < 0.9 * (usual - x).square().sum()


def test_rows_of_zeros_and_of_one_sign() -> None:
    x = torch.stack([torch.zeros(32), rows(1)[0].abs(), -rows(1)[0].abs()])
    grid = grid_from_range(*extremes(x), Format.parse(FULL), site="x")
    assert grid.scale[0] > 0
    assert grid.scale[1] < 0 < grid.scale[2]
    assert torch.equal(rounded(x, FULL, extremes(x))[0], x[0])


@pytest.mark.parametrize(
    "format", ["int4/group32/sym", FULL, "int4/group32/asym", "uint4/group32/asym", "int3/group8/sym"]
)
def test_the_search_is_better_than_shrinking_the_range(format: str) -> None:
    x = rows(300).reshape(-1, Format.parse(format).group)
    slow = Mse(format=Format.parse(format), p=2.0 + 1e-9)  # the general search over 81 ranges
    slow.observe(x)
    fast = Mse(format=Format.parse(format))
    fast.observe(x)
    errors = [
        float((rounded(x, format, ends) - x).square().sum()) for ends in (extremes(x), slow.range(), fast.range())
    ]
    assert errors[2] <= errors[1] < errors[0], errors


def test_importance_moves_the_error_to_unimportant_values() -> None:
    x = rows(200)
    importance = torch.rand(32, generator=torch.Generator().manual_seed(3)).pow(4) + 1e-3
    plain, weighted = (rounded(x, FULL, best_range(x, Format.parse(FULL), w)) - x for w in (None, importance))
    assert (weighted.square() * importance).sum() < 0.9 * (plain.square() * importance).sum()
    assert weighted.square().sum() > plain.square().sum()


def test_values_near_the_limits_of_float32() -> None:
    for factor in (1e-30, 1e30):
        x = rows(20)
        low, high = best_range(x * factor, Format.parse(FULL))
        usual = best_range(x, Format.parse(FULL))
        torch.testing.assert_close((low / factor, high / factor), usual, rtol=1e-3, atol=1e-6)


def test_the_search_is_fast() -> None:
    x = torch.randn(1 << 16, 32)  # 2 million numbers
    start = time.process_time()
    best_range(x, Format.parse(FULL))
    assert time.process_time() - start < 10  # 0.3 s without other work; 81 ranges take 12 s


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("format", [FULL, "int8/group32/sym/full", "int4/group32/asym", "int4/group32"])
@pytest.mark.parametrize("observer", ["minmax", "mse"])
def test_runtimes_store_these_grids(format: str, observer: str, runtime: str, tmp_path: Path) -> None:
    pytest.importorskip(runtime)
    options = {"weights": format, "weight_observer": observer, "activations": "float"}
    quantized = bw.quantize(network(), [tokens()], backend=runtime, **options)
    artefact = quantized.export(tmp_path / "m.onnx")
    assert quantized.check(artefact.path).passed
    scales = [one.scale for one in quantizers_of(quantized.model).values()]
    assert any(bool((scale < 0).any()) for scale in scales) == (not format.endswith("asym"))
    if runtime == "onnxruntime":
        session = ort.SessionOptions()
        session.optimized_model_filepath = str(tmp_path / "fused.onnx")
        session.log_severity_level = 3  # the written file is for this machine
        ort.InferenceSession(str(artefact.path), session, providers=["CPUExecutionProvider"])
        assert Counter(n.op_type for n in onnx.load(tmp_path / "fused.onnx").graph.node)["MatMulNBits"] == 2


def test_a_group_without_symmetry_is_the_best_that_the_target_stores() -> None:
    graph = bw.capture(network(), tokens())
    for target in ("onnxruntime", "openvino"):
        plan = bw.make_plan(graph, target, weights="int4/group32", activations="float")
        assert str(plan.sites["0:weight"].format) == FULL
    plan = bw.make_plan(graph, "onnxruntime", weights="uint4/group32", activations="float")
    assert str(plan.sites["0:weight"].format) == "uint4/group32/sym"


def test_targets_without_negative_scales_refuse_them() -> None:
    graph = bw.capture(network(), tokens())
    for target, format in (("torch_inductor", "int8/channel/sym/full"), ("onnxruntime", "int8/channel/sym/full")):
        with raises_problem("unsupported-format", where="plan"):
            bw.make_plan(graph, target, weights=format)
    with raises_problem("unsupported-format"):
        bw.quantize(network(), [tokens()], weights=FULL, weight_quantizer="tqt")


@pytest.mark.parametrize("text", ["uint4/group32/sym/full", "int4/group32/asym/full", "int4/sym/narrow/full"])
def test_contradicting_flags(text: str) -> None:
    with raises_problem("invalid-format"):
        Format.parse(text)


def test_saved_scales_keep_their_signs(tmp_path: Path) -> None:
    quantized = bw.quantize(network(), [tokens()], weights=FULL, activations="float")
    quantized.save(tmp_path / "out", artefact=False)
    again = bw.load(tmp_path / "out", model=network(), inputs=(tokens(),))
    for site, quantizer in quantizers_of(quantized.model).items():
        assert torch.equal(quantizers_of(again.model)[site].scale, quantizer.scale)
    torch.testing.assert_close(again.model(tokens()), quantized.model(tokens()), rtol=0, atol=0)


def test_a_negative_scale_of_another_format_is_refused() -> None:
    model = network()
    plan = bw.make_plan(bw.capture(model, tokens()), "onnxruntime", weights="int4/group32/sym", activations="float")
    prepare(model, plan)
    bw.calibrate(model, [tokens()])
    state = {key: -value if key.endswith(".scale") else value for key, value in model.state_dict().items()}
    with raises_problem("scale-range", where="0:weight"):
        model.load_state_dict(state)
    strip(model)


def test_learned_scales_keep_their_signs() -> None:
    options = {"weights": FULL, "activations": "float"}
    plain = bw.quantize(network(), [tokens()], **options)
    learned = bw.quantize(network(), [tokens()], **options, weight_quantizer="lsq")
    torch.testing.assert_close(learned.model(tokens()), plain.model(tokens()))
    quantizer, weight = quantizers_of(learned.model)["0:weight"], network()[0].weight.detach()
    towards = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    (quantizer(weight) * towards).sum().backward()
    blocks, scale = weight.reshape(-1, 32), quantizer.scale.detach().reshape(-1, 1)
    steps = blocks / scale
    codes = torch.clamp(torch.round(steps), -8, 7)
    inside = (steps >= -8) & (steps <= 7)
    expected = (towards.reshape(-1, 32) * (codes - torch.where(inside, steps, 0.0))).sum(1) / (32 * 7) ** 0.5
    assert quantizer.scale.grad is not None
    torch.testing.assert_close(quantizer.scale.grad.flatten(), expected, rtol=1e-4, atol=1e-5)
