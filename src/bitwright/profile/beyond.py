"""What watching itself adds to a step: parts that were seen must add up to a step that nobody watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.profile.signature import is_loss
from bitwright.profile.watch import Key, Sample, Watch


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """Seconds by which a watched step shows more than a plain one takes: of each call, and of the loss.

    Reading clocks, finding names and leaving other things in the caches: little beside operators of a millisecond, a
    tenth of a step whose operators take 30 µs.
    """

    forward: float = 0.0
    backward: float = 0.0
    loss: float = 0.0


def seen_beyond(watch: Watch, sample: Sample, plain: Mapping[str, float]) -> Beyond:
    """What a watched step shows more, as a prediction would add it up, than a plain one took (its phases)."""
    host, batches = watch.host, watch.settings.accumulate
    loss = sum(seconds for (text, _), seconds in sample.forward.items() if is_loss(text))
    operators = {key: seconds for key, seconds in sample.forward.items() if not is_loss(key[0])}
    between = host.between(sample.operators, sample.hooked, prepared=watch.prepared)
    started = batches * host.start(sample.operators // batches)
    forward = sum(operators.values()) + between - plain["forward"]
    backward = sum(sample.backward.values()) + started - plain["backward"]
    return Beyond(
        forward=_per_call(operators, sample.calls, forward),
        backward=_per_call(sample.backward, sample.calls, backward),
        loss=(loss - plain["loss"]) / batches,
    )


def _per_call(times: Mapping[Key, float], calls: Mapping[Key, int], over: float) -> float:
    """The same for each call, so that together they give up so much, none of them more than it has.

    >>> _per_call({("a", ""): 6.0, ("b", ""): 1.0}, {("a", ""): 2, ("b", ""): 1}, 5.0)
    2.0
    """
    left, level = sum(calls[key] for key in times), 0.0
    for level, count in sorted((times[key] / calls[key], calls[key]) for key in times):
        if left * level >= over:
            return over / left
        over -= level * count
        left -= count
    return level
