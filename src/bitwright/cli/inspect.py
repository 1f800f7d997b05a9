"""`bitwright inspect`: the operators of a model."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from bitwright.cli.options import WorkloadArg, open_workload, option
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


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
        int,
        option("Also record this many calibration batches, because code paths may differ.", min=0, show_default=True),
    ] = 0,
) -> None:
    """Show the operators of a model: names, shapes, parameters, multiply-accumulates."""
    from bitwright.graph import capture
    from bitwright.workload.data import calibration

    found = open_workload(out, workload)
    more = list(islice(calibration(found), batches)) if batches else []
    out.show(capture(found.model, found.inputs, *more))
