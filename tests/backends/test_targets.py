"""The facts about each target that matter, said one by one; the snapshots have the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import raises_problem
from target_blocks import block, graph_of
from torch import Tensor, nn

import bitwright as bw
from bitwright.backends import backend, place
from bitwright.graph import capture
from bitwright.plan import Plan

torch.set_num_threads(1)

# target: graph of a residual block, weights, activations
TARGETS: dict[str, tuple[int, str, str]] = {
    "academic": (1, "int8/tensor/sym", "int8/tensor/sym/adasign"),
    "acl": (1, "uint8/channel/asym", "uint8/tensor/asym"),
    "ncnn": (1, "int8/channel/sym/narrow", "int8/tensor/sym/narrow"),
    "tensorrt": (2, "int8/channel/sym/narrow", "int8/tensor/sym/narrow"),
    "torch_inductor": (2, "int8/channel/sym", "uint8/tensor/asym"),
    "tvm": (3, "int8/tensor/sym/pot", "int8/tensor/sym/pot"),
    "snpe": (3, "uint8/tensor/asym", "uint8/tensor/asym"),
    "fbgemm": (3, "int8/channel/asym", "uint8/tensor/asym"),
    "tflitemicro": (3, "int8/tensor/sym/pot", "int8/tensor/sym/pot"),
    "openvino": (3, "int8/channel/sym", "uint8/tensor/asym"),
    "onnxruntime": (3, "int8/channel/sym", "uint8/tensor/asym"),
    "onnx_qnn": (3, "uint8/tensor/asym", "uint8/tensor/asym"),
    "tengine_u8": (3, "uint8/tensor/asym", "uint8/tensor/asym"),
    "ppl_cuda": (3, "uint8/channel/asym", "uint8/tensor/asym"),
    "ppl_w8a16": (3, "uint8/tensor/asym", "uint16/tensor/asym"),
    "vitis": (3, "int8/tensor/sym/pot", "int8/tensor/sym/pot"),
    "nnie": (3, "int8/tensor/sym", "int8/tensor/sym"),
    "stpu": (3, "int8/tensor/sym/narrow", "int8/tensor/sym/narrow"),
    "executorch_xnnpack": (3, "int8/channel/sym/narrow", "int8/tensor/asym"),
}


def reads_integers(plan: Plan, operand: str, producer: str) -> bool:
    return operand in plan.sites or producer in plan.sites


@pytest.mark.parametrize("name", TARGETS)
def test_the_graph_of_a_residual_block(name: str) -> None:
    plan = place(graph_of("residual"), name)
    branch = reads_integers(plan, "/add#0:input0", "bn2:output")
    shortcut = reads_integers(plan, "/add#0:input1", "/relu#0:output")
    assert {(False, False): 1, (False, True): 2, (True, True): 3}[branch, shortcut] == TARGETS[name][0]


@pytest.mark.parametrize("name", TARGETS)
def test_formats(name: str) -> None:
    plan = place(graph_of("residual"), name)
    assert (str(plan.sites["stem:weight"].format), str(plan.sites["stem:input"].format)) == TARGETS[name][1:]


@pytest.mark.parametrize("name", TARGETS)
def test_norms_are_folded_everywhere_but_in_papers(name: str) -> None:
    assert bool(place(graph_of("residual"), name).fold) == (name != "academic")


@pytest.mark.parametrize("name", ["tflitemicro", "torch_inductor", "executorch_xnnpack"])
def test_a_concatenation_has_one_grid(name: str) -> None:
    plan = place(graph_of("concat"), name)
    first, *rest = ("/relu#0:output", "/relu#1:output", "/relu#2:output", "pool:output", "/cat#0:output")
    assert plan.sites[first].share is None
    assert [plan.sites[site].share for site in rest] == [first] * 4


def test_one_grid_covers_all_that_share_it() -> None:
    class Cat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)
            for conv, weight in ((self.a, 1.0), (self.b, 10.0)):
                nn.init.constant_(conv.weight, weight)
                nn.init.zeros_(conv.bias)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.a(x), self.b(x)], 1)

    x = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
    model = Cat().eval()
    bw.quantize(model, [x], backend="tflitemicro")
    assert set(bw.quantizers_of(model)) >= {"a:output"}
    assert "b:output" not in bw.quantizers_of(model)
    assert model(x).abs().max() > 7  # the first branch alone would end at 1


@pytest.mark.parametrize("name", ["snpe", "vitis", "tengine_u8", "stpu", "ppl_cuda", "ppl_w8a16", "onnx_qnn", "fbgemm"])
def test_targets_whose_every_output_is_an_integer(name: str) -> None:
    assert "head:output" in place(graph_of("residual"), name).sites


@pytest.mark.parametrize("name", ["academic", "tensorrt", "acl", "ncnn", "nnie", "torch_inductor", "openvino"])
def test_targets_that_return_floats(name: str) -> None:
    assert "head:output" not in place(graph_of("residual"), name).sites


def test_quantizers_hop_behind_relu_and_flatten() -> None:
    sites = place(graph_of("residual"), "snpe").sites
    assert "/flatten#0:output" in sites
    assert not {"/adaptive_avg_pool2d#0:output", "stem:output", "/add#0:output"} & set(sites)


def test_tengine_also_quantizes_hard_swish_and_sigmoid() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Hardswish(), nn.Sigmoid())
    graph = capture(model, torch.randn(1, 3, 4, 4))
    assert {"1:output", "2:output"} <= set(place(graph, "tengine_u8").sites)
    assert not {"1:output", "2:output"} & set(place(graph, "snpe").sites)


@pytest.mark.parametrize("name", ["academic_nlp", "tensorrt_nlp"])
def test_language_models(name: str) -> None:
    plan = place(graph_of("transformer"), name)
    # sums of embeddings and the mask's add stay float
    assert not {"tokens:output", "places:output", "/matmul#0:output", "/add#0:input0", "/add#1:input1"} & set(
        plan.sites
    )
    # residual adds have integers on both sides; products of attention, too
    assert {"norm1:output", "o:output", "norm2:output", "down:output", "/softmax#0:output"} <= set(plan.sites)


def test_attention_by_the_usual_tables() -> None:
    for name, products in (("academic", False), ("torch_inductor", False), ("tensorrt", True), ("tvm", True)):
        plan = place(graph_of("transformer"), name)
        assert ("/softmax#0:output" in plan.sites) is products
        assert ("/matmul#0" in plan.float) is not products


def test_nnie_computes_with_logarithmic_levels() -> None:
    plan = place(graph_of("deconv"), "nnie")
    assert {spec.quantizer for spec in plan.sites.values()} == {"nnie"}
    chosen = place(graph_of("deconv"), "nnie", quantizer="plain")
    assert {spec.quantizer for spec in chosen.sites.values()} == {"plain"}


def edge_bits(plan: Plan) -> list[int]:
    return [spec.format.bits for site, spec in plan.sites.items() if site.endswith(":weight")]


def test_first_and_last_operators_keep_eight_bits() -> None:
    low: dict[str, Any] = {"weights": "int4/tensor/sym", "activations": "int4/tensor/sym/adasign"}
    plan = place(graph_of("residual"), "academic", **low)
    assert edge_bits(plan) == [8, 4, 4, 8]
    assert plan.sites["stem:input"].format.bits == 8
    assert "8 bits at the first and last operator" in plan.sites["head:weight"].why
    assert edge_bits(place(graph_of("residual"), "academic", first_last_bits=4, **low)) == [4, 4, 4, 4]


def test_edges_never_lose_bits_by_default() -> None:
    plan = place(graph_of("residual"), "academic", weights="int16/tensor/sym", activations="int16/tensor/sym")
    assert edge_bits(plan) == [16, 16, 16, 16]


# -- faults of earlier systems that ours must not have ---------------------------------------------------------


def test_one_prepare_changes_nothing_for_the_next() -> None:
    """There, preparing for one backend changed process-wide tables."""
    before = {name: backend(name).model_dump_json() for name in TARGETS}
    plans = {name: place(graph_of("residual"), name).to_yaml() for name in TARGETS}
    for name in ("vitis", "tensorrt", "snpe"):
        model, inputs = block("residual")
        bw.quantize(model, [inputs], backend=name)
    assert {name: backend(name).model_dump_json() for name in TARGETS} == before
    assert {name: place(graph_of("residual"), name).to_yaml() for name in TARGETS} == plans


@pytest.mark.parametrize("name", ["tvm", "tflitemicro", "vitis"])
def test_powers_of_two_stay_while_scales_train(name: str) -> None:
    """There, power-of-two scales were lost once they trained."""
    model, inputs = block("residual")
    bw.quantize(model, [inputs], backend=name, quantizer="lsq", weight_quantizer="lsq")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(*inputs).square().sum().backward()
        optimizer.step()
    scales = [q.grid().scale for q in bw.quantizers_of(model).values()]
    assert scales
    assert all(bool((torch.frexp(scale).mantissa == 0.5).all()) for scale in scales)


def test_nested_names_stay_float() -> None:
    """There, nested exclude names were ignored."""
    outer = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)), nn.Conv2d(3, 3, 1))
    assert len(TARGETS) > 10
    for name in TARGETS:
        plan = place(capture(outer, torch.randn(1, 3, 4, 4)), name, keep_float=["0.1"])
        kept = {operator: why for operator, why in plan.float.items() if not operator.endswith(".bias")}
        assert kept == {"0.1": "kept in float by request"}
        assert "0.1:weight" not in plan.sites
        assert "0.0:weight" in plan.sites


def test_unsigned_ranges_use_all_codes() -> None:
    """There, tensors that are never negative used half of the codes."""
    model, inputs = block("residual")
    bw.quantize(model, [inputs], backend="academic")
    behind_relu = bw.quantizers_of(model)["/relu#1:output"]
    assert (behind_relu.qmin, behind_relu.qmax) == (0, 255)


def test_an_unknown_algorithm_is_an_error() -> None:
    """There, it logged a line and returned nothing."""
    model, inputs = block("residual")
    with raises_problem("unknown-name", where="quantizer", mentions="'lsq'"):
        bw.quantize(model, [inputs], backend="snpe", quantizer="lqs")


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_edges_with_8_bits_keep_the_guard_that_the_rest_does_not_need(target: str) -> None:
    low: dict[str, Any] = {"weights": "int4/channel/sym", "activations": "uint4/tensor/asym", "first_last_bits": 8}
    plan = place(graph_of("residual"), target, saturating=True, **low)
    weights = {site: spec for site, spec in plan.sites.items() if site.endswith(":weight")}
    assert {spec.guard for spec in weights.values() if spec.format.bits == 8} == {"int16-pairs"}
    assert {spec.guard for spec in weights.values() if spec.format.bits < 8} == {None}
    assert all("saturating" in spec.why for spec in weights.values() if spec.guard)


def test_edges_with_fewer_bits_need_no_guard() -> None:
    plan = place(graph_of("residual"), "onnxruntime", first_last_bits=4, saturating=True)
    assert all(spec.guard is None for spec in plan.sites.values() if spec.format.bits < 8)
