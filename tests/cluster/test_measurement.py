from __future__ import annotations

import pytest
import torch
from step_cases import net, profile_of, timed_sample

from bitwright.cluster import DeviceStep
from bitwright.cluster import measurement as module
from bitwright.cluster.measurement import check_is_here, compare
from bitwright.core.errors import PlanError
from bitwright.plan import Plan
from bitwright.profiling import StepSettings, Variant, record_step
from bitwright.profiling.profiled_step import TimedStep
from bitwright.profiling.profiler import device_name


def test_the_step_that_is_measured_follows_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trainer's does; after other work caches hold other things."""
    model, batch, loss = net()
    made = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    made = made.model_copy(update={"device": device_name(), "threads": torch.get_num_threads()})
    local = DeviceStep.build(record_step(model, batch, loss), Plan(), made, StepSettings())
    done: list[str] = []
    step = TimedStep.__call__

    def seen(self: TimedStep) -> dict[str, float]:
        spent = step(self)
        done.append("step" if self.timer is None else "watched")
        return dict.fromkeys(spent, 7.0 if done[-2:] == ["step", "step"] else 1.0)

    def measure(clock: object) -> float:
        done.append("yardstick")
        return 1.0

    monkeypatch.setattr(TimedStep, "__call__", seen)
    monkeypatch.setattr(module, "yardstick", measure)
    found = compare(local, Variant(model=model), batch, loss, steps=3)
    assert done[-4:] == ["yardstick", "step", "step", "watched"]
    assert [pair.name for pair in found.phases] == ["forward", "loss", "backward", "optimizer", "other"]
    assert {pair.measured for pair in found.phases} == {7.0}


def test_a_profile_of_one_thread_is_not_compared_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    made = profile_of([]).model_copy(update={"device": device_name(), "clock": "cpu"})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    check_is_here(made)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(PlanError) as error:
        check_is_here(made)
    assert [problem.where for problem in error.value.problems] == ["threads", "clock"]
