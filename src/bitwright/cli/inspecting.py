"""`bitwright inspect`: the operators of a model."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.data import calibration, open_workload
from bitwright.cli.options import WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.verb import verb

if TYPE_CHECKING:
    from bitwright.graph import Graph, Op


@verb(
    "inspect",
    examples="""
    bitwright inspect digits
    bitwright inspect my_workload.py:small --batches 4
    bitwright inspect digits --json > graph.json
    """,
)
def inspect(
    out: Out,
    workload: WorkloadArg,
    batches: Annotated[
        int, typer.Option(min=0, help="Record so many calibration batches too: paths of the code may differ.")
    ] = 0,
) -> None:
    """Show the operators of a model: names, shapes, parameters, multiply-accumulates."""
    from bitwright.graph import capture

    found = open_workload(out, workload)
    more = list(islice(calibration(found), batches)) if batches else []
    graph = capture(found.model, found.inputs, *more)
    if out.json:
        out.result(graph.to_json())
        return
    sizes = {name: _count(parameter.shape) for parameter in graph.parameters for name in parameter.names}
    out.table(
        ["operator", "kind", "inputs", "output", "#parameters", "#MACs", "partial"],
        [_row(op, graph, sizes) for op in graph.ops],
    )
    total = sum(_count(parameter.shape) for parameter in graph.parameters)
    out.say(f"{len(graph.ops)} operators, {total:,} parameters, {graph.macs:,} multiply-accumulates per call")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _row(op: Op, graph: Graph, sizes: dict[str, int]) -> list[str]:
    own = {s.name for port in op.ports for s in port.sources if s.kind == "param"}
    inputs = [port.shape for port in op.ports if port.role == "activation"]
    outputs = [output.shape for output in op.outputs]
    return [
        op.name,
        op.kind,
        " ".join(_shape(shape) for shape in inputs),
        " ".join(_shape(shape) for shape in outputs),
        f"{sum(sizes.get(name, 0) for name in own):,}" if own else "",
        f"{op.macs:,}" if op.macs else "",
        f"{op.seen} of {graph.runs} runs" if graph.partial(op) else "",
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(str(size) for size in shape) or "scalar"
