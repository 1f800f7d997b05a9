"""How fast each kernel of low-precision training is on this CPU, compared with FP32, even while others use the CPU.

Times are CPU time of one thread: what other processes do meanwhile isn't counted, and neither are threads that spin
while they wait for each other. FP32 and the kernels run by turns, and a kernel's figure is the median over turns of its
ratio to the FP32 step just before it. Other processes still share caches and memory with us. If the ratios differ too
much, the figure would be a guess: then there is none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bitwright.core.registry import KERNELS
from bitwright.plan import ComputeSpec
from bitwright.profiling.timing import gc_disabled

WIDTH, BATCH = 768, 1024
_FEW = 64  # samples of the first look
_HOPELESS = 4.0  # times FP32's time on few samples: not worth a longer look
_TURNS, _MORE = 5, 15  # turns, and turns in all where the first ones disagree
_UNSURE = 0.5  # a spread of the middle half of ratios, in medians, that says nothing
TOO_BUSY = "this machine is too busy to tell"

Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class KernelSpeed:
    """One kernel on this machine."""

    kernel: str
    problem: str | None = None
    """Why it doesn't run here."""
    of_float: float | None = None
    """Its time for forward and backward as a share of FP32's; None where there is no figure."""
    spread: float | None = None
    """How far the middle half of turns is apart, as a share of `of_float`."""
    doubt: str | None = None
    """Why there is no figure although the kernel runs."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def kernel_speeds(*, batch: int = BATCH, width: int = WIDTH) -> list[KernelSpeed]:
    """Whether each registered kernel runs here, and its time in a linear layer, forward and backward, beside FP32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with gc_disabled():
            return _measure(batch, width)
    finally:
        torch.set_num_threads(threads)


def _measure(batch: int, width: int) -> list[KernelSpeed]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(batch, width, generator=generator) for _ in range(2))
    weight = torch.randn(width, width, generator=generator)

    def step(run: Run, rows: int = batch) -> float:
        own, other = x[:rows].clone().requires_grad_(), weight.clone().requires_grad_()
        start = time.thread_time()
        torch.autograd.grad(run(F.linear, (own, other), {}), (own, other), gradient[:rows])
        return time.thread_time() - start

    def look(run: Run, rows: int) -> float:
        return step(run, rows) / step(_plain, rows)

    found: dict[str, KernelSpeed] = {}
    runs: dict[str, Run] = {}
    step(_plain)
    for name in KERNELS.names():
        try:
            kind = KERNELS.get(name)
            problem = kind.missing(torch.device("cpu"))
            found[name] = KernelSpeed(kernel=name, problem=problem)
            if problem is None and "linear" in kind.kinds:
                run = kind(ComputeSpec(format=name, backward=("input", "weight")))
                step(run, 1)  # the first call compiles and packs
                first = [look(run, min(_FEW, batch)) for _ in range(_TURNS)]
                found[name] = judge(name, first)
                if statistics.median(first) < _HOPELESS or found[name].doubt is not None:
                    runs[name] = run
        except Exception as error:  # a plugin that can't be imported must not hide the others
            found[name] = KernelSpeed(kernel=name, problem=f"{type(error).__name__}: {error}")
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_MORE):
        if turn >= _TURNS and all(judge(name, values).doubt is None for name, values in ratios.items()):
            break
        float_seconds = step(_plain)
        for name, run in runs.items():
            ratios[name].append(step(run) / float_seconds)
            float_seconds = step(_plain)
    found.update({name: judge(name, values) for name, values in ratios.items()})
    return list(found.values())


def _plain(func: Run, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def judge(name: str, ratios: list[float]) -> KernelSpeed:
    """A kernel's figure from its ratios to FP32, turn by turn.

    >>> judge("int8", [0.5, 0.52, 0.48, 0.51, 9.0]).of_float  # one disturbed turn doesn't count
    0.51
    >>> judge("int8", [0.5, 2.0, 11.0, 0.7, 4.0]).doubt
    'this machine is too busy to tell'
    """
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    spread = (high - low) / middle
    if spread > _UNSURE:
        return KernelSpeed(kernel=name, spread=spread, doubt=TOO_BUSY)
    return KernelSpeed(kernel=name, of_float=middle, spread=spread)
