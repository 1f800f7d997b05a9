"""What the host needs besides operators: gaps between calls, autograd's start, a step's fixed work, and all parameters'
work (optimizers, clipping, accumulation)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.profiling.cost_key import is_loss
from bitwright.profiling.device_profile import Host, TensorsCost
from bitwright.profiling.step import CLOCKS, Clock, TimedStep, make_optimizer
from bitwright.profiling.step_timer import Sample, StepTimer
from bitwright.profiling.timing import fit, gc_disabled, interleaved
from bitwright.ptq import ALONE, calibrate
from bitwright.quantizers import prepare
from bitwright.training.config import StepSettings

_LINKS = 30  # of the chain that gaps are measured with: enough that a step's start doesn't count
_FEW = 3  # of one beside it: what backward's start takes by itself
COLD = 24 << 20  # bytes: more than the caches that a core has for itself
_TENSORS, _ELEMENTS = (8, 32, 96), (64, 4096, 65536)


def _chain(links: int = _LINKS) -> nn.Module:
    """Two operators a link that compute next to nothing: what remains is the host's."""
    return nn.Sequential(*(layer for _ in range(links) for layer in (nn.Linear(4, 4), nn.Tanh())))


def _chain_plan() -> Plan:
    format = Format.parse("int8/tensor/sym")
    return Plan(sites={f"{2 * i}:input": SiteSpec(format=format, quantizer="lsq") for i in range(_LINKS)})


def measure_host(clock: Clock, *, rounds: int = 30) -> Host:
    """Gaps from a chain of tiny operators, whole and watched by turns."""
    data = torch.randn(4, 4)
    batch = (data, torch.zeros(()))

    def loss(output: Tensor, _: Any) -> Tensor:
        return output.sum()

    settings = StepSettings(schedule=False)
    found: dict[str, float] = {}
    for name, links, plan in (("float", _LINKS, Plan()), ("prepared", _LINKS, _chain_plan()), ("few", _FEW, Plan())):
        model = _chain(links)
        if plan.sites:
            prepare(model, plan)
            calibrate(model, [data], group=ALONE)  # another rank may know its host already
        model.train()
        step = TimedStep(model, [batch], loss, settings, clock=clock)
        timer = StepTimer(model, plan, settings, CLOCKS[clock])
        rows = []
        with gc_disabled():
            for number in range(rounds + 3):
                plain, seen = step.settled(), timer.run(step)
                if number >= 3:
                    rows.append(_row(plain, seen))
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        found.update({f"{name} {key}": value for key, value in zip(_COLUMNS, medians, strict=True)})
    zero = _zero_grad(clock, min(rounds, 5))
    step_fixed = max(0.0, found["float other"] - zero.seconds(20 * _LINKS, 2 * _LINKS))
    added = max(0.0, found["prepared tanh"] - found["float tanh"])
    hooked = max(0.0, found["prepared linear"] - found["float linear"])
    engine, few = found["float engine"], found["few engine"]
    each = max(0.0, engine - few) / (2 * (_LINKS - _FEW))
    return Host(
        gap=found["float gap"],
        prepared_gap=found["prepared gap"],
        seen=added,
        hooked=hooked,
        hook=max(0.0, found["float hook"]),
        engine=max(0.0, engine - 2 * _LINKS * each),
        engine_operator=each,
        step=step_fixed,
        schedule=_schedule(clock),
    )


_COLUMNS = ("gap", "hook", "engine", "other", "linear", "tanh")


def _row(plain: dict[str, float], seen: Sample) -> tuple[float, ...]:
    whole = sum(seconds for (text, _), seconds in seen.forward.items() if not is_loss(text))
    hook = (sum(seen.backward.values()) + seen.engine - plain["backward"]) / seen.nodes
    linear, tanh = (
        sum(seconds for (text, _), seconds in seen.forward.items() if text.startswith(kind)) / _LINKS
        for kind in ("linear(", "tanh(")
    )
    return (plain["forward"] - whole) / (2 * _LINKS), hook, seen.engine, plain["other"], linear, tanh


def _schedule(clock: Clock) -> float:
    optimizer = make_optimizer([nn.Parameter(torch.zeros(4))], StepSettings())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    return interleaved({"": lambda: _timed(clock, scheduler.step)}, rounds=30)[""]


def _timed(clock: Clock, run: Callable[[], Any]) -> float:
    read = CLOCKS[clock]
    start = read()
    run()
    return read() - start


# -- work on all parameters ----------------------------------------------------------------------------------


def measure_tensors(clock: Clock, *, rounds: int = 9, between: int = COLD) -> list[TensorsCost]:
    """Optimizers in a loop and with foreach, clipping, accumulation, and giving gradients back.

    `between`: bytes that the rest of a step touches until these tensors' turn comes again.
    """
    executions = product(("sgd", "adamw"), (False, True))
    found = [_optimizer(clock, name, foreach, rounds, between) for name, foreach in executions]
    return [*found, *(make(clock, rounds, between) for make in (_clip, _scaling, _accumulate, _zero_grad))]


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


def _elsewhere() -> None:
    """A forward and a backward: within a step the optimizer's code isn't what ran last, either."""
    data = torch.ones(64, 64)
    F.cross_entropy(_small_net()(data), data.argmax(1)).backward()
    _small_net().zero_grad()


def _within_a_step(run: Callable[[], float], between: int) -> Callable[[], float]:
    """Within a step these tensors were last touched a step ago: a short one leaves them in the caches."""

    def again() -> float:
        if between < COLD:
            run()  # the other sizes were measured meanwhile
            _elsewhere()
        _filler()[: between // 4].add_(1.0)
        return run()

    return again


def _optimizer(clock: Clock, name: str, foreach: bool, rounds: int, between: int) -> TensorsCost:
    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        settings = StepSettings.model_validate({"optimizer": name, "foreach": foreach})
        optimizer = make_optimizer(parameters, settings)
        return lambda: _timed(clock, optimizer.step)

    return _over_sizes(f"{name}/{'foreach' if foreach else 'loop'}", make, rounds, between)


def _clip(clock: Clock, rounds: int, between: int) -> TensorsCost:
    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        return lambda: _timed(clock, lambda: nn.utils.clip_grad_norm_(parameters, 1e9))

    return _over_sizes("clip", make, rounds, between)


def _scaling(clock: Clock, rounds: int, between: int) -> TensorsCost:
    """What fp16's loss scaling adds to a step: scaling, unscaling, looking for infinities, the next scale."""

    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        optimizer = make_optimizer(parameters, StepSettings())
        optimizer.step = lambda: None  # type: ignore[assignment, method-assign]  # it is measured by itself
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1.0)
        loss = torch.ones(())

        def step() -> None:
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update(1.0)  # else gradients would shrink from round to round

        return lambda: _timed(clock, step)

    return _over_sizes("scaling", make, rounds, between)


def _accumulate(clock: Clock, rounds: int, between: int) -> TensorsCost:
    """What adding to a gradient takes more than taking it as it comes."""

    def make(parameters: Sequence[nn.Parameter]) -> Callable[[], float]:
        given = [torch.randn_like(p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]

        def add() -> None:
            for gradient, new in zip(gradients, given, strict=True):
                gradient.add_(new)

        return lambda: _timed(clock, add)

    return _over_sizes("accumulate", make, rounds, between)


def _zero_grad(clock: Clock, rounds: int = 9, between: int = COLD) -> TensorsCost:
    """Giving gradients' memory back."""

    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        optimizer = make_optimizer(parameters, StepSettings())

        def run() -> float:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            return _timed(clock, lambda: optimizer.zero_grad(set_to_none=True))

        return run

    return _over_sizes("zero_grad", make, rounds, between)
