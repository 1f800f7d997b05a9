"""Rows taken together: over seeds, over backends, over models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, stdev

from bitwright.bench.leaderboard import Row, Spread, Summary

#: Which keys a summary names; it is taken over all others.
_KEYS: tuple[tuple[str, ...], ...] = (
    ("algorithm", "backend", "bits", "model"),
    ("algorithm", "bits"),
    ("algorithm", "backend", "bits"),
    ("algorithm", "bits", "model"),
    ("backend", "bits", "model"),
)


def cell_of(one: Summary) -> tuple[str | None, str | None, int | None, str | None]:
    """What a summary is about."""
    return one.algorithm, one.backend, one.bits, one.model


def summaries(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """All summaries, in the order of the rows."""
    made = []
    for keys in _KEYS:
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(getattr(row, key) for key in keys), []).append(row)
        made += [summary(group, **dict(zip(keys, values, strict=True))) for values, group in groups.items()]
    return tuple(made)


def summary(rows: Sequence[Row], **named: object) -> Summary:
    """One summary of these rows."""
    return Summary(
        accuracy=spread(row.accuracy for row in rows),
        drop=spread(row.drop for row in rows),
        gap=spread(row.device.gap for row in rows if row.device is not None),
        over_backends=None if "backend" in named else _over(rows, lambda row: row.backend),
        over_models=None if "model" in named else _over(rows, lambda row: row.model),
        rows=dict(Counter(row.status for row in rows)),
        **named,  # type: ignore[arg-type]  # keys are fields of Summary
    )


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Rows at places (bits, backend, model, seed) where all algorithms have an accuracy.

    A mean over other places would flatter whoever is refused where it is hard. An algorithm that has no accuracy at a
    width is in no comparison there.
    """
    having: dict[int, set[str]] = {}
    places: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        if row.accuracy is not None:
            having.setdefault(row.bits, set()).add(row.algorithm)
            places.setdefault(_place(row), set()).add(row.algorithm)
    return [row for row in rows if row.accuracy is not None and places[_place(row)] == having[row.bits]]


def _place(row: Row) -> tuple[object, ...]:
    return row.bits, row.backend, row.model, row.seed


def reasons(rows: Iterable[Row]) -> list[tuple[str, str, str, str, int]]:
    """Why rows have no accuracy, or none on the runtime: what, algorithm, backend, reason, how many."""
    why: Counter[tuple[str, str, str, str]] = Counter()
    for row in rows:
        if row.status in ("refused", "diverged", "failed"):
            why[row.status, row.algorithm, row.backend, row.reason or ""] += 1
        if row.device is not None and row.device.reason is not None:
            why["not on the runtime", row.algorithm, row.backend, row.device.reason] += 1
    return [(*key, count) for key, count in sorted(why.items())]


def short_reason(reason: str) -> str:
    """A reason for a line: of a long list of sites the end, which says what is wrong there."""
    return reason if len(reason) <= 160 else f"… {reason[-150:]}"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and deviation of what there is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(count=len(known), mean=mean(known), std=stdev(known) if len(known) > 1 else 0.0)


def _over(rows: Sequence[Row], key: Callable[[Row], str]) -> float | None:
    """The deviation of the mean drops of what `key` tells apart; None if there are fewer than two."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.drop is not None:
            groups.setdefault(key(row), []).append(row.drop)
    return stdev(mean(group) for group in groups.values()) if len(groups) > 1 else None
