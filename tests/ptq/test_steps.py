"""PTQ steps through the public road: quantize, export, check on ONNX Runtime."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ptq_models import Encoder, Mobile, images, texts
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import CalibrationError, PlanError, UnknownName
from bitwright.core.registry import STEPS
from bitwright.ptq import Data, PtqContext, read_steps
from bitwright.ptq.block_replay import find_blocks
from bitwright.quantizers import in_mode

W8 = {"weights": "int8/tensor/sym"}
W4 = {"weights": "int4/channel/sym"}


def run(model: nn.Module, data: list[Any], *steps: str, **choices: Any) -> bw.Quantized:
    return bw.quantize(model, data, steps=list(steps), saturating=False, **choices)


def outputs(model: nn.Module, data: list[Any]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(*batch) if isinstance(batch, tuple) else model(batch) for batch in data])


def error(quantized: nn.Module, exact: nn.Module, data: list[Any]) -> float:
    return float((outputs(quantized, data) - outputs(exact, data)).square().mean())


def check(quantized: bw.Quantized, path: Path, data: list[Any]) -> None:
    quantized.export(path)
    result = quantized.check(path, data)
    assert result.passed
    assert result.outputs[0].sqnr_db > 40


# -- the frame -------------------------------------------------------------------------------------------------------


def test_wrong_steps_are_all_listed() -> None:
    with pytest.raises(PlanError) as caught:
        read_steps(["equalise", "adaround:iterations=0,speed=2", "gptq:damp", "bias-correction", "equalize"])
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert sorted(caught.value.codes[1:]) == ["invalid-setting", "invalid-setting", "step-order", "unknown-argument"]
    assert "did you mean 'equalize'" in text
    with pytest.raises(UnknownName):
        STEPS.get("nothing")


def test_data_that_can_be_read_once_is_refused() -> None:
    model = Mobile()
    with pytest.raises(CalibrationError) as caught:
        run(model, iter(images()), "equalize")  # type: ignore[arg-type]
    assert "data-not-rereadable" in caught.value.codes
    assert "forward" not in model.__dict__


def test_a_failure_leaves_the_weights_as_they_were() -> None:
    model, data = Mobile(), images()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CalibrationError):
        run(model, [*data, torch.full((8, 3, 8, 8), torch.nan)], "equalize", "bias-correction", **W8)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_progress_and_results_are_reported() -> None:
    seen: list[tuple[int, int | None, str]] = []

    def progress(*at: Any) -> None:
        if at[2] != "calibrating":
            seen.append(at)

    quantized = bw.quantize(
        Mobile(),
        images(),
        steps=["equalize", "bias-correction"],
        progress=progress,
        saturating=False,
    )
    assert [done for done, _, _ in seen] == list(range(8))
    assert {total for _, total, _ in seen} == {7}
    assert [ran.units for ran in quantized.steps] == [1, 6]
    assert quantized.steps[0].skipped.keys() == {"project"}
    assert "add" in quantized.steps[0].skipped["project"]
    assert quantized.steps[1].skipped == {}


# -- equalization ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6])
def test_equalization_keeps_the_function_and_reduces_error(activation: type[nn.Module], tmp_path: Path) -> None:
    exact, data = Mobile(activation), images()
    plain, even = copy.deepcopy(exact), copy.deepcopy(exact)
    run(plain, data, weights="int4/tensor/sym")
    quantized = run(even, data, "equalize", weights="int4/tensor/sym")
    with in_mode(even, "float"):
        assert torch.allclose(outputs(even, data), outputs(exact, data), atol=1e-4)
    assert not torch.equal(even.depth.weight, exact.depth.weight)
    assert error(even, exact, data) < 0.8 * error(plain, exact, data)
    check(quantized, tmp_path / "model.onnx", data)


def test_a_relu6_that_clips_keeps_its_channels() -> None:
    """What reaches the clip can't be scaled: a factor there would change the function."""
    exact, data = Mobile(), images()
    with torch.no_grad():
        exact.expand_bn.bias[:4] = 20.0
    model = copy.deepcopy(exact)
    run(model, data, "equalize", **W8)
    assert torch.equal(model.expand_bn.bias[:4], exact.expand_bn.bias[:4])
    with in_mode(model, "float"):
        assert torch.allclose(outputs(model, data), outputs(exact, data), atol=1e-4)


def test_shared_weights_are_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(torch.relu(self.first(torch.relu(self.first(x)))))
            return y

    model, data = Twice().eval(), [torch.randn(16, 6)]
    exact = copy.deepcopy(model)
    quantized = run(model, data, "equalize", "bias-correction", "adaround:iterations=5")
    assert "shared" in quantized.steps[0].skipped["first"]
    assert "first" in quantized.steps[1].skipped  # the bias is shared, too
    assert error(model, exact, data) < 1e-3


# -- bias correction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["onnxruntime", "academic"])
def test_bias_correction_restores_the_mean(backend: str, tmp_path: Path) -> None:
    """With folded norms the correction goes to β, with others to the norm's mean."""
    exact, data = Mobile(nn.ReLU), images()
    plain, corrected = copy.deepcopy(exact), copy.deepcopy(exact)
    run(plain, data, backend=backend, **W4)
    quantized = run(corrected, data, "bias-correction", backend=backend, **W4)
    target = outputs(exact, data).mean(dim=0)
    shift = (outputs(corrected, data).mean(dim=0) - target).abs().max()
    assert shift < 0.1 * (outputs(plain, data).mean(dim=0) - target).abs().max()
    assert torch.equal(corrected.stem.weight, exact.stem.weight)
    check(quantized, tmp_path / "model.onnx", data)


# -- reconstruction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "weights"),
    [
        ("adaround", "int4/channel/sym"),
        pytest.param("brecq", "uint4/channel/asym", marks=pytest.mark.slow),
        ("qdrop", "int4/group8/sym"),
    ],
)
def test_learned_rounding_is_better_and_exported_exactly(step: str, weights: str, tmp_path: Path) -> None:
    exact, data = Encoder(), texts()
    plain, learned = copy.deepcopy(exact), copy.deepcopy(exact)
    run(plain, data, weights=weights)
    grids = {site: q.grid().scale.clone() for site, q in bw.quantizers_of(plain).items() if q.weight}
    quantized = run(learned, data, f"{step}:iterations=40,lr=0.05", weights=weights)
    assert error(learned, exact, data) < 0.9 * error(plain, exact, data)
    weight = learned.layers[0].up.weight.detach()
    quantizer = bw.quantizers_of(learned)["layers.0.up:weight"]
    assert torch.equal(quantizer.grid().scale, grids["layers.0.up:weight"])
    # the weight itself lies on its grid, at most one step from where it was, and not always at the nearest
    assert torch.allclose(quantizer(weight), weight, atol=1e-6)
    steps = (weight - exact.layers[0].up.weight).abs() / quantizer.layout.spread(quantizer.grid().scale, weight)
    assert float((steps < 1.001).float().mean()) > 0.95
    assert not torch.allclose(weight, bw.quantizers_of(plain)["layers.0.up:weight"](exact.layers[0].up.weight))
    check(quantized, tmp_path / "model.onnx", data)


def test_learned_rounding_with_folded_norms_and_guards(tmp_path: Path) -> None:
    exact, data = Mobile(), images()
    plain, learned = copy.deepcopy(exact), copy.deepcopy(exact)
    bw.quantize(plain, data, saturating=True)
    quantized = bw.quantize(learned, data, saturating=True, steps=["adaround:iterations=20,lr=0.05"])
    assert error(learned, exact, data) < 3 * error(plain, exact, data)
    check(quantized, tmp_path / "model.onnx", data)  # export refuses weights that break their guard


@pytest.mark.parametrize("step", ["adaround", "brecq", "qdrop"])
@pytest.mark.parametrize("scale", ["log", "linear"])
def test_learned_scales_of_activations_move_and_stay_powers_of_two(step: str, scale: str) -> None:
    def scales(lr: float, activations: str) -> Tensor:
        model = Mobile()
        options = f"iterations=40,activation_lr={lr},activation_scale={scale}"
        run(
            model,
            images(),
            f"{step}:{options}",
            backend="academic",
            weights="int8/channel/sym",
            activations=activations,
        )
        return torch.stack([q.grid().scale for s, q in bw.quantizers_of(model).items() if s.endswith("put")])

    fixed, moved = (scales(lr, "uint4/tensor/asym") for lr in (0.0, 0.01))
    assert bool((fixed != moved).any())
    powers = scales(0.5, "int4/tensor/sym/pot")
    assert torch.equal(powers.log2(), powers.log2().round())


def test_layers_instead_of_blocks() -> None:
    steps = ("adaround:iterations=1", "brecq:iterations=1", "brecq:iterations=1,pattern=layer")
    single, blocks, layers = (run(Mobile(), images(), step, backend="academic").steps[0].units for step in steps)
    assert single == layers > blocks


def test_blocks_are_found_in_the_graph() -> None:
    model, data = Encoder(), texts()
    graph = bw.capture(model, data[0])
    plan = bw.make_plan(graph, "onnxruntime", saturating=False)
    bw.prepare(model, plan, graph=graph)
    blocks = find_blocks(PtqContext(model=model, graph=graph, plan=plan, data=Data(data)), 3)
    assert [block.name for block in blocks] == [
        "layers.0.query … layers.0.out",
        "layers.0.up … layers.0.down",
        "layers.1.query … layers.1.out",
        "layers.1.up … layers.1.down",
        "head",
    ]
    model2, pictures = Mobile(), images()
    graph = bw.capture(model2, pictures[0])
    plan = bw.make_plan(graph, "academic", saturating=False)
    bw.prepare(model2, plan, graph=graph)
    blocks = find_blocks(PtqContext(model=model2, graph=graph, plan=plan, data=Data(pictures)), 3)
    assert [block.name for block in blocks] == ["stem", "expand … project", "grouped", "head"]


def test_memory_beyond_the_limit_goes_to_the_disk() -> None:
    results = []
    for memory in (1, 1024):
        model = Mobile()
        data = images(8, 32)
        bw.quantize(model, data, steps=["qdrop:iterations=3"], memory=memory, saturating=False, **W4)
        results.append(outputs(model, data))
    assert torch.equal(*results)


# -- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["smoothquant", "awq"])
def test_scaling_keeps_the_function_and_reduces_error(step: str, tmp_path: Path) -> None:
    exact, data = Encoder(), texts()
    plain, scaled = copy.deepcopy(exact), copy.deepcopy(exact)
    run(plain, data, **W4)
    quantized = run(scaled, data, step, **W4)
    with in_mode(scaled, "float"):
        assert torch.allclose(outputs(scaled, data), outputs(exact, data), atol=1e-4)
    assert scaled.layers[0].norm1.weight[3] < 0.8 * exact.layers[0].norm1.weight[3]
    assert error(scaled, exact, data) < error(plain, exact, data)
    check(quantized, tmp_path / "model.onnx", data)


@pytest.mark.parametrize(("model", "data"), [(Encoder, texts), pytest.param(Mobile, images, marks=pytest.mark.slow)])
def test_gptq_is_better_than_nearest(model: type[nn.Module], data: Any, tmp_path: Path) -> None:
    exact, batches = model(), data()
    plain, rounded = copy.deepcopy(exact), copy.deepcopy(exact)
    run(plain, batches, **W4)
    quantized = run(rounded, batches, "gptq", **W4)
    assert error(rounded, exact, batches) < 0.8 * error(plain, exact, batches)
    check(quantized, tmp_path / "model.onnx", batches)


def test_outlier_tokens_are_clipped(tmp_path: Path) -> None:
    exact, data = Encoder(), texts()
    with torch.no_grad():
        exact.embed.weight[7] *= 30  # a separator that no other token is like
        for layer in exact.layers:
            layer.up.weight.mul_(0.05)
    model = copy.deepcopy(exact)
    plain = copy.deepcopy(exact)
    run(plain, data, activations="uint4/tensor/asym")
    quantized = run(model, data, "token-clip", activations="uint4/tensor/asym")
    scales = {site: q.scale for site, q in bw.quantizers_of(plain).items()}
    assert any(q.scale < 0.95 * scales[site] for site, q in bw.quantizers_of(model).items() if not q.weight)
    assert quantized.steps[0].units >= 4
    check(quantized, tmp_path / "model.onnx", data)


# -- weights only ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [(), pytest.param(("awq", "gptq"), marks=pytest.mark.slow)])
def test_weights_only_in_groups(step: tuple[str, ...], tmp_path: Path) -> None:
    exact, data = Encoder(), texts()
    model = copy.deepcopy(exact)
    quantized = run(model, data, *step, weights="int4/group16/sym", activations="float")
    assert {site.rpartition(":")[2] for site, _ in quantized.plan.quantized} == {"weight"}
    assert error(model, exact, data) < 0.3 * float(outputs(exact, data).var())
    artefact = quantized.export(tmp_path / "model.onnx")
    assert (artefact.activation_pairs, artefact.weights) == (0, 13)
    assert quantized.check(tmp_path / "model.onnx", data).passed
