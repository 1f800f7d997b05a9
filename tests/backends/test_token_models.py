"""Recipes for models that predict tokens: roles of their operators, named precisions, groups, and known failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.support.language_models import VOCABULARY, make_llama
from tests.support.problems import raises_problem
from torch import Tensor, nn

import bitwright
from bitwright.backends.token_models import default_steps, plan_warnings, token_model


def tokens(count: int = 2) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(1))}


def llama() -> nn.Module:
    model = make_llama()
    model.config.use_cache = False
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def graph() -> bitwright.Graph:
    return bitwright.capture(llama(), tokens())


def test_the_head_is_found_and_other_models_have_none(graph: bitwright.Graph) -> None:
    found = token_model(graph)
    assert found is not None
    assert found.head == "lm_head"
    classifier = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4))
    assert token_model(bitwright.capture(classifier, torch.ones(2, 5, dtype=torch.long))) is None


@pytest.mark.parametrize(
    ("precision", "weights", "inputs", "head"),
    [
        ("w4a16", "int4/group32/sym/full", None, "int8/group32/sym/full"),
        ("w8a16", "int8/group32/sym/full", None, "int8/group32/sym/full"),
        ("w8a8-dynamic", "int8/group32/sym/full", "int8/token/asym/dynamic", "int8/group32/sym/full"),
        ("w4a8-dynamic", "int4/group32/sym/full", "int8/token/asym/dynamic", "int8/group32/sym/full"),
        ("fp8", "fp8e4m3/group32", "fp8e4m3/token/dynamic", "fp8e4m3/group32"),
    ],
)
def test_named_recipes_with_groups(
    graph: bitwright.Graph, precision: str, weights: str, inputs: str | None, head: str
) -> None:
    plan = bitwright.make_plan(graph, precision=precision, group=32)
    at = {site: str(spec.format) for site, spec in plan.sites.items() if spec.share is None}
    assert at["model.layers.1.mlp.down_proj:weight"] == weights
    assert at["lm_head:weight"] == head
    formats = {text for site, text in at.items() if not site.endswith(":weight")}
    assert formats == (set() if inputs is None else {inputs})
    assert plan_warnings(graph, plan) == ()


def test_reasons_name_the_roles(graph: bitwright.Graph) -> None:
    plan = bitwright.make_plan(graph, precision="w4a16", group=32)
    assert plan.float["model.layers.0.self_attn/scaled_dot_product_attention#0"].startswith("attention:")
    assert plan.float["model.norm/mul#1"].startswith("norm:")
    assert plan.float["model.embed_tokens"].startswith("embedding:")
    assert plan.sites["lm_head:weight"].why.startswith("8 bits:")


def test_bits_of_the_head_can_be_chosen(graph: bitwright.Graph) -> None:
    plan = bitwright.make_plan(graph, precision="w4a16", group=32, head_bits=4)
    assert plan.sites["lm_head:weight"].format.bits == 4
    with raises_problem("unsupported-format", where="head_bits"):
        bitwright.make_plan(graph, precision="w4a16", group=32, head_bits=32)
    with raises_problem("invalid-value", where="group"):
        bitwright.make_plan(graph, precision="w4a16", group=0)


class Experts(nn.Module):
    """A decoder without attention whose router chooses one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(40, 16), nn.Linear(16, 4)
        self.experts, self.head = nn.Linear(16, 64), nn.Linear(16, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        weight, chosen = torch.softmax(self.router(x).float(), dim=-1).topk(1)
        each = self.experts(x).unflatten(-1, (4, 16))
        mixed = weight * each.take_along_dim(chosen[..., None], 2).squeeze(2)
        return self.head(x + mixed)  # type: ignore[no-any-return]


def test_routers_stay_in_float() -> None:
    graph = bitwright.capture(Experts(), torch.arange(12).view(2, 6))
    for precision in ("w8a16", "int8", "w8a8-dynamic"):
        plan = bitwright.make_plan(graph, precision=precision)
        assert plan.float["router"].startswith("router:"), precision
        assert "experts:weight" in plan.sites


def test_static_scales_are_warned_about_before_calibration(caplog: pytest.LogCaptureFixture) -> None:
    read: list[int] = []

    def batches() -> Any:
        for index in range(3):
            read.append(index)
            yield tokens()

    with caplog.at_level(logging.WARNING, logger="bitwright"):
        quantized = bitwright.quantize(llama(), batches, "int8", on_start=lambda _: read.append(-1))
    assert "static-activations" in [problem.code for problem in quantized.warnings]
    [problem] = [problem for problem in quantized.warnings if problem.code == "static-activations"]
    assert "w8a8-dynamic" in str(problem.fix)
    assert sum("one static scale" in record.getMessage() for record in caplog.records) == 1


def test_dynamic_scales_are_not_warned_about() -> None:
    quantized = bitwright.quantize(llama(), [tokens()], "w8a8-dynamic")
    assert "static-activations" not in [problem.code for problem in quantized.warnings]


def test_groups_reach_the_model() -> None:
    quantized = bitwright.quantize(llama(), [tokens()], "w4a16", group=16)
    spec = quantized.plan.sites["model.layers.0.self_attn.q_proj:weight"]
    assert str(spec.format) == "int4/group16/sym/full"
    assert quantized.distance is not None
    assert quantized.distance.sqnr_db > 10


def test_the_head_of_dynamic_recipes_reads_float_inputs(graph: bitwright.Graph) -> None:
    plan = bitwright.make_plan(graph, precision="w8a8-dynamic", saturating=True)
    head = plan.sites["lm_head:weight"]
    assert str(head.format) == "int8/group32/sym/full"
    assert head.guard is None
    assert "float" in head.why
    assert plan.sites["model.layers.1.mlp.down_proj:weight"].guard is not None
    assert not any(site.startswith(("lm_head:input", "model.norm")) for site in plan.sites)
    explicit = bitwright.make_plan(graph, weights="int8/channel", activations="int8/token/dynamic", saturating=False)
    assert str(explicit.sites["lm_head:weight"].format) == "int8/channel/sym"  # formats by request


def test_only_dynamic_plans_of_token_models_have_default_steps(graph: bitwright.Graph) -> None:
    steps = {
        name: default_steps(graph, bitwright.make_plan(graph, precision=name))
        for name in ("w8a8-dynamic", "w8a16", "fp8")
    }
    assert [name for name, own in steps.items() if own] == ["w8a8-dynamic"]
    other = bitwright.capture(nn.Sequential(nn.Linear(8, 4)), torch.ones(2, 8))
    assert default_steps(other, bitwright.make_plan(other, precision="w8a8-dynamic")) == ()
