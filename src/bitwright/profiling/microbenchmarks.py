"""Measure single operations outside of a model: casts by size, work on all parameters, and kernels relative to FP32."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.formats import Format
from bitwright.core.registry import KERNELS, QUANTIZERS
from bitwright.deployment.measurement import TOO_BUSY, UNSURE, relative_spread
from bitwright.graph.operators import channel_axis, reduction_axis
from bitwright.plan import ComputeSpec, SiteSpec
from bitwright.profiling.device_profile import CastCost, Line, TensorsCost
from bitwright.profiling.execution import Cast, is_quantizer
from bitwright.profiling.profiled_step import CLOCKS, Clock, make_optimizer
from bitwright.profiling.step_timer import fit, gc_disabled, interleaved
from bitwright.quantizers import Layout, Quantizer
from bitwright.quantizers.compiled import SMALL
from bitwright.training.config import StepSettings


def timed(clock: Clock, run: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    read = CLOCKS[clock]
    start = read()
    run()
    return read() - start


# -- casts and quantizers ----------------------------------------------------------------------------------------

# below and above the size from which compiled code is used, and enough to hold some out
_CAST_SIZES = (*(1 << k for k in range(10, 16)), 3 << 14, SMALL, 3 << 15, *(1 << k for k in range(18, 22)))
DTYPES = [Cast("input", "float32→bfloat16"), Cast("input", "bfloat16→float32")]


def measure_casts(casts: Iterable[Cast], clock: Clock, *, rounds: int = 7) -> list[CastCost]:
    """Fit the cost of each kind of cast, t = α·n + β, forward and backward, over three orders of magnitude.

    A quantizer that depends on others (a bias on input and weight) has no cost of its own.
    """
    kinds = {cast.kind: cast for cast in casts if not is_quantizer(cast.kind) or _stands_alone(cast)}
    found = []
    for kind, cast in sorted(kinds.items()):
        runs = {size: _cast_pass(cast, size) for size in _CAST_SIZES}
        work: dict[tuple[int, str], Callable[[], float]] = {}
        for size, run in runs.items():
            work[(size, "forward")] = lambda run=run: run(CLOCKS[clock])[0]  # type: ignore[misc]
            work[(size, "backward")] = lambda run=run: run(CLOCKS[clock])[1]  # type: ignore[misc]
        seconds = interleaved(work, rounds=rounds, warm=3)
        forward, backward = (
            _lines([(size, seconds[(size, execution)]) for size in _CAST_SIZES], broken="fused" in kind)
            for execution in ("forward", "backward")
        )
        found.append(CastCost(kind=kind, forward=forward, backward=backward))
    return found


def _stands_alone(cast: Cast) -> bool:
    return "of" not in inspect.signature(QUANTIZERS.get(cast.kind.split()[0]).__init__).parameters


def _lines(points: list[tuple[int, float]], *, broken: bool) -> list[Line]:
    """Fit one line, or two if compiled code is used from some size on."""
    parts = [(0, [p for p in points if p[0] < SMALL]), (SMALL, [p for p in points if p[0] >= SMALL])]
    lines = []
    for start, part in parts if broken else [(0, points)]:
        found = fit([(float(size), 1.0) for size, _ in part], [s for _, s in part])
        slope, fixed = found.coefficients
        lines.append(Line(per_element=slope, fixed=fixed, start=start, r2=found.r2, held_out=found.held_out))
    return lines


TimedPass = Callable[[Callable[[], float]], tuple[float, float]]


def _cast_pass(cast: Cast, size: int) -> TimedPass:
    if is_quantizer(cast.kind):
        return _quantizer_pass(cast, size)
    source, target = (getattr(torch, name) for name in cast.kind.split("→"))
    x = torch.randn(size).to(source).requires_grad_()
    return _passes(x, lambda: x.to(target))


def _quantizer_pass(cast: Cast, size: int) -> TimedPass:
    name, text, *flags = cast.kind.split()
    format = Format.parse(text)
    kind, port = ("conv2d", cast.port) if cast.weight else ("relu", "output")
    axis = (channel_axis if format.granularity == "channel" else reduction_axis)(kind, port)
    guard = next((flag for flag in flags if flag == "int16-pairs"), None)
    spec = SiteSpec(format=format, quantizer=name, guard=guard)
    layout = Layout(format.granularity, axis, format.group)
    quantizer: Quantizer = QUANTIZERS.get(name)(
        spec, site="probe:input", kind=kind, port=port, layout=layout, weight=cast.weight
    )
    quantizer.compiled = "fused" in flags
    x = torch.randn(_shape(size, cast.weight))
    quantizer.observe(x)
    quantizer.update_grid()
    x.requires_grad_()
    also: dict[str, Any] = {"relu": True} if "relu" in flags else {}
    if "fold4" in flags:
        also["factor"] = torch.ones([x.shape[0]] + [1] * (x.dim() - 1), requires_grad=True)
    return _passes(x, lambda: quantizer(x, **also))


def _shape(size: int, weight: bool) -> tuple[int, ...]:
    return (16, size // 256, 4, 4) if weight else (16, size // 1024, 8, 8)


def _passes(x: Tensor, forward: Callable[[], Tensor]) -> TimedPass:
    def run(read: Callable[[], float]) -> tuple[float, float]:
        t0 = read()
        y = forward()
        t1 = read()
        gradient = torch.ones_like(y)
        t2 = read()
        y.backward(gradient)
        return t1 - t0, read() - t2

    return run


# -- work on all parameters --------------------------------------------------------------------------------------

COLD = 24 << 20  # bytes, more than the caches of one core
_TENSORS, _ELEMENTS = (8, 32, 96), (64, 4096, 65536)


def measure_tensors(clock: Clock, *, rounds: int = 9, between: int = COLD) -> list[TensorsCost]:
    """Measure work on all parameters: optimizers (loop and foreach), clipping, accumulation and releasing gradients.

    `between` is the number of bytes that the rest of a step touches before these tensors are used again.
    """
    executions = product(("sgd", "adamw"), (False, True))
    found = [_optimizer(clock, name, foreach, rounds, between) for name, foreach in executions]
    return [*found, *(make(clock, rounds, between) for make in (_clip, _scaling, _accumulate, zero_grad_cost))]


def _parameters(tensors: int, elements: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(elements)) for _ in range(tensors)]
    for parameter in made:
        parameter.grad = torch.randn(elements)
    return made


def _over_sizes(
    name: str, make: Callable[[list[nn.Parameter]], Callable[[], float]], rounds: int, between: int
) -> TensorsCost:
    sizes = list(product(_TENSORS, _ELEMENTS))
    work = {size: _within_a_step(make(_parameters(*size)), between) for size in sizes}
    seconds = interleaved(work, rounds=rounds, warm=1)
    rows = [(float(tensors * elements), float(tensors), 1.0) for tensors, elements in sizes]
    found = fit(rows, [seconds[size] for size in sizes])
    per_element, per_tensor, fixed = found.coefficients
    return TensorsCost(
        name=name, per_element=per_element, per_tensor=per_tensor, fixed=fixed, r2=found.r2, held_out=found.held_out
    )


@cache
def _filler() -> Tensor:
    return torch.zeros(COLD // 4)


@cache
def _small_net() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())))


def _run_other_work() -> None:
    """Run a forward and a backward pass, as a training step does between two runs of the optimizer."""
    data = torch.ones(64, 64)
    F.cross_entropy(_small_net()(data), data.argmax(1)).backward()
    _small_net().zero_grad()


def _within_a_step(run: Callable[[], float], between: int) -> Callable[[], float]:
    """Touch as much memory as a step does between two uses of these tensors."""

    def run_in_step() -> float:
        if between < COLD:
            run()  # other sizes were measured since the last round
            _run_other_work()
        _filler()[: between // 4].add_(1.0)
        return run()

    return run_in_step


def _optimizer(clock: Clock, name: str, foreach: bool, rounds: int, between: int) -> TensorsCost:
    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        settings = StepSettings.model_validate({"optimizer": name, "foreach": foreach})
        optimizer = make_optimizer(parameters, settings)
        return lambda: timed(clock, optimizer.step)

    return _over_sizes(f"{name}/{'foreach' if foreach else 'loop'}", make, rounds, between)


def _clip(clock: Clock, rounds: int, between: int) -> TensorsCost:
    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        return lambda: timed(clock, lambda: nn.utils.clip_grad_norm_(parameters, 1e9))

    return _over_sizes("clip", make, rounds, between)


def _scaling(clock: Clock, rounds: int, between: int) -> TensorsCost:
    """The cost of fp16 loss scaling: scaling, unscaling, the search for infinities, and the next scale."""

    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        optimizer = make_optimizer(parameters, StepSettings())
        optimizer.step = lambda: None  # type: ignore[assignment, method-assign]  # it is measured separately
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1.0)
        loss = torch.ones(())

        def step() -> None:
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update(1.0)  # otherwise gradients would shrink in each round

        return lambda: timed(clock, step)

    return _over_sizes("scaling", make, rounds, between)


def _accumulate(clock: Clock, rounds: int, between: int) -> TensorsCost:
    """The additional cost of adding to a gradient instead of storing it."""

    def make(parameters: Sequence[nn.Parameter]) -> Callable[[], float]:
        given = [torch.randn_like(p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]

        def add() -> None:
            for gradient, new in zip(gradients, given, strict=True):
                gradient.add_(new)

        return lambda: timed(clock, add)

    return _over_sizes("accumulate", make, rounds, between)


def zero_grad_cost(clock: Clock, rounds: int = 9, between: int = COLD) -> TensorsCost:
    """The cost of releasing gradients."""

    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        optimizer = make_optimizer(parameters, StepSettings())

        def run() -> float:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            return timed(clock, lambda: optimizer.zero_grad(set_to_none=True))

        return run

    return _over_sizes("zero_grad", make, rounds, between)


# -- kernels relative to FP32 ------------------------------------------------------------------------------------

WIDTH, BATCH = 768, 1024
_FEW = 64  # samples of the first measurement
_TOO_SLOW = 4.0  # ratio to FP32 on few samples above which the kernel isn't measured further
_TURNS, _MORE = 5, 15  # turns, and the total if the first ones differ too much

Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class KernelSpeed:
    """The speed of one kernel on this machine."""

    kernel: str
    problem: str | None = None
    """Why it doesn't run here."""
    of_float: float | None = None
    """Its time for forward and backward relative to FP32; None if unknown."""
    spread: float | None = None
    """The interquartile range of the turns, relative to `of_float`."""
    doubt: str | None = None
    """Why the ratio is unknown although the kernel runs."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-compatible data."""
        return asdict(self)


def kernel_speeds(*, batch: int = BATCH, width: int = WIDTH) -> list[KernelSpeed]:
    """Measure each registered kernel in a linear layer, forward and backward, relative to FP32.

    Times are CPU time of one thread, which excludes other processes and threads that wait. FP32 and the kernels run in
    turn. The result is the median ratio of a kernel to the FP32 step before it. Other processes still share caches and
    memory bandwidth; if the ratios differ too much, the ratio is unknown.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with gc_disabled():
            return _measure_kernels(batch, width)
    finally:
        torch.set_num_threads(threads)


def _measure_kernels(batch: int, width: int) -> list[KernelSpeed]:
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
                if statistics.median(first) < _TOO_SLOW or found[name].doubt is not None:
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
    """Return the speed of a kernel from the ratios of all turns.

    >>> judge("int8", [0.5, 0.52, 0.48, 0.51, 9.0]).of_float  # one outlier doesn't matter
    0.51
    >>> judge("int8", [0.5, 2.0, 11.0, 0.7, 4.0]).doubt
    'this machine is too busy to tell'
    """
    spread = relative_spread(ratios)
    if spread > UNSURE:
        return KernelSpeed(kernel=name, spread=spread, doubt=TOO_BUSY)
    return KernelSpeed(kernel=name, of_float=statistics.median(ratios), spread=spread)
