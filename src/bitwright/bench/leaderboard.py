"""The results of a grid: each row with its config, what was executed, and the accuracy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isclose
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

from pydantic import Field

from bitwright.core import display
from bitwright.core.arguments import strict
from bitwright.core.documents import name_problem, read_json
from bitwright.core.environment import Machine
from bitwright.core.errors import PlanError, Problem
from bitwright.core.files import write_text
from bitwright.core.formatting import counted
from bitwright.core.schemas import ResultModel, Strict, validated

LEADERBOARD_VERSION = 1
_MANY = 60  # with more rows, a summary has one line per algorithm and width
Status = Literal["done", "diverged", "refused", "failed", "pending"]


class _Strict(Strict, populate_by_name=True):
    pass


class ExecutedSites(ResultModel):
    """Sites with the same quantizer and format, read from the trained model."""

    quantizer: str = Field(description="The class: bitwright.quantizers.lsq.Lsq.")
    format: str = Field(description="The format, such as int4/channel/sym.")
    sites: int
    levels: int = Field(description="The largest number of different values for one scale.")


class Executed(ResultModel):
    """Quantizers, formats and folding, read from the trained model."""

    weights: tuple[ExecutedSites, ...]
    activations: tuple[ExecutedSites, ...]
    biases: int = Field(default=0, description="Biases on the grid of the integer accumulator.")
    folding: dict[str, int] = Field(
        default_factory=dict, description="Number of norms by folding strategy; empty: norms are not folded."
    )
    kept_float: dict[str, str] = Field(
        default_factory=dict, description="Operators that stayed in float, with the reason."
    )


class OnDevice(ResultModel):
    """The same model on the backend's runtime."""

    runtime: str
    accuracy: float | None = None
    gap: float | None = Field(default=None, description="Runtime minus simulated, in points.")
    kinds: dict[str, int] | None = Field(
        default=None, description="Number of products by the type that the runtime used; None: unknown."
    )
    reason: str | None = Field(default=None, description="The reason why there is no accuracy.")


class SiteFacts(NamedTuple):
    """The main figures of a site. In the file it is a list, to save space."""

    site: str
    format: str
    low: float  # the lowest number of the grid
    high: float
    clipped: float | None  # share of numbers outside of the grid
    sqnr_db: float | None


class Observers(_Strict):
    """Classes of observers with their number of sites, read from the trained model."""

    weights: dict[str, int]
    activations: dict[str, int]


class Result(_Strict):
    """The result of a row."""

    status: Status
    reason: str | None = Field(default=None, description="Why it isn't done; for a failed row, the last error.")
    metric: str | None = None
    accuracy: float | None = Field(default=None, description="Simulated, after the last epoch.")
    float_accuracy: float | None = Field(default=None, description="The accuracy of the initial float weights.")
    samples: int | None = Field(default=None, ge=0, le=2**53, description="The number of test samples.")
    device: OnDevice | None = None
    executed: Executed | None = None
    observers: Observers | None = None
    sites: tuple[SiteFacts, ...] = Field(
        default=(), description="Each: site, format, lowest and highest number of its grid, clipped share, SQNR in dB."
    )
    beyond: str | None = Field(
        default=None, description="The formats that were simulated although the backend can't run them."
    )
    notes: tuple[str, ...] = ()
    minutes: float | None = Field(default=None, ge=0, le=1e9)
    cpu_minutes: float | None = Field(default=None, ge=0, le=1e9)
    start: str | None = Field(default=None, description="The fingerprint of the float weights.")
    finished: str | None = Field(default=None, description="UTC, ISO 8601.")


class Row(Result):
    """One training: a model, an algorithm, a backend, a width and a seed."""

    id: str = Field(description="The hash of `config`.")
    model: str
    algorithm: str
    w_method: str
    a_method: str
    backend: str
    bits: int = Field(ge=1, le=32)
    seed: int = Field(ge=0, lt=2**63)
    attempts: int = Field(
        default=0, ge=0, le=10**6, description="The number of attempts that ended, with a result or an error."
    )
    machine: str | None = Field(default=None, description="A key of `machines`.")
    config: dict[str, Any] = Field(description="A grid with only this row, which `bitwright grid run` accepts.")
    float_trained: float | None = Field(
        default=None, description="The float network's accuracy after the same training, if drops refer to it."
    )

    @property
    def label(self) -> str:
        """The row in words."""
        return f"{self.model}, {self.algorithm}, {self.backend}, {self.bits} bits, seed {self.seed}"

    @property
    def drop(self) -> float | None:
        """Float minus quantized, in points. Both had the same training where that was measured."""
        reference = self.float_accuracy if self.float_trained is None else self.float_trained
        return None if self.accuracy is None or reference is None else reference - self.accuracy


class Spread(_Strict):
    """Mean and sample standard deviation (0 for one value)."""

    count: int = Field(ge=1, le=2**31)
    mean: float
    std: float = Field(ge=0)


class Summary(_Strict):
    """Statistics of all rows with these keys; None means all values of a key."""

    algorithm: str | None = None
    backend: str | None = None
    bits: int | None = None
    model: str | None = None
    accuracy: Spread | None = Field(default=None, description="Over rows that are done.")
    drop: Spread | None = Field(
        default=None, description="Float minus quantized, in points, which can be compared over models."
    )
    gap: Spread | None = Field(default=None, description="Runtime minus simulated, in points.")
    over_backends: float | None = Field(
        default=None, description="Deviation of the mean drops of backends: the effect of the hardware's scheme."
    )
    over_models: float | None = Field(default=None, description="Deviation of the mean drops of models.")
    rows: dict[str, int] = Field(description="The number of rows by status.")

    def cells(self) -> Sequence[object]:
        """The row of a table."""
        return (
            self.algorithm or "all",
            self.backend or "all",
            self.bits or "all",
            self.model or "all",
            spread_text(self.accuracy) if self.model else None,
            spread_text(self.drop),
            None if self.gap is None else f"{self.gap.mean:+.2f}",
            ", ".join(f"{count} {state}" for state, count in self.rows.items()),
        )


class FloatNet(_Strict):
    """The float network from which the rows of a model and a seed start."""

    model: str
    seed: int
    accuracy: float
    trained_on: float | None = Field(default=None, description="After as much training as a row, without quantizers.")
    start: str = Field(description="The fingerprint of its weights.")


@strict
class Leaderboard(display.Summarized, _Strict):
    """All rows of a grid, with means and deviations.

    >>> from tempfile import TemporaryDirectory
    >>> from bitwright.bench import GridConfig, run_grid
    >>> with TemporaryDirectory() as folder:
    ...     config = GridConfig(
    ...         models=["digits"], algorithms=["lsq"], backends=["academic"], bits=[4], store=f"{folder}/grid.db"
    ...     )
    ...     board = run_grid(config, work=False)
    ...     same = Leaderboard.load(board.save(f"{folder}/leaderboard.json"))
    >>> same.rows[0].status
    'pending'
    """

    version: Literal[1] = Field(default=1, alias="bitwright-leaderboard")
    name: str
    title: str = ""
    config_hash: str
    config: dict[str, Any] = Field(description="The grid with its defaults.")
    machines: dict[str, Machine]
    floats: tuple[FloatNet, ...] = ()
    drops_from: Literal["start", "trained"] = Field(
        default="start",
        description="start: the initial float weights; trained: the float weights after as much training as a row.",
    )
    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...] = Field(
        description="Each cell (algorithm, backend, bits, model) over seeds; then by algorithm and bits; "
        "by algorithm, backend and bits; by algorithm, bits and model; by backend, bits and model."
    )

    def __repr__(self) -> str:
        """One line: how many rows are done."""
        done = sum(row.status == "done" for row in self.rows)
        return f"<Leaderboard {self.name}: {done} of {len(self.rows)} rows done>"

    __str__ = __repr__

    def to_dict(self) -> dict[str, Any]:
        """All rows and summaries as plain data."""
        return self.model_dump(mode="json", by_alias=True)

    def summary(self) -> Iterator[display.Table | str]:
        """The mean accuracy of each cell, or of each algorithm and width if there are many rows."""
        whole = [one for one in self.summaries if None not in cell_of(one)]
        shown = self._by_algorithm() if len(self.rows) > _MANY else whole
        heads = ["algorithm", "backend", "#bits", "model", "#accuracy", "#below float", "#on the runtime", "rows"]
        yield display.Table(heads, [one.cells() for one in shown], title=self.title or self.name)
        for what, algorithm, backend, reason, count in reasons(self.rows):
            yield f"{what}: {algorithm}, {backend}, {counted(count, 'row')}: {short_reason(reason)}"
        states = Counter(row.status for row in self.rows)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        yield f"{counted(len(self.rows), 'row')}: {counts}; config {self.config_hash}"
        yield f"“below float” is below {drop_reference(self)}"

    def failures(self) -> list[str]:
        """Rows that failed or are pending, or that all rows were refused."""
        states = Counter(row.status for row in self.rows)
        if set(states) == {"refused"}:
            return ["all rows were refused"]
        return [f"{counted(states[state], 'row')} {state}" for state in ("failed", "pending") if states[state]]

    def _by_algorithm(self) -> list[Summary]:
        """Each algorithm at each width, over the places that all algorithms have; `rows` counts all rows."""
        shared = comparable(self.rows)
        found = []
        for one in self.summaries:
            if one.backend is None and one.model is None:
                own = [row for row in shared if (row.algorithm, row.bits) == (one.algorithm, one.bits)]
                made = summary(own, algorithm=one.algorithm, bits=one.bits)
                found.append(made.model_copy(update={"rows": one.rows}))
        return found

    def plot(self) -> display.Chart:
        """The mean drop of each algorithm at each width, over the places that all algorithms have."""
        bars = [
            (f"{one.algorithm}, {one.bits} bits", f"{spread_text(one.drop)} points", max(one.drop.mean, 0.0))
            for one in self._by_algorithm()
            if one.drop is not None
        ]
        return display.bar_chart(bars, label="Points below float")

    def save(self, path: str | Path) -> Path:
        """Write it as JSON with one row per line, so that diffs are readable."""
        data = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return write_text(Path(path), _lines({"bitwright-leaderboard": LEADERBOARD_VERSION, **data}))

    @staticmethod
    def load(path: str | Path) -> Leaderboard:
        """Read what `save` wrote."""
        fix = "make one: bitwright grid run grid.yaml"
        data = read_json(path, what="the leaderboard", fix=fix)
        board = validated(Leaderboard, data, title=f"{path} is not a leaderboard", fix=fix)
        problems = contradictions(board)
        if problems:
            raise PlanError(problems, title=f"{path} contradicts itself")
        return board


def contradictions(board: Leaderboard) -> list[Problem]:
    """Contradictions between rows and summaries of a file."""

    fix = "write it again: bitwright grid run grid.yaml"
    found: list[Problem] = []
    made = {cell_of(one): one for one in summaries(board.rows)}
    cells = {cell_of(one) for one in board.summaries}
    for row in board.rows:
        if (wrong := name_problem(row.id)) is not None:  # its report is in a folder of this name
            found.append(Problem(what=f"not an id: {wrong}", where="rows", value=row.id, fix=fix, code="unsafe-name"))
        if (row.algorithm, row.backend, row.bits, row.model) not in cells:
            what = "no summary counts this row"
            found.append(Problem(what=what, where=f"rows.{row.id}", fix=fix, code="contradiction"))
    for one in board.summaries:
        cell, own = cell_of(one), made.get(cell_of(one))
        where = "summaries." + "/".join(str(part) for part in cell if part is not None)
        if own is None or own.rows != one.rows or not all(map(_alike, _spreads(own), _spreads(one))):
            what = "the summary differs from the rows"
            found.append(Problem(what=what, where=where, value=one.rows, fix=fix, code="contradiction"))
    return found


def _spreads(one: Summary) -> tuple[Spread | None, ...]:
    return one.accuracy, one.drop, one.gap


def _alike(one: Spread | None, other: Spread | None) -> bool:
    if one is None or other is None:
        return one is other
    near = all(isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for a, b in ((one.mean, other.mean), (one.std, other.std)))
    return one.count == other.count and near


def _lines(data: dict[str, Any]) -> str:
    def compact(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    parts = []
    for key, value in data.items():
        if isinstance(value, list):
            inner = ",\n".join(compact(item) for item in value)
            parts.append(f"{compact(key)}:[\n{inner}\n]")
        else:
            parts.append(f"{compact(key)}:{compact(value)}")
    return "{" + ",\n".join(parts) + "}\n"


#: The keys of each kind of summary. It covers all values of the other keys.
_KEYS: tuple[tuple[str, ...], ...] = (
    ("algorithm", "backend", "bits", "model"),
    ("algorithm", "bits"),
    ("algorithm", "backend", "bits"),
    ("algorithm", "bits", "model"),
    ("backend", "bits", "model"),
)


def cell_of(one: Summary) -> tuple[str | None, str | None, int | None, str | None]:
    """The keys of a summary."""
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

    Other means would favour algorithms that are refused in difficult places. An algorithm without any accuracy at a
    width is ignored at that width.
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
    """A reason in one line; of a long text the end, which states the problem."""
    return reason if len(reason) <= 160 else f"… {reason[-150:]}"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and deviation of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(count=len(known), mean=mean(known), std=stdev(known) if len(known) > 1 else 0.0)


def _over(rows: Sequence[Row], key: Callable[[Row], str]) -> float | None:
    """The deviation of the mean drops of the groups by `key`; None if there are fewer than two groups."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.drop is not None:
            groups.setdefault(key(row), []).append(row.drop)
    return stdev(mean(group) for group in groups.values()) if len(groups) > 1 else None


def spread_text(value: Spread | None) -> str:
    """Mean and deviation; a single value has no deviation."""
    if value is None:
        return ""
    return f"{value.mean:.2f} ± {value.std:.2f}" if value.count > 1 else f"{value.mean:.2f}"


def drop_reference(board: Leaderboard) -> str:
    """The reference of the drops."""
    if board.drops_from == "trained":
        return "the float network after the same training without quantizers"
    return "the float weights that a row started from"
