"""Simulate hours of training on thousands of devices: slow periods, failures, and what plans and adaptation gain.

A step is replayed for groups of equal devices, for all states of the cluster at once. Between two changes of the state,
all steps take equally long, so an hour costs as much as its number of changes, not its number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bitwright.cluster.cluster_cost_model import ClusterCostModel
from bitwright.cluster.cost_model import largest_batch
from bitwright.cluster.data_parallel import Lane
from bitwright.cluster.planners import Allocation, all_float, dynamic_batching, one_format, recover, recover_and_split
from bitwright.core.arguments import strict
from bitwright.core.display import BAR_HEIGHT, Chart, Progress, Summarized, Table, bar, svg
from bitwright.core.errors import BitwrightError

__all__ = ["Disruptions", "Policy", "PolicyResult", "Simulation", "period_of_states", "simulate_training"]

Array = NDArray[np.float64]
_BISECTIONS = 60


@strict
@dataclass(frozen=True, kw_only=True)
class Disruptions:
    """What happens to devices at random. Intervals have exponential distributions with these means."""

    slow_every_hours: float = 24.0
    """Between two slow periods of one device: another job, or a reduced clock."""
    slow_minutes: float = 20.0
    """The duration of a slow period."""
    slowdowns: tuple[float, ...] = (1.25, 1.5, 2.0)
    """The factors by which a slow device takes longer, all equally likely."""
    fails_every_hours: float = 20_000.0
    """Between two failures of one device. Its whole node leaves until it is repaired."""
    repair_minutes: float = 60.0
    restart_minutes: float = 3.0
    checkpoint_minutes: float = 20.0
    """Work since the last checkpoint is lost in a failure."""


@strict
@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a cluster is used: a planner, and whether batches follow the measured speed of each device.

    An adaptive policy splits the batch again every `interval_seconds`, from the speeds of devices that have been slow
    for at least this long. After a failure it continues without the node; other policies wait for its repair.
    """

    name: str
    planner: Callable[[ClusterCostModel], Allocation]
    adaptive: bool = False
    interval_seconds: float = 60.0
    switch_seconds: float = 1.0
    """What a change of the batches costs."""


POLICIES = (
    Policy(name="float", planner=all_float),
    Policy(name="one low format", planner=one_format),
    Policy(name="dynamic batching", planner=dynamic_batching),
    Policy(name="planned", planner=recover),
    Policy(name="planned and split", planner=recover_and_split),
    Policy(name="planned, split and adapted", planner=recover_and_split, adaptive=True),
)


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What one policy achieves."""

    name: str
    step: float
    """Seconds of a step without disruptions."""
    penalty: float
    rates: tuple[float, ...]
    """Samples per second for each seed, lost time included."""
    lost: tuple[float, ...]
    """The share of the time in which no work counts: failures, repairs, restarts."""

    def interval(self, relative_to: PolicyResult | None = None) -> tuple[float, float, float]:
        """The mean rate and its 95 % confidence interval; with another result, that of the ratio for equal seeds."""
        values = np.array(self.rates)
        if relative_to is not None:
            others = np.array(relative_to.rates)
            if not others.any():
                return float("nan"), float("nan"), float("nan")
            values = values / (others if others.all() else others.mean())  # a seed may leave no useful time
        mean = float(values.mean())
        if len(values) < 2:
            return mean, mean, mean
        half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
        return mean, mean - half, mean + half


@dataclass(frozen=True, kw_only=True)
class Simulation(Summarized):
    """The rates of all policies. The first one is the baseline."""

    results: tuple[PolicyResult, ...]
    devices: Mapping[str, int]
    hours: float
    disruptions: Disruptions

    @property
    def baseline(self) -> PolicyResult:
        """The first policy."""
        return self.results[0]

    def result(self, name: str) -> PolicyResult:
        """The result of a policy."""
        return next(one for one in self.results if one.name == name)

    def summary(self) -> Iterator[Table | str]:
        """One row for each policy."""
        rows = []
        for one in self.results:
            rate, (gain, low, high) = one.interval()[0], one.interval(self.baseline)
            row = (one.name, f"{1e3 * one.step:.1f} ms", f"{rate:,.0f}", f"{gain:.3f} ({low:.3f} to {high:.3f})")
            rows.append((*row, f"{100 * float(np.mean(one.lost)):.1f} %", f"{one.penalty:.3g}"))
        gains = f"#relative to {self.baseline.name} (95 %)"
        yield Table(["policy", "#step", "#samples/s", gains, "#lost time", "#penalty"], rows)
        yield f"{sum(self.devices.values()):,} devices, {self.hours:g} hours, {len(self.baseline.rates)} seeds"

    def plot(self) -> Chart:
        """The rate of each policy relative to the baseline, with 95 % confidence intervals."""
        gains = [(one.name, *one.interval(self.baseline)) for one in self.results]
        most = max(high for *_, high in gains)
        parts = []
        for index, (name, mean, low, high) in enumerate(gains):
            y = BAR_HEIGHT * index
            parts.append(bar(y, name, f"{mean:.2f} ({low:.2f} to {high:.2f})", mean / most, "quantized"))
            ends = (f"{100 * low / most:.2f}%", f"{100 * high / most:.2f}%")
            whisker = 'stroke="currentColor" stroke-width="2"'
            parts.append(f'<line x1="{ends[0]}" x2="{ends[1]}" y1="{y + 20.5}" y2="{y + 20.5}" {whisker}/>')
            parts += [f'<line x1="{x}" x2="{x}" y1="{y + 15}" y2="{y + 26}" {whisker}/>' for x in ends]
        label = f"Samples per second relative to {self.baseline.name}, with 95 % confidence intervals"
        return Chart(svg(parts, BAR_HEIGHT * len(gains), label))

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON-compatible data."""
        return {
            "devices": dict(self.devices),
            "hours": self.hours,
            "disruptions": asdict(self.disruptions),
            "policies": [{**asdict(one), "gain": one.interval(self.baseline)} for one in self.results],
        }


@strict
def simulate_training(
    costs: ClusterCostModel,
    *,
    hours: float = 8.0,
    seeds: int = 20,
    disruptions: Disruptions | None = None,
    policies: Sequence[Policy] = POLICIES,
    progress: Progress | None = None,
) -> Simulation:
    """Simulate the training of a cluster under several policies, with equal disruptions for all of them.

    `costs` has the profiles, the links and the penalties. The global batch stays the same in every step. Seeds are 0 to
    `seeds - 1`. Collectives keep their cost when a node is missing.
    """
    disruptions = disruptions or Disruptions()
    problems = [
        (name, value)
        for name, value in (("hours", hours), ("seeds", seeds), ("policies", len(policies)))
        if not value > 0
    ]
    if problems:
        name, value = problems[0]
        fix = "give a positive number"
        raise BitwrightError("nothing to simulate", where=name, value=value, fix=fix, code="invalid-value")
    fleets = [_Fleet(costs, policy) for policy in policies]
    rates: list[list[float]] = [[] for _ in fleets]
    lost: list[list[float]] = [[] for _ in fleets]
    for seed in range(seeds):
        if progress is not None:
            progress(seed, seeds, f"seed {seed}")
        events = _Events.draw(costs, disruptions, 3600 * hours, seed)
        for index, fleet in enumerate(fleets):
            rate, share = fleet.run(events, disruptions)
            rates[index].append(rate)
            lost[index].append(share)
    results = tuple(
        PolicyResult(
            name=fleet.policy.name,
            step=fleet.undisturbed,
            penalty=fleet.plan.penalty,
            rates=tuple(own),
            lost=tuple(share),
        )
        for fleet, own, share in zip(fleets, rates, lost, strict=True)
    )
    return Simulation(results=results, devices=dict(costs.kinds), hours=hours, disruptions=disruptions)


# -- the step ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """Groups of equal devices in many states: arrays of states × groups (× buckets)."""

    ready: Array
    computing: Array
    tail: Array
    contention: Array
    stretch: Array
    present: NDArray[np.bool_]

    @staticmethod
    def of(lanes: Sequence[Lane]) -> Groups:
        """One state with these lanes."""

        def row(values: Sequence[float]) -> Array:
            return np.array([values], dtype=np.float64)

        return Groups(
            ready=np.array([[lane.ready for lane in lanes]], dtype=np.float64),
            computing=row([lane.computing for lane in lanes]),
            tail=row([lane.tail for lane in lanes]),
            contention=row([lane.contention for lane in lanes]),
            stretch=row([lane.stretch for lane in lanes]),
            present=np.ones((1, len(lanes)), dtype=np.bool_),
        )


def period_of_states(groups: Groups, collectives: Sequence[float], first: float = 0.0) -> Array:
    """Seconds of a steady step in each state: `replay` of `data_parallel` for all states at once.

    >>> from bitwright.cluster.data_parallel import Lane, replay
    >>> lanes = [Lane("fast", (0.1,), 0.2, 0.01), Lane("slow", (0.3,), 0.4, 0.01)]
    >>> float(period_of_states(Groups.of(lanes), [0.2])[0]) == replay(lanes, [0.2]).period
    True
    """
    shape = groups.computing.shape
    starts, before, period = np.zeros(shape), np.zeros(shape[0]), np.zeros(shape[0])
    for number in range(3):  # devices finish at different times, and the next step starts there
        starts = _step(groups, collectives, first, starts)
        mark = _latest(starts, groups.present)
        period = mark - before if number else mark
        before = mark
    return period


def _latest(values: Array, present: NDArray[np.bool_]) -> Array:
    found: Array = np.max(np.where(present, values, -np.inf), axis=1)
    return found


def _step(groups: Groups, collectives: Sequence[float], first: float, starts: Array) -> Array:
    """The times at which devices finish a step."""
    time = np.maximum(starts, (_latest(starts, groups.present) + first)[:, None]) if first else starts
    work = np.zeros_like(time)
    through = np.zeros(time.shape[0])
    for bucket, seconds in enumerate(collectives):
        ready = time + np.maximum(0.0, groups.ready[:, :, bucket] - work)
        start = np.maximum(through, _latest(ready, groups.present))
        work = np.minimum(groups.computing, work + start[:, None] - time)
        through = start + _stretched(groups, work, seconds)
        slow = (through - start)[:, None] * (1.0 - groups.contention)
        time = np.broadcast_to(through[:, None], work.shape)
        work = np.minimum(groups.computing, work + slow)
    done = np.maximum(time + np.maximum(0.0, groups.computing - work), through[:, None])
    return done + groups.tail


def _stretched(groups: Groups, work: Array, seconds: float) -> Array:
    """The duration of a collective; it is longer while a device that sends messages also computes."""
    left = np.where(groups.present & (groups.stretch > 1), groups.computing - work, 0.0)
    if not (left > 0).any():
        return np.full(work.shape[0], seconds)
    ends = np.where(left > 0, left / (1.0 - groups.contention), 0.0)
    order = np.argsort(ends, axis=1)
    ends = np.take_along_axis(ends, order, axis=1)
    paces = np.take_along_axis(np.where(left > 0, groups.stretch, 1.0), order, axis=1)
    paces = np.maximum.accumulate(paces[:, ::-1], axis=1)[:, ::-1]  # the slowest device that still computes
    lengths = np.diff(ends, axis=1, prepend=0.0)
    sent = np.cumsum(lengths / paces, axis=1)
    before = np.concatenate([np.zeros((len(sent), 1)), sent[:, :-1]], axis=1)
    within = np.clip(seconds - before, 0.0, lengths / paces) * paces
    return np.asarray(within.sum(axis=1) + np.maximum(0.0, seconds - sent[:, -1]))


# -- what happens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Events:
    """Slow periods and failures of one seed. Times are in seconds."""

    end: float
    kinds: NDArray[np.int64]
    levels: NDArray[np.int64]
    """The index of the slowdown, from 1; 0 is full speed."""
    begins: Array
    ends: Array
    failures: tuple[tuple[float, int], ...]
    """Times, and kinds of the nodes that leave."""

    @staticmethod
    def draw(costs: ClusterCostModel, disruptions: Disruptions, end: float, seed: int) -> _Events:
        """Draw what happens to each device."""
        random = np.random.default_rng(seed)
        counts = np.array(list(costs.kinds.values()))
        owner = np.repeat(np.arange(len(counts)), counts)
        parts: list[tuple[Any, Any, Any]] = []
        every, lasts = 3600 * disruptions.slow_every_hours, 60 * disruptions.slow_minutes
        now = random.exponential(every, len(owner))
        running = now < end
        while running.any():  # one slow period of each device after the other
            until = now + random.exponential(lasts, len(owner))
            index = np.flatnonzero(running)
            parts.append((owner[index], now[index], until[index]))
            now = until + random.exponential(every, len(owner))
            running &= now < end
        if parts:
            kinds, begins, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
        else:
            kinds, begins, ends = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
        levels = random.integers(1, len(disruptions.slowdowns) + 1, len(kinds)) if len(kinds) else kinds
        number = random.poisson(len(owner) * end / (3600 * disruptions.fails_every_hours))
        times = np.sort(random.uniform(0, end, number))
        failed = tuple((float(time), int(owner[random.integers(len(owner))])) for time in times)
        return _Events(end, kinds, levels, begins, np.minimum(ends, end), failed)


class _Fleet:
    """A cluster under one policy."""

    def __init__(self, costs: ClusterCostModel, policy: Policy) -> None:
        self.policy, self.costs = policy, costs
        self.plan = policy.planner(costs)
        self.collectives, self.first = costs.collectives
        self.counts = np.array([float(count) for count in costs.kinds.values()])
        self.batches = np.array([float(self.plan.batches[kind]) for kind in costs.kinds])
        self.total = float(self.counts @ self.batches)
        lanes = [self._lanes(kind) for kind in costs.kinds]
        self.fixed, self.per_sample = (
            [np.array([getattr(pair[part], name) for pair in lanes]) for name in ("ready", "computing")]
            for part in (0, 1)
        )
        self.tail = np.array([pair[0].tail for pair in lanes])
        self.contention = np.array([pair[0].contention for pair in lanes])
        self.stretch = np.array([pair[0].stretch for pair in lanes])
        self.caps = np.array(
            [float(largest_batch(costs, kind, self.plan.plans[kind], int(self.total))) for kind in costs.kinds]
            if policy.adaptive
            else self.batches
        )
        nodes = costs.cluster.nodes
        self.per_node = float(nodes.devices) if nodes is not None else 1.0
        self.undisturbed = self.plan.seconds

    def _lanes(self, kind: str) -> tuple[Lane, Lane]:
        """The work of a device without samples, and that of each sample."""
        batch = self.plan.batches[kind]
        high = batch + max(1, batch // 2)
        a, b = (self.costs.lane(kind, self.plan.plans[kind], size) for size in (batch, high))

        def line(low: float, up: float) -> tuple[float, float]:
            slope = (up - low) / (high - batch)
            return low - slope * batch, slope

        ready = [line(x, y) for x, y in zip(a.ready, b.ready, strict=True)]
        computing = line(a.computing, b.computing)
        made = []
        for part in (0, 1):
            own = tuple(pair[part] for pair in ready)
            made.append(Lane(kind, own, computing[part], a.tail, a.contention, stretch=a.stretch))
        return made[0], made[1]

    def run(self, events: _Events, disruptions: Disruptions) -> tuple[float, float]:
        """Samples per second, and the share of lost time."""
        factors = np.array([1.0, *disruptions.slowdowns])
        control = np.arange(0.0, events.end, self.policy.interval_seconds) if self.policy.adaptive else np.zeros(1)
        outages, absences = self._failures(events, disruptions)
        marks = [control, events.begins, events.ends, *(np.array(pair) for pair in (*outages, *absences))]
        edges = np.unique(np.clip(np.concatenate([*marks, [0.0, events.end]]), 0.0, events.end))
        # devices by segment, kind, the level at which the batch was split, and the actual level
        counts = self._counts(events, edges, control, len(factors), absences)
        batches = self._split(counts, edges, control, factors)
        periods = self._periods(counts, batches, factors)
        lengths = np.diff(edges)
        middles = (edges[:-1] + edges[1:]) / 2
        works = np.ones(len(lengths), dtype=np.bool_)
        for begin, until in outages:
            works &= (middles < begin) | (middles > until)
        productive = float((lengths * works) @ (self.total / periods))
        if self.policy.adaptive:
            changed = np.any(np.diff(batches, axis=0) != 0, axis=(1, 2)) & works[1:]
            productive -= float((changed * self.policy.switch_seconds) @ (self.total / periods[1:]))
        return productive / events.end, 1.0 - float(lengths @ works) / events.end

    def _failures(
        self, events: _Events, disruptions: Disruptions
    ) -> tuple[list[tuple[float, float]], list[tuple[float, float, int]]]:
        """Intervals without useful work, and intervals in which a node is absent."""
        outages: list[tuple[float, float]] = []
        absences: list[tuple[float, float, int]] = []
        restart, every = 60 * disruptions.restart_minutes, 60 * disruptions.checkpoint_minutes
        for time, kind in events.failures:
            saved = time - time % every
            repaired = time + 60 * disruptions.repair_minutes
            if self.policy.adaptive:
                outages += [(saved, time + restart), (repaired, repaired + restart)]
                absences.append((time, repaired, kind))
            else:
                outages.append((saved, repaired + restart))
        return outages, absences

    def _counts(
        self,
        events: _Events,
        edges: Array,
        control: Array,
        levels: int,
        absences: Sequence[tuple[float, float, int]],
    ) -> Array:
        """Devices by segment, kind, known level and actual level."""
        segments = len(edges) - 1
        change = np.zeros((segments + 1, len(self.counts), levels, levels))
        kinds, own = events.kinds, events.levels

        def add(begins: Array, ends: Array, known: Any, actual: Any, sign: float, which: Any) -> None:
            some = np.flatnonzero(which & (ends > begins))
            known, actual = (np.broadcast_to(level, len(begins))[some] for level in (known, actual))
            for times, direction in ((begins, sign), (ends, -sign)):
                rows = np.searchsorted(edges, np.minimum(times[some], edges[-1]))
                np.add.at(change, (rows, kinds[some], known, actual), direction)

        every = np.ones(len(kinds), dtype=np.bool_)
        if self.policy.adaptive and len(kinds):
            later = np.append(control, events.end)
            interval = self.policy.interval_seconds
            seen = later[np.minimum(np.searchsorted(control, events.begins + interval), len(control))]
            gone = later[np.minimum(np.searchsorted(control, events.ends), len(control))]
            noticed = seen < events.ends
            add(events.begins, np.where(noticed, seen, events.ends), 0, own, 1.0, every)
            add(seen, events.ends, own, own, 1.0, noticed)
            add(events.ends, gone, own, 0, 1.0, noticed)
            add(events.begins, np.where(noticed, gone, events.ends), 0, 0, -1.0, every)
        elif len(kinds):
            add(events.begins, events.ends, 0, own, 1.0, every)
            add(events.begins, events.ends, 0, 0, -1.0, every)
        for begin, until, kind in absences:
            rows = np.searchsorted(edges, np.minimum([begin, until], edges[-1]))
            np.add.at(change, (rows, kind, 0, 0), [-self.per_node, self.per_node])
        counts = np.cumsum(change, axis=0)[:-1]
        counts[:, :, 0, 0] += self.counts
        return np.maximum(counts, 0.0)

    def _split(self, counts: Array, edges: Array, control: Array, factors: Array) -> Array:
        """The batch of a device, by segment, kind and known level."""
        shape = (len(counts), len(self.counts), len(factors))
        if not self.policy.adaptive:
            return np.broadcast_to(self.batches[None, :, None], shape)
        known = counts.sum(axis=3)
        fixed = (self.fixed[1] + self.tail)[None, :, None] * factors
        slope = self.per_sample[1][None, :, None] * factors
        low, high = np.zeros(len(counts)), np.full(len(counts), float((fixed + slope * self.total).max()))

        def fitting(seconds: Array) -> Array:
            sizes = np.floor((seconds[:, None, None] - fixed) / slope)
            return np.asarray(np.clip(sizes, 1.0, self.caps[None, :, None]))

        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            enough = (fitting(middle) * known).sum(axis=(1, 2)) >= self.total
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return fitting(high)

    def _periods(self, counts: Array, batches: Array, factors: Array) -> Array:
        """Seconds of a step in each segment."""
        slow = factors[None, None, None, :]
        sizes = batches[:, :, :, None]
        groups = len(self.counts) * len(factors) ** 2

        def flat(values: Array) -> Array:
            return np.ascontiguousarray(np.broadcast_to(values, counts.shape)).reshape(len(counts), groups)

        def column(values: Array) -> Array:
            return values[None, :, None, None]

        work = np.maximum(0.0, column(self.fixed[1]) + column(self.per_sample[1]) * sizes) * slow
        buckets = [
            flat(np.maximum(0.0, column(self.fixed[0][:, b]) + column(self.per_sample[0][:, b]) * sizes) * slow)
            for b in range(self.fixed[0].shape[1])
        ]
        present = flat(counts) > 0
        used = present.any(axis=0)  # most combinations of levels never occur
        ready = np.stack([one[:, used] for one in buckets], axis=2) if buckets else np.zeros((*present.shape, 0))
        state = Groups(
            ready=ready,
            computing=flat(work)[:, used],
            tail=flat(column(self.tail) * slow)[:, used],
            contention=flat(column(self.contention))[:, used],
            stretch=flat(column(self.stretch))[:, used],
            present=present[:, used],
        )
        return period_of_states(state, self.collectives, self.first)
