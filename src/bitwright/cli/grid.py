"""`bitwright grid`: the group of verbs for grids of trainings."""

from __future__ import annotations

from bitwright.cli.app import group

group(
    "grid",
    help="Train every combination of algorithms, backends, bit widths, models and seeds (docs/grid.md).",
    verbs={
        "run": ("grid_run", "Run the rows of a grid that are not finished, and make the leaderboard."),
        "show": ("grid_show", "Show the finished rows of a grid."),
        "rerun": ("grid_rerun", "Run rows of a leaderboard again and compare the results."),
        "leaderboard": ("grid_leaderboard", "Write the leaderboard as an HTML page."),
    },
)
