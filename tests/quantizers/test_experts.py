"""Mixtures of experts with the default implementation in transformers: one product for all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bitwright as bw
from bitwright.core.formats import Format
from bitwright.quantizers import quantizers_of
from bitwright.quantizers.grid import extremes, grid_from_range
from bitwright.quantizers.preparation import tapped

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
QWEN = {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8, "decoder_sparse_step": 1}
DEEPSEEK = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": QWEN,
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "intermediate_size": 32},
}
EXPERTS = [f"model.layers.0.mlp.experts/_grouped_mm#{index}:input1" for index in (0, 1)]


def mixture(name: str, implementation: str = "grouped_mm") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]}, experts_implementation=implementation)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "experts" in key and parameter.dim() == 3:  # experts of different sizes
                parameter.copy_(torch.randn_like(parameter) * torch.tensor([1.0, 4.0, 0.2, 2.0])[:, None, None] * 0.1)
    return model


def batch(tokens: int = 24) -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, tokens), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "use_cache": False}


def quantized(name: str, implementation: str = "grouped_mm", **options: Any) -> bw.Quantized:
    options = {"weights": "int4/group16", "activations": "float", "measure": False, **options}
    return bw.quantize(mixture(name, implementation), [batch()], **options)


def stored(model: Any, index: int) -> Tensor:
    """The weights of all experts, as (experts, inputs, outputs)."""
    experts = model.model.layers[0].mlp.experts
    weight: Tensor = (experts.gate_up_proj, experts.down_proj)[index].detach()
    return weight if type(model).__name__.startswith("GptOss") else weight.transpose(1, 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # of the configurations
def test_weights_of_experts_have_scales_of_their_own(name: str) -> None:
    made = quantized(name)
    routers = [op for op, why in made.plan.float.items() if "router" in why]
    assert len(routers) == 1
    model, float_model = made.model, mixture(name)
    assert [site for site in EXPERTS if site in made.plan.sites] == EXPERTS
    format = Format.parse("int4/group16/sym/full")
    for index, site in enumerate(EXPERTS):
        weight = stored(float_model, index)
        rows = weight.transpose(1, 2).reshape(-1, 16)  # blocks along the inputs, per expert and output
        grid = grid_from_range(*extremes(rows), format)
        codes = torch.clamp(torch.round(rows / grid.scale[:, None]), -8, 7)
        expected = (codes * grid.scale[:, None]).reshape(weight.transpose(1, 2).shape).transpose(1, 2)
        torch.testing.assert_close(quantizers_of(model)[site](weight).detach(), expected)
    with torch.no_grad():
        wanted, found = float_model(**batch()).logits, model(**batch()).logits
    assert 0.001 < float((found - wanted).norm() / wanted.norm()) < 0.5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_format_per_channel_becomes_one_per_expert_and_channel(name: str) -> None:
    made = quantized(name, weights="int8/channel/sym")
    first = made.plan.sites[EXPERTS[0]]
    weight = stored(mixture(name), 0)
    assert str(first.format) == f"int8/group{weight.shape[1]}/sym"
    assert first.why == "weights of experts: one scale for each expert and channel"
    scales = quantizers_of(made.model)[EXPERTS[0]].scale.flatten(1).abs().mean(1)
    assert float(scales.max() / scales.min()) > 10  # experts of different sizes


def test_the_model_computes_with_rounded_experts() -> None:
    made = quantized("Mixtral")
    by_hand = mixture("Mixtral")
    with torch.no_grad():
        for site, quantizer in quantizers_of(made.model).items():
            if site in EXPERTS:
                stored(by_hand, EXPERTS.index(site)).copy_(quantizer(stored(by_hand, EXPERTS.index(site))))
            else:
                weight = by_hand.get_parameter(site.replace(":", "."))
                weight.copy_(quantizer(weight))
        torch.testing.assert_close(made.model(**batch()).logits, by_hand(**batch()).logits)


def test_experts_without_tokens_are_reported() -> None:
    model = mixture("Mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[2] = 0
        model.model.layers[0].mlp.gate.weight[3] = 0  # two experts that no token prefers to both others
        model.model.layers[0].mlp.gate.weight[1] = -model.model.layers[0].mlp.gate.weight[0]
    made = bw.quantize(model, [batch(1)], weights="int4/group16", activations="float", measure=False)
    counted = [warning for warning in made.warnings if warning.code == "unseen-expert"]
    assert {warning.where for warning in counted} == {site.rpartition(":")[0] for site in EXPERTS}
    assert not any(warning.code == "unseen-expert" for warning in quantized("Mixtral").warnings)


def test_steps_list_the_experts_that_they_leave() -> None:
    made = quantized("Mixtral", steps=["gptq"])
    (ran,) = made.steps
    assert set(EXPERTS) <= set(ran.skipped)


def test_the_default_implementation_is_the_grouped_one() -> None:
    for name in MODELS:
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("implementation", ["batched_mm", "eager"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_other_implementations_round_the_same_weights(name: str, implementation: str) -> None:
    reference, made = quantized(name), quantized(name, implementation)
    own = {site: q for site, q in quantizers_of(made.model).items() if "mlp.experts/" in site}
    assert len(own) == 2
    for site, (quantizer, expected) in zip(own, zip(own.values(), EXPERTS, strict=True), strict=True):
        weight = stored(made.model, EXPERTS.index(expected))
        same = quantizers_of(reference.model)[expected](weight)
        kept = made.model.get_parameter(made.graph.by_name[site.rpartition(":")[0]].ports[0].sources[0].name)
        rounded = quantizer(kept.detach())
        torch.testing.assert_close(rounded if name == "GptOss" else rounded.transpose(1, 2), same)
    with torch.no_grad():
        torch.testing.assert_close(made.model(**batch()).logits, reference.model(**batch()).logits)
    assert not [op for op, why in made.plan.float.items() if ".experts" in op and "biases" not in why]


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_a_loop_over_more_experts_than_in_calibration_rounds_them_too(name: str) -> None:
    """The loop runs once for each expert that is used, so its number of operators depends on the data."""
    options = {"weights": "int8/group16", "activations": "float", "measure": False}
    made = bw.quantize(mixture(name, "eager"), [one_token()], **options)
    assert [w.code for w in made.warnings] == ["unseen-expert", "unseen-expert"]
    with torch.no_grad():
        expected = bw.quantize(mixture(name), [batch()], **options).model(**batch()).logits
        torch.testing.assert_close(made.model(**batch()).logits, expected)
    assert {code for code, _ in made.model.bitwright.attachment.warnings} == {"unseen-expert"}


def one_token() -> dict[str, Any]:
    return {"input_ids": torch.tensor([[5]]), "use_cache": False}


def test_activations_of_unseen_iterations_use_the_ranges_of_the_last_expert() -> None:
    model = mixture("Mixtral", "eager")
    bw.quantize(model, [one_token()], "int8", measure=False)
    inputs = [site for site in quantizers_of(model) if "experts/" in site and site.endswith(":output")]
    seen: list[str] = []
    with torch.no_grad(), tapped(model, lambda site, quantizer, x: seen.append(site)):
        model(**batch())
    counts = [seen.count(site) for site in inputs]
    assert len(inputs) == 4
    assert max(counts) > 1
    assert min(counts) >= 1
    assert not [code for code, _ in model.bitwright.attachment.warnings if code == "unseen-operator"]


def test_experts_that_stay_in_float_by_request_are_listed() -> None:
    plan = quantized("Mixtral", "batched_mm", keep_float="*experts/matmul#0").plan
    assert plan.float["model.layers.0.mlp.experts/getitem#0"] == "kept in float by request"
    assert "model.layers.0.mlp.experts/getitem#1:input0" in plan.sites


def test_the_axis_of_groups_is_in_the_plan_file() -> None:
    plan = quantized("GptOss", "batched_mm").plan
    again = bw.Plan.from_yaml(plan.to_yaml())
    assert {spec.axis for site, spec in again.sites.items() if "experts" in site} == {-2}
    assert again == plan
    model = mixture("GptOss", "batched_mm")
    bw.quantize(model, [batch()], plan=again, measure=False)
    scales = quantizers_of(model)["model.layers.0.mlp.experts/getitem#0:input0"].scale
    assert scales.shape == (4, 2, 64)
