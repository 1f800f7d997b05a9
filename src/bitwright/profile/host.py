"""What the host needs besides operators: gaps between calls, autograd's start, a step's fixed work, and all parameters'
work (optimizers, clipping, accumulation)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.attach import prepare
from bitwright.formats import Format
from bitwright.plan import Plan, SiteSpec
from bitwright.profile.device import Host, TensorsCost
from bitwright.profile.fit import fit
from bitwright.profile.repeat import interleaved, undisturbed
from bitwright.profile.step import CLOCKS, Clock, StepSettings, make_optimizer
from bitwright.profile.watch import Sample, Watch, WatchedStep
from bitwright.ptq import calibrate

_LINKS = 30  # operators of the chain that gaps are measured with: enough that a step's start doesn't count
_TENSORS, _ELEMENTS = (8, 32, 96), (64, 4096, 65536)


def _chain() -> nn.Module:
    """Operators that compute next to nothing: what remains is the host's."""
    return nn.Sequential(*(layer for _ in range(_LINKS) for layer in (nn.Linear(4, 4), nn.Tanh())))


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
    for name, plan in (("float", Plan()), ("prepared", _chain_plan())):
        model = _chain()
        if plan.sites:
            prepare(model, plan)
            calibrate(model, [data])
        model.train()
        step = WatchedStep(model, [batch], loss, settings, clock=clock)
        watch = Watch(model, plan, settings, CLOCKS[clock])
        rows = []
        with undisturbed():
            for number in range(rounds + 3):
                plain, seen = step(), watch.run(step)
                if number >= 3:
                    rows.append(_row(plain, seen))
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        found.update({f"{name} {key}": value for key, value in zip(_COLUMNS, medians, strict=True)})
    zero = _zero_grad(clock, min(rounds, 5))
    step_fixed = max(0.0, found["float other"] - zero.seconds(20 * _LINKS, 2 * _LINKS))
    added = max(0.0, found["prepared tanh"] - found["float tanh"])
    hooked = max(0.0, found["prepared linear"] - found["float linear"])
    return Host(
        gap=found["float gap"],
        prepared_gap=found["prepared gap"],
        seen=added,
        hooked=hooked,
        hook=max(0.0, found["float hook"]),
        engine=found["float engine"],
        step=step_fixed,
        schedule=_schedule(clock),
    )


_COLUMNS = ("gap", "hook", "engine", "other", "linear", "tanh")


def _row(plain: dict[str, float], seen: Sample) -> tuple[float, ...]:
    whole = sum(seconds for (text, _), seconds in seen.forward.items() if not text.startswith("loss:"))
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


def measure_tensors(clock: Clock, *, rounds: int = 9) -> list[TensorsCost]:
    """Optimizers in a loop and with foreach, clipping, accumulation, and giving gradients back."""
    found = [_optimizer(clock, name, foreach, rounds) for name, foreach in product(("sgd", "adamw"), (False, True))]
    others = (_clip, _scaling, _accumulate, _zero_grad)
    return [*found, *(measure(clock, rounds) for measure in others)]


def _parameters(tensors: int, elements: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(elements)) for _ in range(tensors)]
    for parameter in made:
        parameter.grad = torch.randn(elements)
    return made


def _over_sizes(name: str, make: Callable[[list[nn.Parameter]], Callable[[], float]], rounds: int) -> TensorsCost:
    sizes = list(product(_TENSORS, _ELEMENTS))
    work = {size: _cold(make(_parameters(*size))) for size in sizes}
    seconds = interleaved(work, rounds=rounds, warm=1)
    rows = [(float(tensors * elements), float(tensors), 1.0) for tensors, elements in sizes]
    found = fit(rows, [seconds[size] for size in sizes])
    per_element, per_tensor, fixed = found.coefficients
    return TensorsCost(
        name=name, per_element=per_element, per_tensor=per_tensor, fixed=fixed, r2=found.r2, held_out=found.held_out
    )


_FILLER = 6 << 20  # elements: 24 MB, more than the caches that a core has for itself


@cache
def _filler() -> Tensor:
    return torch.zeros(_FILLER)


def _cold(run: Callable[[], float]) -> Callable[[], float]:
    """Within a step these tensors were last touched long ago."""

    def cold() -> float:
        _filler().add_(1.0)
        return run()

    return cold


def _optimizer(clock: Clock, name: str, foreach: bool, rounds: int) -> TensorsCost:
    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        settings = StepSettings.model_validate({"optimizer": name, "foreach": foreach})
        optimizer = make_optimizer(parameters, settings)
        return lambda: _timed(clock, optimizer.step)

    return _over_sizes(f"{name}/{'foreach' if foreach else 'loop'}", make, rounds)


def _clip(clock: Clock, rounds: int) -> TensorsCost:
    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        return lambda: _timed(clock, lambda: nn.utils.clip_grad_norm_(parameters, 1e9))

    return _over_sizes("clip", make, rounds)


def _scaling(clock: Clock, rounds: int) -> TensorsCost:
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

    return _over_sizes("scaling", make, rounds)


def _accumulate(clock: Clock, rounds: int) -> TensorsCost:
    """What adding to a gradient takes more than taking it as it comes."""

    def make(parameters: Sequence[nn.Parameter]) -> Callable[[], float]:
        given = [torch.randn_like(p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]

        def add() -> None:
            for gradient, new in zip(gradients, given, strict=True):
                gradient.add_(new)

        return lambda: _timed(clock, add)

    return _over_sizes("accumulate", make, rounds)


def _zero_grad(clock: Clock, rounds: int = 9) -> TensorsCost:
    """Giving gradients' memory back."""

    def make(parameters: list[nn.Parameter]) -> Callable[[], float]:
        optimizer = make_optimizer(parameters, StepSettings())

        def run() -> float:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            return _timed(clock, lambda: optimizer.zero_grad(set_to_none=True))

        return run

    return _over_sizes("zero_grad", make, rounds)
