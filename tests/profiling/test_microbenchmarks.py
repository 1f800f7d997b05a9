"""Figures of kernels are those of the machine, also while others use it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from bitwright.core.registry import KERNELS
from bitwright.profiling import KernelSpeed, kernel_speeds
from bitwright.profiling import microbenchmarks as module
from bitwright.profiling.microbenchmarks import TOO_BUSY, judge

BUSY = "import time\nend = time.monotonic() + 100\nwhile time.monotonic() < end:\n    sum(range(10000))"


def by_name(**sizes: int) -> dict[str, KernelSpeed]:
    return {speed.kernel: speed for speed in kernel_speeds(**sizes)}


class Float:
    """A kernel that does what FP32 does, and repeats it on demand."""

    kinds = ("linear",)
    times = 1

    def __init__(self, spec: object) -> None:
        pass

    @classmethod
    def missing(cls, device: torch.device) -> None:
        return None

    def __call__(self, func, args, kwargs):  # type: ignore[no-untyped-def]
        out = func(*args, **kwargs)
        for _ in range(self.times - 1):
            out = out + 0 * func(*args, **kwargs)
        return out


class Triple(Float):
    times = 3


@pytest.fixture
def registered():  # type: ignore[no-untyped-def]
    added = {"same": Float, "triple": Triple, "broken": None}
    for name, kind in added.items():
        KERNELS.register(name, kind)
    yield
    for name in added:
        KERNELS.unregister(name)


def test_speed_ratios_are_stable_on_a_busy_machine(registered: None) -> None:
    """Four processes compete for the CPU: a figure is right, or it isn't given."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(4)]
    threads = torch.get_num_threads()
    try:
        time.sleep(0.5)
        found = by_name(batch=256, width=256)
    finally:
        for process in others:
            process.kill()
            process.wait(timeout=60)
    assert torch.get_num_threads() == threads
    for name, low, high in (("same", 0.6, 1.7), ("triple", 1.7, 5.0)):
        speed = found[name]
        assert speed.problem is None
        if speed.of_float is None:
            assert speed.doubt == TOO_BUSY
        else:
            assert low < speed.of_float < high, speed


def test_a_broken_kernel_does_not_hide_others(registered: None) -> None:
    found = by_name(batch=64, width=64)
    assert set(found) == {*KERNELS.names()}
    assert "AttributeError" in (found["broken"].problem or "")
    assert found["broken"].of_float is None
    for name in ("int8", "bf16", "same"):
        speed = found[name]
        assert (speed.of_float is None) == (speed.problem is not None or speed.doubt is not None)


def test_a_disturbed_first_measurement_is_repeated(monkeypatch: pytest.MonkeyPatch, registered: None) -> None:
    """One slow sample used to be reported as "11 times slower"."""
    clock = {"now": 0.0, "reads": 0}

    def read() -> float:
        clock["reads"] += 1
        clock["now"] += 30.0 if clock["reads"] in (8, 40) else 1.0
        return clock["now"]

    monkeypatch.setattr(module.time, "thread_time", read)
    found = by_name(batch=16, width=16)
    measured = {name: speed.of_float for name, speed in found.items() if speed.problem is None}
    assert {"same", "triple"} <= measured.keys()
    assert set(measured.values()) == {1.0}


def test_inconsistent_ratios_give_no_result() -> None:
    assert judge("int8", [0.5] * 5) == KernelSpeed(kernel="int8", of_float=0.5, spread=0.0)
    unsure = judge("int8", [0.5, 0.5, 5.0, 11.0, 20.0])
    assert unsure.of_float is None
    assert unsure.doubt == TOO_BUSY
