"""What the reference leaderboard says about the findings of the MQBench paper; every number is of its files.

    python benchmarks/leaderboard_findings.py

Reads results/leaderboard.json, leaderboard_why.json, leaderboard_ranges.json, leaderboard_folding.json,
leaderboard_zero_points.json and leaderboard_gaps.json (`make leaderboard` makes them), writes
results/leaderboard_findings.md. Judgements follow the numbers; what is told of the past, and of causes, was written for
the files that are kept: read it again after another run.
"""

from __future__ import annotations

import json
from pathlib import Path

from findings.causes import folding, starting_ranges, zero_points
from findings.paper import academic, head, per_tensor, schemes, winners
from findings.runtimes import gaps

from bitwright import Leaderboard

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    board = Leaderboard.load(RESULTS / "leaderboard.json")
    why = Leaderboard.load(RESULTS / "leaderboard_why.json")
    ranges = Leaderboard.load(RESULTS / "leaderboard_ranges.json")
    folds = json.loads((RESULTS / "leaderboard_folding.json").read_text(encoding="utf-8"))
    zeros = json.loads((RESULTS / "leaderboard_zero_points.json").read_text(encoding="utf-8"))
    parts = [
        head(board),
        schemes(board),
        academic(board),
        per_tensor(board),
        winners(board),
        folding(board, why, folds),
        starting_ranges(board, ranges),
        zero_points(board, zeros),
        gaps(board, json.loads((RESULTS / "leaderboard_gaps.json").read_text(encoding="utf-8"))),
    ]
    text = "\n".join(line for part in parts for line in part)
    (RESULTS / "leaderboard_findings.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
