"""Words for figures of a leaderboard, as tables on the terminal, in Markdown and on the page have them."""

from __future__ import annotations

from bitwright.bench.leaderboard import Leaderboard, Spread


def counted(number: int, word: str) -> str:
    """A number with its noun.

    >>> counted(1, "row"), counted(2, "row")
    ('1 row', '2 rows')
    """
    return f"{number} {word}{'' if number == 1 else 's'}"


def spread_words(value: Spread | None) -> str:
    """Mean and deviation; one value has none."""
    if value is None:
        return ""
    return f"{value.mean:.2f} ± {value.std:.2f}" if value.count > 1 else f"{value.mean:.2f}"


def drop_words(board: Leaderboard) -> str:
    """What drops are measured from."""
    if board.drops_from == "trained":
        return "the float network after the same training without quantizers"
    return "the float weights that a row started from"
