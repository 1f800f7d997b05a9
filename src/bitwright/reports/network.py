"""The operators of a model with their connections and their positions in the drawing."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from bitwright.core.arguments import strict
from bitwright.core.schemas import ResultModel
from bitwright.graph import Graph


class Node(ResultModel):
    """One operator."""

    name: str
    kind: str
    inputs: tuple[str, ...] = Field(description="Operators that produce its inputs.")
    shape: tuple[int, ...] = Field(description="Of its first result.")
    macs: int
    level: int = Field(description="Length of the longest path from the inputs.")
    lane: int = Field(description="Its position among the operators of its level; 0 is the main path.")


@strict
def network(graph: Graph) -> tuple[Node, ...]:
    """The operators that depend on the input, with their positions in the drawing."""
    ops = [op for op in graph.ops if not op.constant]
    known = {op.name for op in ops}
    inputs = {
        op.name: tuple(dict.fromkeys(s.name for p in op.ports for s in p.sources if s.kind == "op" and s.name in known))
        for op in ops
    }
    places = lay_out([(op.name, inputs[op.name]) for op in ops])
    return tuple(
        Node(
            name=op.name,
            kind=op.kind,
            inputs=inputs[op.name],
            shape=op.outputs[0].shape if op.outputs else (),
            macs=op.macs,
            level=places[op.name][0],
            lane=places[op.name][1],
        )
        for op in ops
    )


def lay_out(operators: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, tuple[int, int]]:
    """Assign (level, lane) to each operator. Producers come before their consumers.

    An operator takes the lane of the producer on its longest path, or the nearest free lane. A chain is therefore a
    straight line, and branches run parallel to it.

    >>> lay_out([("a", ()), ("b", ("a",)), ("short", ("a",)), ("c", ("b",)), ("add", ("c", "short"))])
    {'a': (0, 0), 'b': (1, 0), 'short': (1, 1), 'c': (2, 0), 'add': (3, 0)}
    """
    places: dict[str, tuple[int, int]] = {}
    taken: set[tuple[int, int]] = set()
    for name, inputs in operators:
        # A producer that comes later is a loop of recurrent code; it is ignored.
        before = [places[producer] for producer in inputs if producer in places]
        level = 1 + max((place[0] for place in before), default=-1)
        wanted = next((lane for above, lane in before if above == level - 1), 0)
        lane = next(
            n for step in range(len(taken) + 2) for n in (wanted + step, wanted - step) if _free(level, n, taken)
        )
        places[name] = (level, lane)
        taken.add((level, lane))
    return places


def _free(level: int, lane: int, taken: set[tuple[int, int]]) -> bool:
    return lane >= 0 and (level, lane) not in taken
