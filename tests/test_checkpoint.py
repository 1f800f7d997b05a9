"""Checkpoints: bit-exact, tied tensors once, strict."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bitwright
from bitwright import load_checkpoint, save_checkpoint


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
    with pytest.raises(bitwright.BitwrightError, match="a quantizer where the plan has none"):
        load_checkpoint(bitwright.strip(model), path)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    path = save_checkpoint(model, tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(bitwright.BitwrightError, match="can't be read"):
        load_checkpoint(model, path)
    with pytest.raises(bitwright.BitwrightError, match="no such checkpoint"):
        load_checkpoint(model, tmp_path / "none.safetensors")


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "later.safetensors", metadata={"bitwright": "2"})
    with pytest.raises(bitwright.BitwrightError, match="another version"):
        load_checkpoint(model, tmp_path / "later.safetensors")
