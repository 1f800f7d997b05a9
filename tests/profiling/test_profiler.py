from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from step_cases import net
from torch import nn

from bitwright.core.errors import BitwrightError
from bitwright.profiling import SampleStore, StepSettings, Variant, profile_variants, profiler
from bitwright.profiling.device_profile import TensorsCost
from bitwright.profiling.microbenchmarks import COLD
from bitwright.profiling.profiler import _touched, training_peak


def test_samples_are_shared_by_all_models_of_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One file for all models; another for another clock, thread count, quota or version."""
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path))
    wall = profiler.samples_file("wall")
    assert wall.parent.parent == tmp_path
    assert profiler.samples_file("wall") == wall
    monkeypatch.delenv("BITWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert profiler.samples_file("wall") == tmp_path / "xdg" / "bitwright" / "samples" / wall.name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert profiler.samples_file("wall").is_relative_to(tmp_path / "home" / ".cache" / "bitwright")
    others = {wall.name, profiler.samples_file("cpu").name}
    for name, value in (("__version__", "9.9"), ("cpu_quota", lambda: 0.5)):
        with monkeypatch.context() as patch:
            patch.setattr(profiler, name, value)
            others.add(profiler.samples_file("wall").name)
    assert len(others) == 4
    assert profiler.circumstances("wall")["bitwright"] == profiler.__version__


def test_profiles_name_the_cpu_even_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A Big GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1))
    assert "GPU" not in profiler.device_name()
    assert profiler.memory_limit() != 1
    assert not StepSettings().uses_foreach
    assert StepSettings(foreach=True).uses_foreach


def test_models_on_other_devices_are_rejected() -> None:
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(BitwrightError) as caught:
        profile_variants([Variant(model=model)], (torch.ones(1, 4), torch.ones(1, 4)), nn.functional.mse_loss)
    assert caught.value.codes == ["model-not-on-cpu"]


def test_measuring_memory_leaves_the_model_unchanged() -> None:
    model, batch, loss = net()
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    peak = training_peak(model, batch, loss)
    assert peak == 0 or peak > 50 << 20  # 0 where the system doesn't tell
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_smaller_step_is_not_hidden_by_a_larger_one_before() -> None:
    """The system's figure never falls by itself: INT8 steps after float ones seemed to need as much."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    loss = nn.functional.cross_entropy
    if not profiler.reset_peak_memory():
        pytest.skip("the system doesn't count anew")
    large, small = (
        training_peak(model, (torch.randn(size, 64), torch.zeros(size, dtype=torch.long)), loss, steps=2)
        for size in (20_000, 100)
    )
    assert 0 < small < large - 40_000_000


def test_optimizers_are_measured_with_the_cache_state_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short step leaves parameters in the caches, a long one doesn't; neither is measured twice."""
    asked = []

    def measured(clock: str, *, rounds: int, between: int) -> list[TensorsCost]:
        asked.append(between)
        return [TensorsCost(name="sgd/loop", per_element=0.0, per_tensor=0.0, fixed=float(between))]

    monkeypatch.setattr("bitwright.profiling.profiler.measure_tensors", measured)
    model, (images, target), loss = net()
    large = (torch.randn(4, 3, 256, 256), target)
    assert _touched(model, (images, target), loss) == 1 << 20
    assert _touched(model, large, loss) == COLD
    store = SampleStore()
    for batch, between in (((images, target), 1 << 20), (large, COLD), ((images, target), 1 << 20)):
        made = profile_variants([Variant(model=model)], batch, loss, store=store, rounds=3, fit_casts=False)
        assert made.by_name["sgd/loop"].fixed == between
    assert asked == [1 << 20, COLD]
