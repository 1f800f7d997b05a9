"""The model's operators as a drawing needs them: who feeds whom, and a place for each."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from bitwright.core.arguments import strict
from bitwright.core.documents import ResultModel
from bitwright.graph import Graph


class Node(ResultModel):
    """One operator."""

    name: str
    kind: str
    inputs: tuple[str, ...] = Field(description="Operators whose results it takes.")
    shape: tuple[int, ...] = Field(description="Of its first result.")
    macs: int
    level: int = Field(description="Steps from the inputs, along the longest way.")
    lane: int = Field(description="Its place among the operators of its level; 0 is the main road.")


@strict
def network(graph: Graph) -> tuple[Node, ...]:
    """The operators that depend on the input, each with its place in the drawing."""
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
    """(level, lane) of each operator; those that feed it come before it.

    An operator goes on in the lane of the producer on its longest way, or in the nearest free one: a chain is a
    straight line, and what branches off runs beside it.

    >>> lay_out([("a", ()), ("b", ("a",)), ("short", ("a",)), ("c", ("b",)), ("add", ("c", "short"))])
    {'a': (0, 0), 'b': (1, 0), 'short': (1, 1), 'c': (2, 0), 'add': (3, 0)}
    """
    places: dict[str, tuple[int, int]] = {}
    taken: set[tuple[int, int]] = set()
    for name, inputs in operators:
        # A producer that comes later would be a loop: recurrent code runs the same operator again.
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
