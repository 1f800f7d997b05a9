"""Formats within a budget of bits: the costs of candidates, the integer program, and the plan."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.backends.bit_budget import FormatCost, WeightCosts, choose_formats, parse_size, stored_bits
from bitwright.core.formats import Format

FORMATS = ["int4/group32", "int8/group32"]


class Branches(nn.Module):
    """Two branches, of which one hardly matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loud, self.quiet, self.head = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.loud(x)) + 0.02 * torch.relu(self.quiet(x)))
        return result


def network() -> Branches:
    return Branches().eval()


def data(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator) for _ in range(count)]


def random_costs(sites: int, seed: int) -> WeightCosts:
    generator = torch.Generator().manual_seed(seed)

    def cost(bits: int) -> FormatCost:
        penalty = float(torch.rand((), generator=generator)) * 4.0**-bits
        return FormatCost(format=f"int{bits}/group32/sym", bits=bits + 0.5, penalty=penalty)

    names = [f"{index}:weight" for index in range(sites)]
    elements = {name: int(torch.randint(50, 500, (), generator=generator)) for name in names}
    return WeightCosts(
        sites={name: tuple(cost(bits) for bits in (3, 4, 8)) for name in names},
        elements=elements,
        other_bytes=100,
        samples=1,
    )


def best(costs: WeightCosts, limit: float) -> float:
    """The smallest penalty of all combinations within the limit."""
    penalties = []
    for combination in product(*costs.sites.values()):
        stored = sum(one.bits * costs.elements[site] for site, one in zip(costs.sites, combination, strict=True))
        if stored <= limit:
            penalties.append(sum(one.penalty for one in combination))
    return min(penalties)


def penalty_within(costs: WeightCosts, limit: float, chosen: dict[str, FormatCost]) -> float:
    assert sum(one.bits * costs.elements[site] for site, one in chosen.items()) <= limit
    return sum(one.penalty for one in chosen.values())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bits", [3.6, 4.5, 6.0, 8.5])
def test_the_choice_is_the_best_of_all_combinations(seed: int, bits: float) -> None:
    costs = random_costs(6, seed)
    limit = bits * sum(costs.elements.values())
    whole = int(limit / 8)
    assert penalty_within(costs, limit, choose_formats(costs, bits=bits)) == pytest.approx(best(costs, limit), rel=1e-3)
    chosen = choose_formats(costs, size=whole + costs.other_bytes)
    assert penalty_within(costs, whole * 8, chosen) == pytest.approx(best(costs, whole * 8), rel=1e-3)


def test_too_small_budgets_say_what_is_needed() -> None:
    with raises_problem("budget-too-small", where="bits", mentions="3.5"):
        choose_formats(random_costs(3, 0), bits=3)
    with raises_problem("budget-too-small", where="size", mentions="100 B"):
        choose_formats(random_costs(3, 0), size="120 B")
    with raises_problem("ambiguous-budget"):
        choose_formats(random_costs(3, 0), bits=4, size=1000)
    with raises_problem("invalid-size", where="size"):
        parse_size("60 cows")


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        ("int4/group32/sym", 4.5),
        ("int4/group32/asym", 4.625),
        ("int8/channel/sym", 8.25),
        ("int8/tensor/sym", 8 + 1 / 256),
    ],
)
def test_stored_bits_count_scales_and_zero_points(format: str, bits: float) -> None:
    assert stored_bits(Format.parse(format), (64, 64)) == bits


def test_costs_are_those_of_the_fisher_information() -> None:
    """With a quadratic loss of one linear layer, the increase is known: the mean over samples of the squared change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 1, bias=False)).eval()
    x = torch.randn(64, 32)
    costs = bw.weight_costs(model, [x], formats=["int4/group32"], loss=lambda output: output.sum())
    quantized = bw.quantize(model, [x], weights="int4/group32", activations="float")
    weight = model[0].weight.detach()
    change = bw.quantizers_of(quantized.model)["0:weight"](weight).detach() - weight
    expected = 0.5 * float((change.square() * x.square().mean(0)).sum())
    ((cost,),) = costs.sites.values()
    assert cost.penalty == pytest.approx(expected, rel=1e-4)
    assert costs.samples == 64


def test_the_model_stays_as_it_is() -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.loud.weight.requires_grad_(False)
    model.quiet.weight.grad = torch.ones_like(model.quiet.weight)
    bw.weight_costs(model, data(1), formats=FORMATS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [False, *[True] * 5]
    assert torch.equal(model.quiet.weight.grad, torch.ones(32, 64))
    assert model.head.weight.grad is None


def test_plans_within_a_budget() -> None:
    model, batches = network(), data()
    costs = bw.weight_costs(model, batches, formats=FORMATS)
    graph = bw.capture(model, batches[0])
    plan = bw.make_plan(graph, bits=6.5, costs=costs)
    formats = {site: plan.sites[site].format for site in ("loud:weight", "quiet:weight", "head:weight")}
    assert {site: format.bits for site, format in formats.items()}["quiet:weight"] == 4
    assert "score" in plan.sites["quiet:weight"].why
    assert "6.5 bits" in plan.sites["quiet:weight"].why
    mean = sum(stored_bits(formats[site], (costs.elements[site] // 32, 32)) * n for site, n in costs.elements.items())
    assert 4.5 < mean / sum(costs.elements.values()) <= 6.5
    assert not any(site.endswith(":input") for site in plan.sites)  # activations stay in float
    quantized = bw.quantize(model, batches, plan=plan)
    assert quantized.distance is not None


def test_a_budget_is_better_than_the_opposite_choice() -> None:
    """The same number of bits, but with the cheap weight in more bits and an expensive one in fewer."""
    batches = data()
    costs = bw.weight_costs(network(), batches, formats=FORMATS)
    chosen = bw.make_plan(bw.capture(network(), batches[0]), bits=6.5, costs=costs)
    other = {8: "int4/group32/sym/full", 4: "int8/group32/sym/full"}
    opposite = chosen.with_sites(
        {
            site: bw.SiteSpec(format=Format.parse(other[spec.format.bits]))
            for site, spec in chosen.sites.items()
            if site in ("loud:weight", "quiet:weight")
        }
    )
    assert chosen != opposite

    def error(plan: bw.Plan) -> float:
        model = network()
        wanted = model(batches[0]).detach()
        return float((bw.quantize(model, batches, plan=plan, measure=False).model(batches[0]).detach() - wanted).norm())

    assert error(chosen) < error(opposite)


def test_incomplete_budgets() -> None:
    graph = bw.capture(network(), data(1)[0])
    costs = bw.weight_costs(network(), data(1), formats=FORMATS)
    with raises_problem("incomplete-budget", where="costs"):
        bw.make_plan(graph, bits=4.5)
    with raises_problem("incomplete-budget", where="bits"):
        bw.make_plan(graph, costs=costs)
    with raises_problem("ignored-argument", where="weights"):
        bw.make_plan(graph, bits=6, costs=costs, weights="int8/channel/sym")
    with raises_problem("unknown-site", where="head:weight"):
        bw.make_plan(graph, bits=6, costs=costs, keep_float=["head"])
    with raises_problem("no-candidate", where="1:weight"):
        bw.weight_costs(nn.Sequential(network(), nn.Linear(8, 2)), data(1), formats=["int4/group32"])


def test_language_models_are_scored_at_all_positions() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)

        def forward(self, ids: Tensor) -> dict[str, Any]:
            return {"logits": self.head(self.embed(ids)), "hidden": self.embed(ids)}

    torch.manual_seed(0)
    model, ids = Logits().eval(), torch.randint(0, 16, (64, 12))
    with torch.no_grad():
        logits, states = model(ids)["logits"], model.embed(ids)
    p = logits.softmax(-1).flatten(0, 1)
    # E[g²] of the head's weight (v, i) at one position: p_v·(1 − p_v)·x_i²
    expected = (p * (1 - p)).T @ states.flatten(0, 1).square() / len(p)
    costs = bw.weight_costs(model, [ids], formats=["int4/group32"], keep_float="embed*")
    weight = model.head.weight.detach()
    quantized = bw.quantize(model, [ids], weights="int4/group32", activations="float")
    change = bw.quantizers_of(quantized.model)["head:weight"](weight).detach() - weight
    ((cost,),) = costs.sites.values()
    assert cost.penalty == pytest.approx(0.5 * float((change.square() * expected).sum()), rel=0.15)
