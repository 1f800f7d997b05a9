"""What the parts of the findings share: rows by pair, means, prose and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from math import sqrt
from statistics import mean, stdev

from bitwright import Leaderboard
from bitwright.bench.leaderboard import Row

TWINS = ("openvino", "onnxruntime")  # tables that say the same


def drops(rows: Iterable[Row], **named: object) -> list[float]:
    own = (row for row in rows if all(getattr(row, key) == value for key, value in named.items()))
    return [row.drop for row in own if row.drop is not None]


def show(values: list[float]) -> str:
    return "" if not values else f"{mean(values):.1f} ± {stdev(values) if len(values) > 1 else 0.0:.1f}"


def twice_error(values: list[float]) -> float:
    """Two standard errors of a mean."""
    return 2 * stdev(values) / sqrt(len(values))


def paired(rows: Iterable[Row], others: Iterable[Row], keys: tuple[str, ...]) -> list[tuple[Row, Row]]:
    """Rows that have a drop, with those of `others` that have the same keys."""
    found = {tuple(getattr(row, key) for key in keys): row for row in others if row.drop is not None}
    named = ((row, tuple(getattr(row, key) for key in keys)) for row in rows if row.drop is not None)
    return [(row, found[key]) for row, key in named if key in found]


def more(pairs: Iterable[tuple[Row, Row]]) -> list[float]:
    """By how many points the first of each pair loses more."""
    return [(one.drop or 0.0) - (other.drop or 0.0) for one, other in pairs]


def say(*words: str) -> str:
    return "\n" + textwrap.fill(" ".join(words), 120, break_long_words=False, break_on_hyphens=False)


def table(heads: Iterable[object], rows: Iterable[Iterable[object]], words: int = 1) -> Iterator[str]:
    heads = list(heads)
    yield ""
    yield f"| {' | '.join(map(str, heads))} |"
    yield f"|{'---|' * words}{'---:|' * (len(heads) - words)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def values_of(rows: Iterable[Row], key: str) -> list[object]:
    return list(dict.fromkeys(getattr(row, key) for row in rows))


def twins(board: Leaderboard, bits: object = None) -> tuple[int, int]:
    """Of how many pairs of rows that are done, openvino's and onnxruntime's, how many are the same."""
    own = [row for row in board.rows if bits in (None, row.bits)]
    one, other = ([row for row in own if row.backend == name] for name in TWINS)
    return alike(paired(one, other, ("algorithm", "bits", "model", "seed")))


def lsq_pairs(board: Leaderboard) -> list[tuple[Row, Row]]:
    """The same row by LSQ and by LSQ+."""
    one, other = ([row for row in board.rows if row.algorithm == name] for name in ("lsq", "lsqplus"))
    return paired(one, other, ("backend", "bits", "model", "seed"))


def alike(pairs: list[tuple[Row, Row]]) -> tuple[int, int]:
    """How many pairs have the same accuracy, of how many."""
    return sum(one.accuracy == other.accuracy for one, other in pairs), len(pairs)
