"""Scores are those of separate runs, whatever is shared; suggestions are measured, and hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import isclose

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright import Plan, PlanError, prepare, quantize, quantizers_of, score, suggest
from bitwright.graph import capture
from bitwright.quantizers import in_mode


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        logits: Tensor = self.head((x + F.relu(self.second(x))).mean((2, 3)))
        return logits


class InPlace(Plain):
    """Writes over its tensors, and goes on with either name."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        F.relu(x, inplace=True)
        y = self.second(x)
        y.relu_()
        y += x
        y[:, 0] = y[:, 0] * 2.0
        view = y[:, 1:3]
        view.mul_(0.5)
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x.flatten(2).transpose(1, 2)[..., :8].repeat(1, 1, 4)).mean(1))
        return logits


def data(seed: int = 0) -> Tensor:
    return torch.randn(24, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def quantized(net: Callable[[], nn.Module], **choices: str) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = net().eval()
    made = quantize(model, data().split(8), backend="academic", weights="int4/channel/sym", **choices)  # type: ignore[arg-type]
    return model, made.plan


@pytest.mark.parametrize("net", [Plain, InPlace, Attention])
def test_scores_are_those_of_separate_runs(net: Callable[[], nn.Module]) -> None:
    model, _ = quantized(net, activations="int4/tensor/sym/adasign")
    target = torch.arange(24) % 4
    batches = list(zip(data(1).split(8), target.split(8), strict=True))
    scores = score(model, batches, loss=F.cross_entropy)
    assert scores.samples == 24
    assert 0.2 < scores.shared < 1
    assert {s.site for s in scores.sites} == {site for site, q in quantizers_of(model).items() if not q.of}
    for one in (*scores.sites, scores.together):
        with in_mode(model, "float"), torch.no_grad():
            wanted = model(data(1))
        with in_mode(model, "quantize"), torch.no_grad():
            for site, quantizer in quantizers_of(model).items():
                quantizer.enabled = one is scores.together or site == one.site
            got = model(data(1))
        assert isclose(one.output_error, float((got - wanted).norm() / wanted.norm()), rel_tol=1e-4, abs_tol=1e-7)
        change = float(F.cross_entropy(got, target) - F.cross_entropy(wanted, target))
        assert one.loss_change is not None
        assert isclose(one.loss_change, change, rel_tol=1e-3, abs_tol=1e-6)
    assert scores.together.output_error > scores.sites[-1].output_error
    assert list(scores.sites) == sorted(scores.sites, key=lambda s: -s.penalty)


def test_the_model_is_left_as_it_was() -> None:
    model, _ = quantized(Plain)
    with torch.no_grad():
        before = model(data(1))
    model.train()
    state = copy.deepcopy(model.state_dict())
    score(model, [data(2)])
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model.eval()(data(1)), before)


def test_a_bad_range_comes_first() -> None:
    model, _ = quantized(Plain)
    spoiled = next(q for site, q in quantizers_of(model).items() if site == "second:weight")
    with torch.no_grad():
        spoiled.scale.mul_(20)
    scores = score(model, [data(1)])
    assert scores.sites[0].site == "second:weight"
    assert scores.sites[0].loss_change is None
    assert scores.operators()[0][0] == "second"
    assert scores.sites[0].sqnr_db is not None
    assert scores.sites[0].sqnr_db < 5


def test_a_path_that_a_batch_does_not_take_costs_nothing() -> None:
    class Branch(Plain):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.head((self.second(y) if x.sum() > 0 else y).mean((2, 3)))

    torch.manual_seed(0)
    model = Branch().eval()
    quantize(model, [data().abs(), -data().abs()], backend="academic", weights="int4/channel/sym")
    scores = score(model, [-data().abs()])
    by_site = {one.site: one for one in scores.sites}
    assert by_site["second:weight"].output_error == 0
    assert by_site["first:weight"].output_error > 0


def test_a_suggestion_is_what_its_plan_gives() -> None:
    model, plan = quantized(Plain, activations="int4/tensor/sym/adasign")
    with in_mode(model, "float"), torch.no_grad():
        wanted = model(data(1))

    def closeness(candidate: nn.Module) -> float:
        with torch.no_grad():
            return -float((candidate(data(1)) - wanted).square().mean())

    found = suggest(model, plan, score(model, [data(1)]), closeness, most=3)
    assert found.operators
    assert found.gain > 0
    assert [len(trial.operators) for trial in found.trials] == [1, 2, 3]
    assert {change.where for change in plan.diff(found.plan)} >= {f"float {name}" for name in found.operators}
    torch.manual_seed(0)
    again = Plain().eval()
    quantize(again, data().split(8), backend="academic", plan=found.plan)
    assert closeness(again) == found.after
    assert closeness(model) == found.before


def test_a_plan_that_loses_nothing_stays() -> None:
    model, plan = quantized(Plain)
    found = suggest(model, plan, score(model, [data(1)]), lambda _: 1.0)
    assert (found.plan, found.operators, found.gain) == (plan, (), 0.0)


def test_what_has_no_range_is_named() -> None:
    _, plan = quantized(Plain)
    torch.manual_seed(0)
    model = Plain().eval()
    prepare(model, plan, graph=capture(model, data()))
    with pytest.raises(PlanError) as caught:
        score(model, [data()])
    assert "first:weight" in str(caught.value)
