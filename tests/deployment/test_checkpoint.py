"""Checkpoints: bit-exact, tied tensors once, strict."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from problems import raises_problem
from safetensors.torch import load_file, save_file
from torch import nn

import bitwright
from bitwright import load_checkpoint, save_checkpoint
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.ptq import calibrate


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        # two views of one memory that aren't the same tensor
        memory = torch.randn(6)
        self.register_buffer("start", memory[:4])
        self.register_buffer("end", memory[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_a_prepared_model_comes_back_bit_exact(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    fresh = deepcopy(model)
    batch = torch.randn(16, 6)
    quantized = bitwright.quantize(model, [batch])
    path = save_checkpoint(model, tmp_path / "model.safetensors")
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    bitwright.prepare(fresh, quantized.plan)
    load_checkpoint(fresh, path)
    assert torch.equal(fresh(batch), model(batch))
    assert fresh.state_dict().keys() == model.state_dict().keys()


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].register_buffer("größe", torch.ones(1))
    files = [save_checkpoint(model, tmp_path / f"{number}.safetensors").read_bytes() for number in range(12)]
    assert len(set(files)) == 1
    load_checkpoint(model, tmp_path / "0.safetensors")


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    path = save_checkpoint(model, tmp_path / "tied.safetensors")
    assert sorted(load_file(path)) == ["embed.weight", "end", "start"]
    load_checkpoint(other, path)
    assert other.head.weight is other.embed.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_a_float_checkpoint_loads_into_a_prepared_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    path = save_checkpoint(model, tmp_path / "float.safetensors")
    bitwright.quantize(model, [torch.randn(4, 6)])
    load_checkpoint(model, path)


def test_all_differences_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = deepcopy(model.state_dict())
    save_file(
        {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(5), "1.weights": torch.ones(2, 2)},
        tmp_path / "other.safetensors",
    )
    with pytest.raises(bitwright.BitwrightError) as caught:
        load_checkpoint(model, tmp_path / "other.safetensors")
    assert {problem.where for problem in caught.value.problems} == {
        "0.bias",
        "1.weight",
        "1.bias",
        "1.weights",
    }
    assert "did you mean '1.weight'" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_quantizers_of_another_plan_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    bitwright.quantize(model, [torch.randn(4, 3)])
    path = save_checkpoint(model, tmp_path / "model.safetensors")
    with pytest.raises(bitwright.BitwrightError) as caught:
        load_checkpoint(bitwright.strip(model), path)
    assert "unexpected-quantizer" in caught.value.codes


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    path = save_checkpoint(model, tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with raises_problem("damaged-checkpoint", where=path):
        load_checkpoint(model, path)
    with pytest.raises(bitwright.BitwrightError) as caught:
        load_checkpoint(model, tmp_path / "none.safetensors")
    assert "no-such-checkpoint" in caught.value.codes


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "later.safetensors", metadata={"bitwright": "2"})
    with pytest.raises(bitwright.BitwrightError) as caught:
        load_checkpoint(model, tmp_path / "later.safetensors")
    assert "unknown-version" in caught.value.codes


IMPOSSIBLE = {
    "nan": ("scale", lambda t: torch.full_like(t, torch.nan), "state-not-finite"),
    "infinite": ("scale", lambda t: torch.full_like(t, torch.inf), "state-not-finite"),
    "zero": ("scale", torch.zeros_like, "scale-range"),
    "negative": ("scale", lambda t: -t, "scale-range"),
    "subnormal": ("scale", lambda t: torch.full_like(t, 1e-40), "scale-range"),
    "overflows": ("scale", lambda t: torch.full_like(t, 1e38), "scale-overflow"),
    "empty": ("scale", lambda t: t.reshape(-1)[:0], "state-shape"),
    "int64": ("scale", lambda t: t.long() + 1, "state-dtype"),
    "half": ("scale", lambda t: t.half(), "state-dtype"),
    "wrong rank": ("scale", lambda t: t.reshape(1, 1, -1), "state-shape"),
    "zero point far away": ("zero_point", lambda t: t + 1000, "zero-point-range"),
    "zero point between codes": ("zero_point", lambda t: t + 0.5, "zero-point-range"),
    "zero point nan": ("zero_point", lambda t: t * torch.nan, "state-not-finite"),
    "zero point int8": ("zero_point", lambda t: t.to(torch.int8), "state-dtype"),
    "codes": ("codes", lambda t: t * 2, "codes"),
    "codes empty": ("codes", lambda t: t[:0], "state-shape"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_impossible_quantizer_state_is_refused_with_every_site(what: str, tmp_path: Path) -> None:
    name, change, code = IMPOSSIBLE[what]
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    quantized = bitwright.quantize(model, [torch.randn(16, 6)])
    path = save_checkpoint(model, tmp_path / "model.safetensors")
    state = load_file(path)
    keys = [key for key in state if key.endswith(f".{name}")]
    assert len(keys) > 2
    save_file({key: change(value) if key in keys else value for key, value in state.items()}, path)
    sites = {key.removeprefix("bitwright.").removesuffix(f".{name}") for key in keys}
    other = deepcopy(bitwright.strip(model))
    bitwright.prepare(other, quantized.plan)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    for load in (lambda: load_checkpoint(other, path), lambda: other.load_state_dict(load_file(path))):
        with pytest.raises(BitwrightError) as caught:
            load()
        assert {problem.where for problem in caught.value.problems} >= sites
        assert code in caught.value.codes
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in before.items())


def test_missing_and_unknown_state_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    bitwright.quantize(model, [torch.randn(16, 6)])
    path = save_checkpoint(model, tmp_path / "model.safetensors")
    state = load_file(path)
    del state["bitwright.0:weight.zero_point"]
    state["bitwright.0:input.alpha"] = torch.ones(())
    state["bitwright.0:weight.scale"] = torch.ones(7)
    save_file(state, path)
    with pytest.raises(PlanError) as caught:
        load_checkpoint(model, path)
    assert sorted(caught.value.codes) == ["state-incomplete", "state-shape", "state-unknown"]


@pytest.mark.parametrize(
    ("quantizer", "format", "name", "value"),
    [
        ("lsq", "int8/tensor/sym", "scale", 0.0),
        ("lsqplus", "uint8/tensor/asym", "zero_point", 1e6),
        ("tqt", "int8/tensor/sym", "log2_threshold", 500.0),
        ("tqt", "int8/tensor/sym", "log2_threshold", -500.0),
        ("pact", "uint8/tensor/asym", "high", torch.nan),
        ("pact", "int8/tensor/sym", "high", 0.0),
        ("qil", "int8/tensor/sym", "half_width", 0.0),
        ("apot", "int4/tensor/sym", "scale", torch.inf),
    ],
)
def test_learned_state_is_looked_at_too(quantizer: str, format: str, name: str, value: float) -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    plan = Plan(sites={"0:input": SiteSpec(format=Format.parse(format), quantizer=quantizer)})
    bitwright.prepare(model, plan)
    calibrate(model, [torch.randn(16, 6)])
    state = model.state_dict()
    model.load_state_dict(state)
    state[f"bitwright.0:input.{name}"] = torch.full_like(state[f"bitwright.0:input.{name}"], value)
    with pytest.raises(PlanError) as caught:
        model.load_state_dict(state)
    assert {problem.where for problem in caught.value.problems} == {"0:input"}


def test_export_refuses_impossible_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    quantized = bitwright.quantize(model, [torch.randn(16, 6)])
    with torch.no_grad():
        bitwright.quantizers.quantizers_of(model)["0:weight"].scale.fill_(torch.nan)
    with pytest.raises(PlanError) as caught:
        quantized.export(tmp_path / "model.onnx")
    assert [problem.where for problem in caught.value.problems] == ["0:weight"]
    assert not list(tmp_path.iterdir())


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    batches = [torch.randn(16, 8)]
    model = _small()
    model[2].bias.data[0] = value  # type: ignore[union-attr, operator, index]
    with pytest.raises(BitwrightError) as caught:
        bitwright.quantize(model, batches)
    assert [(p.code, p.where) for p in caught.value.problems] == [("parameter-not-finite", "2.bias")]

    quantized = bitwright.quantize(_small(), batches)
    save_checkpoint(quantized.model, tmp_path / "good.safetensors")
    state = load_file(tmp_path / "good.safetensors")
    state["0.weight"][0, 0] = value
    state["2.bias"][0] = value
    save_file(state, tmp_path / "bad.safetensors")
    model = bitwright.prepare(_small(), quantized.plan)
    with pytest.raises(PlanError) as refused:
        load_checkpoint(model, tmp_path / "bad.safetensors")
    assert {p.where for p in refused.value.problems} == {"0.weight", "2.bias"}
    quantized.model.load_state_dict(state)
    with pytest.raises(PlanError) as unexported:
        quantized.export(tmp_path / "model.onnx")
    assert {p.where for p in unexported.value.problems} == {"0.weight", "2.bias"}


def test_integers_in_place_of_floats_are_refused(tmp_path: Path) -> None:
    save_file({name: t.long() for name, t in _small().state_dict().items()}, tmp_path / "ints.safetensors")
    with pytest.raises(PlanError) as caught:
        load_checkpoint(_small(), tmp_path / "ints.safetensors")
    assert {p.code for p in caught.value.problems} == {"state-dtype"}


def test_a_file_of_another_kind_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text("import torch\n")
    for read in (lambda: bitwright.load_checkpoint(nn.Linear(2, 2), path), lambda: bitwright.Plan.load(path)):
        with raises_problem("wrong-kind-of-file", where=path):
            read()
    for load in (bitwright.Cluster.load, bitwright.DeviceProfile.load):
        with raises_problem("wrong-kind-of-file", where=path):
            load(path)
