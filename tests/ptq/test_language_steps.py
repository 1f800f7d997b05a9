"""Steps for weights of few bits on a tiny Llama: GPTQ, HQQ, imatrix, SignRound and rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.formats import Format
from bitwright.ptq.gptq import _factor
from bitwright.ptq.rotation import orthogonal
from bitwright.ptq.step import read_steps
from bitwright.quantizers import grid_from_range, in_mode, quantizers_of

FORMAT = "int4/group16/sym/full"


def llama(*, tied: bool = False, seed: int = 0) -> Any:
    """A tiny Llama with a few large channels, as trained models have."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
                parameter[::11] *= 6
            else:
                parameter.mul_(4)
                parameter.view(-1)[::97] *= 3
    return model


def text(count: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{"input_ids": torch.randint(0, 96, (2, 24), generator=generator)} for _ in range(count)]


def logits(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(**batch).logits for batch in batches])


def error(steps: tuple[str, ...], *, weights: str = FORMAT) -> float:
    """The relative error of the logits after quantization with these steps."""
    model, batches = llama(), text()
    wanted = logits(model, batches)
    quantized = bw.quantize(model, batches, weights=weights, activations="float", steps=steps, measure=False)
    return float((logits(quantized.model, batches) - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def nearest() -> float:
    return error(())


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        (("gptq",), 0.75),
        (("gptq:scales=observer",), 0.87),
        (("gptq:scales=calibrated",), 0.85),
        (("imatrix",), 0.97),
        (("imatrix", "gptq:scales=calibrated"), 0.8),
        (("signround:iterations=60",), 0.85),
        (("rotate", "gptq"), 0.75),
    ],
)
def test_steps_reduce_the_error(steps: tuple[str, ...], share: float, nearest: float) -> None:
    assert error(steps) < share * nearest


def textbook_gptq(weight: Tensor, hessian: Tensor, format: Format) -> Tensor:
    """GPTQ as published, with the scale of each group from the compensated weights, in float64."""
    weight, hessian = weight.double().clone(), hessian.double().clone()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    result = torch.empty_like(weight)
    for column in range(weight.shape[1]):
        if column % format.group == 0:
            rows = weight[:, column : column + format.group].float()
            grid = grid_from_range(rows.amin(1), rows.amax(1), format)
        codes = torch.clamp(torch.round(weight[:, column] / grid.scale) + grid.zero_point, grid.qmin, grid.qmax)
        result[:, column] = (codes - grid.zero_point) * grid.scale
        error = (weight[:, column] - result[:, column]) / upper[column, column]
        weight[:, column:] -= error[:, None] * upper[column, column:]
    return result.float()


@pytest.mark.parametrize("format", [FORMAT, "int4/group16/sym", "int4/group16/asym", "int4/channel/sym"])
def test_gptq_agrees_with_the_textbook(format: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 24, bias=False)).eval()
    weight = model[0].weight.detach().clone()
    x = torch.randn(64, 48) @ torch.randn(48, 48)
    quantized = bw.quantize(
        model,
        [x],
        backend="academic",
        weights=format,
        activations="float",
        steps=["gptq:columns=32,scales=observer"],
        first_last_bits=4,
    )
    parsed = Format.parse(format)
    if parsed.granularity == "channel":
        parsed = Format.parse("int4/group48/sym")  # one group per channel
    expected = textbook_gptq(weight, x.T @ x, parsed)
    found = quantized.model[0].weight.detach()
    rounded = quantizers_of(quantized.model)["0:weight"](found)
    torch.testing.assert_close(rounded, found, rtol=1e-5, atol=1e-6)  # the weight is on the stored grid
    assert float((found - expected).norm() / expected.norm()) < 0.02
    x_error = [float((x @ (w - weight).T).norm()) for w in (found, expected)]
    assert x_error[0] < 1.02 * x_error[1]


def test_the_factor_is_that_of_the_inverse() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 12)
    hessian = x.T @ x
    hessian[3], hessian[:, 3] = 0.0, 0.0  # an input that is always 0
    damped = hessian.clone()
    damped[3, 3] = 1.0
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    expected = torch.linalg.cholesky(torch.linalg.inv(damped.double()), upper=True)
    torch.testing.assert_close(_factor(hessian, 0.01, "x").double(), expected, rtol=1e-4, atol=1e-5)


def lp(format: str, steps: tuple[str, ...]) -> float:
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    quantized = bw.quantize(
        model, text(1), backend="academic", weights=format, activations="float", steps=steps, measure=False
    )
    total = 0.0
    for site, quantizer in quantizers_of(quantized.model).items():
        weight = before[site.replace(":", ".")]
        total += float((quantizer(weight) - weight).abs().pow(0.7).sum())
    return total


@pytest.mark.parametrize("format", ["int4/group16/sym/full", "uint4/group16/asym", "int3/channel/asym"])
def test_hqq_minimizes_its_norm(format: str) -> None:
    assert lp(format, ("hqq",)) < 0.99 * lp(format, ())


def test_hqq_reads_no_data_and_leaves_weights_as_they_are() -> None:
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    bw.quantize(model, text(1), weights=FORMAT, activations="float", steps=["hqq"])
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("size", [1, 2, 12, 20, 28, 36, 48, 64, 576])
def test_hadamard_matrices(size: int) -> None:
    matrix = orthogonal(size, seed=3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))  # every entry is ±1/√n
    assert torch.equal(matrix, orthogonal(size, seed=3))


def test_other_sizes_get_an_orthogonal_matrix() -> None:
    matrix = orthogonal(22, seed=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(22, dtype=torch.float64))


def rotated(model: Any, steps: tuple[str, ...] = ("rotate",)) -> Any:
    return bw.quantize(model, text(2), weights="int8/group16/sym", activations="float", steps=steps, measure=False)


def test_a_rotation_does_not_change_the_function() -> None:
    model, batches = llama(), text()
    wanted = logits(model, batches)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    quantized = rotated(model)
    (ran,) = quantized.steps
    assert ran.skipped == {}
    changed = [n for n, p in model.named_parameters() if not torch.allclose(p, before[n], atol=1e-3)]
    assert set(changed) == set(before)  # norms become 1, everything else is rotated
    assert torch.equal(model.model.norm.weight, torch.ones(48))
    bw.strip(quantized.model)
    found = logits(model, batches)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    peaks = [
        float(w.detach().abs().amax() / w.detach().std())
        for w in (before["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    ]
    assert peaks[1] < peaks[0]


def test_what_cannot_be_rotated_is_listed_and_stays_as_it_is() -> None:
    model = llama(tied=True)
    before = model.model.embed_tokens.weight.detach().clone()
    (ran,) = rotated(model, ("rotate:values=false",)).steps
    assert list(ran.skipped) == ["residual stream"]
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_a_rotation_that_changes_the_outputs_is_undone() -> None:
    model = llama()
    for layer in model.model.layers:  # a shift after the values: rotating them is not exact
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (torch.relu(args[0]),))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (ran,) = rotated(model, ("rotate:stream=false",)).steps
    assert set(ran.skipped) == {f"model.layers.{i}.self_attn" for i in range(2)}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_rotations_come_before_steps_that_need_ranges() -> None:
    with raises_problem("step-order"):
        bw.quantize(llama(), text(1), weights=FORMAT, activations="float", steps=["hqq", "rotate"])


@pytest.mark.parametrize("steps", [("signround:iterations=5",), ("rotate", "imatrix", "gptq")])
def test_steps_are_deterministic(steps: tuple[str, ...]) -> None:
    assert error(steps) == error(steps)


def test_a_failed_run_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitwright.ptq.gptq.Gptq.run", fail)
    with pytest.raises(KeyboardInterrupt):
        bw.quantize(model, text(2), weights=FORMAT, activations="float", steps=["rotate", "gptq"])
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


# -- activations with scales at run time ---------------------------------------------------------------------------


@torch.no_grad()
def with_outliers(model: Any) -> Any:
    """The same function with two activations 40 times as large as the others before each pair of layers."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[3:5] *= 40
            for reader in readers:
                reader.weight[:, 3:5] /= 40
        mlp.up_proj.weight[3:5] *= 40
        mlp.down_proj.weight[:, 3:5] /= 40
    return model


def dynamic_error(**options: Any) -> float:
    """The relative error of the logits with 8-bit activations."""
    model, batches = with_outliers(llama()), text()
    wanted = logits(model, batches)
    quantized = bw.quantize(model, batches, "w8a8-dynamic", measure=False, **options)
    return float((logits(quantized.model, batches) - wanted).norm() / wanted.norm())


def test_dynamic_activations_are_balanced_by_default() -> None:
    model, batches = llama(), text()
    quantized = bw.quantize(model, iter(batches), "w8a8-dynamic", measure=False)
    assert [step.step for step in quantized.steps] == ["smoothquant:alpha=auto"]
    assert dynamic_error() < 0.75 * dynamic_error(steps=())
    assert bw.quantize(llama(), batches, "w8a16", measure=False).steps == ()
    mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert bw.quantize(mlp, [torch.randn(4, 8)], "w8a8-dynamic", measure=False).steps == ()


def test_balancing_keeps_the_function_of_gated_layers() -> None:
    model, batches = llama(), text()
    wanted = logits(model, batches)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    quantized = bw.quantize(model, batches, "w8a8-dynamic", measure=False)
    with in_mode(quantized.model, "float"):
        assert torch.allclose(logits(quantized.model, batches), wanted, atol=1e-3 * float(wanted.abs().max()))
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    layer = "model.layers.1."
    assert {f"{layer}input_layernorm.weight", f"{layer}mlp.up_proj.weight", f"{layer}mlp.down_proj.weight"} <= changed
    assert "lm_head.weight" not in changed  # its input stays in float


def test_alpha_is_a_share_or_auto() -> None:
    with raises_problem("invalid-setting"):
        read_steps(["smoothquant:alpha=1.5"])
    with raises_problem("invalid-setting"):
        read_steps(["smoothquant:alpha=best"])
