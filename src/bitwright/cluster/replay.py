"""The global replay: devices with one lane for computing and one for collectives, joined by their buckets.

A collective starts when every device has its bucket and the one before is through: everybody waits for the slowest.
While one is under way, devices whose processors carry the messages compute slower. Only what happens is looked at (a
bucket is ready, a collective starts, it ends), so the cost grows with lanes times buckets, not with operators.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


def on_line(share: float, at: float, low: float, high: float) -> float:
    """Seconds of a batch `share` times the recorded one, which takes `high`, where `at` times takes `low`.

    >>> on_line(0.25, 0.5, 6.0, 10.0)
    4.0
    """
    return max(0.0, low + (share - at) / (1 - at) * (high - low))


@dataclass(frozen=True)
class Lane:
    """One device, or several that are the same: work in seconds of undisturbed computing from a step's start."""

    name: str
    ready: tuple[float, ...]
    """For each bucket, the work after which it is ready."""
    computing: float
    """All work up to backward's end."""
    tail: float
    """Work after the last collective: clipping, the optimizer."""
    contention: float = 0.0
    """Share of its speed that is lost while a collective is under way."""
    count: int = 1
    stretch: float = 1.0
    """How much longer a collective takes while this device computes."""
    kind: str = ""
    """The kind of device; lanes of one kind have names of their own where each device is replayed."""
    begun: float = 0.0
    """Work before the last batch's forward."""
    turned: float = 0.0
    """Work before its backward."""

    def of_batch(self, share: float, at: float, other: Lane) -> Lane:
        """With a batch `share` times as large: on the line through this lane and another, `at` times as large.

        Work after the collectives stays.
        """
        return replace(
            self,
            ready=tuple(on_line(share, at, low, high) for low, high in zip(other.ready, self.ready, strict=True)),
            begun=on_line(share, at, other.begun, self.begun),
            turned=on_line(share, at, other.turned, self.turned),
            computing=on_line(share, at, other.computing, self.computing),
        )


@dataclass(frozen=True)
class Sent:
    """One collective."""

    bucket: int
    start: float
    end: float
    waited_for: str
    """The lane that was last, or "" where the collective before was."""


@dataclass
class LaneReplay:
    """What one lane did: points (time, work) between which it went at one speed."""

    lane: Lane
    knots: list[tuple[float, float]] = field(default_factory=list)
    computed: float = 0.0
    """When backward was done."""
    finished: float = 0.0
    """When the step was."""

    def time_at(self, work: float) -> float:
        """When so much work was done."""
        index = bisect_left([point[1] for point in self.knots], work)  # when it was first reached
        if index == 0:
            return self.knots[0][0]
        if index == len(self.knots):
            time, done = self.knots[-1]
            return time + work - done
        (t0, w0), (t1, w1) = self.knots[index - 1], self.knots[index]
        return t0 + (work - w0) * (t1 - t0) / (w1 - w0) if w1 > w0 else t0


@dataclass
class StepReplay:
    """One step of all lanes."""

    lanes: list[LaneReplay]
    sent: list[Sent]
    start: float
    """When the first lane began, or what all do together before their forwards."""
    first: float = 0.0
    """Seconds of that."""
    period: float = 0.0


def replay(
    lanes: Sequence[Lane], collectives: Sequence[float], first: float = 0.0, *, overlap: bool = True
) -> StepReplay:
    """Replay until steps repeat themselves, and give the last one.

    `collectives` are the seconds of each bucket's; `first` those of what all do together before their forwards.
    Without `overlap` no collective starts before backward's end.
    """
    starts = [0.0] * len(lanes)
    before = None
    for _ in range(3):  # devices finish at different times: the second step starts from where the first left them
        step = _step(lanes, collectives, first, starts, overlap)
        starts = [lane.finished for lane in step.lanes]
        mark = max(starts)
        step.period = mark - before if before is not None else mark
        before = mark
    return step


def _step(
    lanes: Sequence[Lane], collectives: Sequence[float], first: float, starts: list[float], overlap: bool
) -> StepReplay:
    together = max(starts) + first if first else 0.0
    begun = [max(start, together) for start in starts]
    replays = [LaneReplay(lane, [(time, 0.0)]) for lane, time in zip(lanes, begun, strict=True)]
    sent: list[Sent] = []
    through = 0.0
    for bucket, seconds in enumerate(collectives):
        start, last = through, ""
        for run in replays:
            lane = run.lane
            time, work = run.knots[-1]
            ready = time + max(0.0, (lane.ready[bucket] if overlap else lane.computing) - work)
            if ready > start:
                start, last = ready, lane.name
        through = start + _stretched(replays, start, seconds)
        sent.append(Sent(bucket, start, through, last))
        for run in replays:
            _advance(run, start, through)
    for run in replays:
        time, work = run.knots[-1]
        left = run.lane.computing - work
        if left > 0:
            run.knots.append((time + left, run.lane.computing))
        run.computed = run.time_at(run.lane.computing)
        run.finished = max(run.computed, through) + run.lane.tail
    return StepReplay(replays, sent, min(begun) - first, first)


def _stretched(replays: Sequence[LaneReplay], start: float, seconds: float) -> float:
    """How long a collective takes that starts now: longer while somebody computes whose processor carries messages."""
    ends = []
    for run in replays:
        time, work = run.knots[-1]
        left = run.lane.computing - work - max(0.0, start - time)
        if left > 0 and run.lane.stretch > 1:
            ends.append((left / (1.0 - run.lane.contention), run.lane.stretch))
    at = 0.0
    for end, _ in sorted(ends):
        pace = max(stretch for other, stretch in ends if other >= end)
        if at + seconds * pace <= end:
            return at + seconds * pace
        seconds -= (end - at) / pace
        at = end
    return at + seconds


def _advance(run: LaneReplay, start: float, end: float) -> None:
    """Computing at full speed up to the collective's start, slower until its end, and no further than there is work."""
    whole, speed = run.lane.computing, 1.0 - run.lane.contention
    time, work = run.knots[-1]
    for until, rate in ((start, 1.0), (end, speed)):
        if until <= time:
            continue
        done = work + (until - time) * rate
        if done >= whole > work:
            run.knots.append((time + (whole - work) / rate, whole))
        work = min(done, whole)
        time = until
        run.knots.append((time, work))
