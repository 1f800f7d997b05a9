"""Layers and blocks of a model, found in its recording: stretches of calls that are reconstructed together.

A cut is a place where a single tensor is all that the rest of the model will read of what parameters have had a part
in. What lies between two neighbouring cuts can't be taken apart: a residual block, an attention with its shortcut.
Stretches with one weight each (a chain) are taken together, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.graph import Source
from bitwright.graph.tape import Tape, tainted
from bitwright.ptq.work import Weight, Work

_PASSING = ("batch_norm", "relu", "relu6", "hardtanh", "leaky_relu", "prelu", "dropout", "gelu", "silu", "hardswish")


@dataclass(frozen=True, kw_only=True)
class Block:
    """The calls `start` to `stop` of a tape, whose result is `output`."""

    start: int
    stop: int
    output: Source
    weights: tuple[Weight, ...]

    @property
    def name(self) -> str:
        """Its first and last weight."""
        names = [weight.op.name for weight in self.weights]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def find_layers(work: Work) -> list[Block]:
    """One block for each weight, with the norm and the activation function behind it."""
    weights = work.weights()
    starts = {work.tape.position(weight.op.name) for weight in weights}
    return [_layer(work, weight, starts) for weight in weights]


def _layer(work: Work, weight: Weight, starts: set[int]) -> Block:
    start = end = work.tape.position(weight.op.name)
    source = Source("op", weight.op.name)
    while source not in work.graph.output_sources and len(readers := work.graph.consumers.get(source, ())) == 1:
        op = readers[0][0]
        if op.kind not in _PASSING or work.graph.partial(op):
            break
        position = work.tape.position(op.name)
        if any(start < other <= position for other in starts):  # another branch begins before this is read
            break
        end, source = position, Source("op", op.name)
    return Block(start=start, stop=end + 1, output=source, weights=(weight,))


def find_blocks(work: Work, chain: int) -> list[Block]:
    """Blocks that cover the whole model; at most `chain` weights of a chain in one."""
    tape = work.tape
    positions = {tape.position(weight.op.name): weight for weight in work.weights()}
    found: list[Block] = []
    open_: list[tuple[int, int, Source]] = []  # stretches that wait for company

    def close() -> None:
        weights = _between(positions, open_)
        if weights:
            found.append(Block(start=open_[0][0], stop=open_[-1][1], output=open_[-1][2], weights=weights))
            open_.clear()

    for stretch in _stretches(tape):
        inside = _between(positions, [stretch])
        here = _between(positions, open_)
        trails = not inside and all(call.op.kind in _PASSING for call in tape.calls[stretch[0] : stretch[1]])
        if here and not trails and (len(inside) > 1 or not inside or len(here) + len(inside) > chain):
            close()
        open_.append(stretch)
        if len(inside) > 1 and not _followed_by_passing(tape, stretch[1]):
            close()
    close()
    return found


def _followed_by_passing(tape: Tape, position: int) -> bool:
    return position < len(tape.calls) and tape.calls[position].op.kind in _PASSING


def _between(positions: dict[int, Weight], stretches: Sequence[tuple[int, int, Source]]) -> tuple[Weight, ...]:
    return tuple(
        weight for at, weight in sorted(positions.items()) if any(start <= at < stop for start, stop, _ in stretches)
    )


def _stretches(tape: Tape) -> list[tuple[int, int, Source]]:
    """Between neighbouring cuts, with what is read behind each."""
    relevant = tainted(tape.calls)
    alive: set[Source] = set()
    found: list[tuple[int, int, Source]] = []
    start = 0
    for position, call in enumerate(tape.calls, 1):
        if call.op.name in relevant:
            alive |= {Source("op", call.op.name, n) for n in range(len(call.op.outputs))}
        alive = {source for source in alive if tape.last_read.get(source, -1) >= position}
        last = position == len(tape.calls)
        if len(alive) == 1 or (last and alive):
            found.append((start, position, next(iter(alive)) if len(alive) == 1 else tape.outputs[0]))
            start = position
    return found
