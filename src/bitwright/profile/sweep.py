"""`measure(variants)`: watch steps of a model under several plans by turns, until each operator has enough rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from bitwright.arguments import strict
from bitwright.attach import find_attachment
from bitwright.errors import BitwrightError
from bitwright.plan import Plan
from bitwright.profile.beyond import seen_beyond
from bitwright.profile.device import Host
from bitwright.profile.here import pauses
from bitwright.profile.repeat import undisturbed
from bitwright.profile.step import CLOCKS, Batch, Clock, Loss, StepSettings
from bitwright.profile.store import SampleStore
from bitwright.profile.watch import Key, Watch, WatchedStep
from bitwright.profile.way import Cast
from bitwright.profile.yardstick import yardstick

_WARM = 3  # compilers, lazily made state


@strict
@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model that is ready to train under one plan: float, or prepared and calibrated."""

    model: nn.Module
    plan: Plan = field(default_factory=Plan)
    settings: StepSettings = field(default_factory=StepSettings)

    def __post_init__(self) -> None:
        """A plan that isn't on the model would be measured as if it were."""
        if bool(find_attachment(self.model)) != self.plan.changes_models:
            raise BitwrightError(
                "the model isn't as the plan says", fix="prepare(model, plan) and calibrate it, or pass a Plan()"
            )


def measure(
    variants: Sequence[Variant],
    batch: Batch,
    loss: Loss,
    store: SampleStore,
    *,
    clock: Clock,
    rounds: int = 30,
    host: Host | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Cast]:
    """Fill the store; gives the kinds of casts that were met. Variants whose keys are all known aren't run again."""
    host = host or Host()
    running: list[tuple[Watch, WatchedStep]] = []
    casts: dict[str, Cast] = {}
    for variant in variants:
        variant.model.train()
        step = WatchedStep(variant.model, [batch], loss, variant.settings, clock=clock)
        watch = Watch(variant.model, variant.plan, variant.settings, CLOCKS[clock], host=host)
        keys = _look(watch, step, store)
        casts.update({cast.kind: cast for way in watch.ways.values() for cast in way.casts})
        if store.rounds(keys) < rounds:
            for _ in range(_WARM):
                step()
            running.append((watch, step))
    done = 0
    paused = pauses(clock)  # one step has a pause and the next has none: that isn't the watch's doing
    with undisturbed():
        while running:
            for watch, step in list(running):
                store.add({"yardstick": yardstick(CLOCKS[clock])})
                plain, sample = step.settled(), watch.run(step)  # another variant has run meanwhile
                beyond = None if paused else seen_beyond(watch, sample, plain)
                store.add_round(sample, wanted=rounds, beyond=beyond)
                if store.rounds(sample.calls) >= rounds:
                    running.remove((watch, step))
            done += 1
            if progress is not None:
                progress(min(done, rounds))
    return list(casts.values())


def _look(watch: Watch, step: WatchedStep, store: SampleStore) -> list[Key]:
    """One step for what is called and what is kept."""
    sample = watch.run(step, saving=True)
    if any(key not in store.saved for key in sample.saved):
        store.add_saved(sample)
    return list(sample.calls)
