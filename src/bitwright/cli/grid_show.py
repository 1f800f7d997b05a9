"""`bitwright grid show`: the finished rows of a grid."""

from __future__ import annotations

from bitwright.cli.grid_run import BoardOption, FloatWeightsOption, GridArg, GridWorkloadOption, run_grid_file
from bitwright.cli.out import Out
from bitwright.cli.verb import verb


@verb(
    "grid show",
    examples="""
    bitwright grid show grid.yaml
    bitwright grid show grid.yaml -o leaderboard.json
    """,
)
def grid_show(
    out: Out,
    file: GridArg,
    workload: GridWorkloadOption = None,
    starts: FloatWeightsOption = None,
    output: BoardOption = None,
) -> None:
    """Show the results of a grid without running anything.

    Exits with 1 if a row failed or is pending, or if all rows were refused.
    """
    run_grid_file(out, file, workload, None, starts, output, None, work=False)
