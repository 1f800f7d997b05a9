"""What the formulas are for: parameters that move, powers of two that stay, networks that learn, equal artefacts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import PlanError
from bitwright.quantizers import Quantizer, quantizers_of

Build = Callable[..., Quantizer]
LEARNED = {
    "lsq": {"scale"},
    "lsqplus": {"scale", "zero_point"},
    "pact": {"high", "low"},
    "qil": {"centre", "half_width"},
    "apot": {"scale"},
    "tqt": {"log2_threshold"},
}
UNIFORM = ["plain", "fixed", "lsq", "lsqplus", "pact", "dorefa", "dsq", "tqt"]
OTHERS = ["qil", "apot", "nnie"]
W4A4 = {"weights": "int4/channel/sym", "activations": "int4/tensor/sym/adasign"}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * 16, 4, bias=False),
        nn.BatchNorm1d(4),
    )


def problem(count: int = 256, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Which quarter of the picture is brightest."""
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    quarters = nn.functional.avg_pool2d(x, 4).flatten(1)
    return x, quarters.argmax(dim=1)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("format", ["int4/tensor/sym", "uint4/tensor/asym"])
def test_parameters_move_in_twenty_steps(build: Build, name: str, format: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=generator)
    if "asym" in format and name in ("qil", "apot", "tqt"):
        format = "int4/channel/sym"
        x = x[:8]
    target = torch.tanh(x) @ torch.randn(8, 3, generator=generator)
    quantizer = build(name, format, 0.5 * x)  # a range that clips: what comes in training is larger
    weight = nn.Parameter(torch.randn(8, 3, generator=generator) * 0.1)
    learned = dict(quantizer.named_parameters())
    wanted = LEARNED[name] if "asym" in format else LEARNED[name] - {"zero_point", "low"}
    assert learned.keys() == wanted
    before = {key: p.detach().clone() for key, p in learned.items()}
    optimizer = torch.optim.SGD([*learned.values(), weight], lr=0.03)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (quantizer(x) @ weight - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for key, parameter in learned.items():
        assert (parameter.detach() - before[key]).abs().max() > 1e-5, key
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["lsq", "lsqplus", "pact", "tqt", "dsq", "plain", "dorefa", "qil"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_powers_of_two_stay(build: Build, name: str, optimizer: type[torch.optim.Optimizer]) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    quantizer = build(name, "int4/channel/sym/pot", x)
    seen: set[float] = set()
    learned = list(quantizer.parameters())
    steps = optimizer(learned, lr=0.05) if learned else None
    for _ in range(50):
        if steps is not None:
            (quantizer(2 * x) - 2 * x).square().sum().backward()
            steps.step()
            steps.zero_grad()
        scale = quantizer.grid().scale
        assert (torch.frexp(scale).mantissa == 0.5).all()
        codes = quantizer.integers(x)
        assert torch.equal(quantizer(x).detach(), codes * scale[:, None])
        seen |= set(scale.tolist())
    if name in ("lsq", "tqt", "pact"):
        assert len(seen) > 1  # and still they move


@pytest.mark.parametrize("name", [*UNIFORM, *OTHERS])
def test_a_network_learns_at_w4a4(name: str) -> None:
    torch.set_num_threads(1)
    x, y = problem()
    model = network().eval()
    bw.quantize(model, [x[:64]], backend="academic", quantizer=name, **W4A4)
    sites = quantizers_of(model)
    assert {q.spec.quantizer for q in sites.values() if q.weight} == {"dorefa" if name == "pact" else name}
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    correct = float((model(x).argmax(1) == y).float().mean())
    assert correct > 0.85


@pytest.mark.parametrize("activations", ["int8/tensor/sym/adasign", "uint8/tensor/asym"])
@pytest.mark.parametrize("name", UNIFORM)
def test_artefact_equals_simulation_after_training(name: str, activations: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    if name == "tqt" and "asym" in activations:
        pytest.skip("TQT is symmetric")
    x, y = problem(32)
    model = network().eval()
    weights = "int4/channel/sym"  # small codes: no CPU's products saturate
    quantized = bw.quantize(model, [x], weights=weights, activations=activations, quantizer=name)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    artefact = quantized.export(tmp_path / "model.onnx")
    result = quantized.check(artefact.path, [x], runtime="onnxruntime")
    assert result.passed, result


@pytest.mark.parametrize("name", ["dorefa", "qil"])
def test_squeezed_weights_are_exported(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    x, _ = problem(32)
    quantized = bw.quantize(network().eval(), [x], weights="int4/channel/sym", quantizer="lsq", weight_quantizer=name)
    assert quantized.check(quantized.export(tmp_path / "model.onnx").path, [x], runtime="onnxruntime").passed


@pytest.mark.parametrize("name", OTHERS)
def test_levels_that_no_artefact_has(name: str, tmp_path: Path) -> None:
    x, _ = problem(8)
    quantized = bw.quantize(network().eval(), [x], backend="academic", quantizer=name, **W4A4)
    path = tmp_path / "model.onnx"
    with raises_problem("unsupported-levels", mentions="QuantizeLinear") as caught:
        quantized.export(path)
    (found,) = caught.value.problems
    assert found.where is not None
    assert found.where.startswith("0:input, ")
    assert found.value == name
    assert found.fix is not None
    assert not path.exists()


@pytest.mark.parametrize("name", ["tqt", *OTHERS])
def test_asymmetric_formats_are_refused_all_at_once_before_calibration(name: str) -> None:
    x, _ = problem(8)
    model = network().eval()
    graph = bw.capture(model, x)
    with pytest.raises(PlanError) as caught:
        bw.make_plan(graph, "onnxruntime", quantizer=name, saturating=False)
    assert caught.value.codes == ["unsupported-format"]  # activations; not once for each site
    plan = bw.make_plan(graph, "onnxruntime", saturating=False)
    inputs = [site for site, spec in plan.quantized if not spec.format.symmetric and spec.share is None]
    plan = plan.with_sites({site: replace(plan.sites[site], quantizer=name) for site in inputs})
    with raises_problem("unsupported-format", where="0:input") as caught:  # a plan that was edited by hand
        bw.prepare(model, plan)
    assert sorted(str(found.where) for found in caught.value.problems) == sorted(inputs)
    assert all("int8/tensor/sym/adasign" in str(found.fix) for found in caught.value.problems)


@pytest.mark.parametrize("name", [*UNIFORM, *OTHERS])
def test_checkpoint_round_trip(name: str, tmp_path: Path) -> None:
    x, y = problem(16)
    model = network().eval()
    quantized = bw.quantize(model, [x], backend="academic", quantizer=name, **W4A4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    bw.save_checkpoint(model, tmp_path / "model.safetensors")
    other = network(seed=1).eval()
    bw.prepare(other, quantized.plan)
    bw.load_checkpoint(other, tmp_path / "model.safetensors")
    assert torch.equal(other(x), model(x))
    assert {n for n, _ in other.named_parameters()} == {n for n, _ in model.named_parameters()}


def test_weight_and_activation_quantizers_are_independent() -> None:
    x, _ = problem(8)
    graph = bw.capture(network().eval(), x)
    plan = bw.make_plan(graph, "academic", quantizer="pact", weight_quantizer="lsq")
    found = {site.rpartition(":")[2]: spec.quantizer for site, spec in plan.quantized}
    assert found == {"input": "pact", "weight": "lsq", "output": "pact"}
    plan = bw.make_plan(graph, "academic", weight_quantizer="tqt")
    assert {spec.quantizer for _, spec in plan.quantized} == {"plain", "tqt"}
    with raises_problem("unknown-name", where="weight_quantizer", mentions="'lsq'"):
        bw.make_plan(graph, "academic", weight_quantizer="lsqq")


def test_wrong_values_of_options_are_problems_of_the_plan() -> None:
    model = network().eval()
    spec = bw.SiteSpec(format=bw.Format.parse("int4/tensor/sym"), quantizer="dsq", quantizer_options={"alpha": 2.0})
    with pytest.raises(PlanError) as raised:
        bw.prepare(model, bw.Plan(sites={"0:weight": spec, "3:weight": spec}))
    assert set(raised.value.codes) == {"invalid-options"}
