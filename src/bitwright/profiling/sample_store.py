"""The samples of a profile, in a file to which lines are appended, so that an interrupted run can resume."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from bitwright.core.documents import parse_json, read_bytes
from bitwright.core.errors import BitwrightError
from bitwright.core.files import writing
from bitwright.core.output_folder import locked
from bitwright.profiling.cost_key import is_loss
from bitwright.profiling.device_profile import (
    CastCost,
    CollectiveCost,
    Host,
    MemoryFacts,
    OperatorCost,
    OperatorTime,
    SavedTensors,
    TensorsCost,
)
from bitwright.profiling.step_timer import Key, Sample, TimerOverhead, middle_half, typical

VERSION = 1
_DRAWS = 400
_LOCK_SECONDS = 30.0


_Seconds = Annotated[float, Field(ge=-1e6, le=1e6)]


class _Line(BaseModel):
    """The schema of a line, apart from the facts."""

    model_config = ConfigDict(allow_inf_nan=False)
    round: list[tuple[str, str, _Seconds, _Seconds]] = []
    total: _Seconds | None = None
    beyond: tuple[_Seconds, _Seconds, _Seconds] | None = None  # the overhead of the timer
    yardstick: _Seconds | None = None
    engine: _Seconds | None = None
    saved: list[tuple[str, str, list[str], Annotated[int, Field(ge=0, le=2**50)]]] = []
    facts: dict[str, Any] = {}


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Validate facts, which are parts of a profile."""
    for name, fact in facts.items():
        kind, _, rest = name.partition(" ")
        if name in ("process", "compiler"):
            MemoryFacts.model_validate({name: fact})
        elif kind in ("host", "ddp"):
            Host.model_validate(fact)
        elif kind in ("tensors", "collectives"):
            model: Any = TensorsCost if kind == "tensors" else CollectiveCost
            TypeAdapter(list[model]).validate_python(fact)
        elif kind == "cast":
            CastCost.model_validate(fact)
        if kind == "ddp":
            int(rest.split()[-1] if rest else "")


class SampleStore:
    """Rounds of samples, and facts by name, as lines of JSON. An incomplete last line is dropped.

    Without a path, everything stays in memory. A file of another device or with other circumstances is rejected.
    """

    def __init__(self, path: Path | None = None, *, circumstances: dict[str, Any] | None = None) -> None:
        self.path = path
        self.circumstances = circumstances or {}
        self.samples: dict[Key, list[tuple[float, float, int]]] = defaultdict(list)
        """By key: forward seconds, backward seconds and the number of the round."""
        self.totals: list[float] = []
        """The total time of each round."""
        self.overhead: dict[int, tuple[float, float, float]] = {}
        """The overhead of the timer per call (see `TimerOverhead`), for rounds with a plain step next to them."""
        self.alike: dict[frozenset[Key], list[int]] = defaultdict(list)
        """Rounds by their set of operators: steps of one model under one plan."""
        self.saved: dict[Key, SavedTensors] = {}
        self.facts: dict[str, Any] = {}
        self.engine: list[float] = []
        self.yardsticks: list[float] = []
        if path is not None:
            with self._locked(path):
                if path.exists():
                    self._load(path)
                else:
                    self._append(self._head)

    @staticmethod
    def _locked(path: Path) -> AbstractContextManager[None]:
        """Lock the file, because several processes may add samples to it."""
        return locked(path.parent, name=path.name, wait=_LOCK_SECONDS)

    def _load(self, path: Path) -> None:
        raw = read_bytes(path, what="the samples", fix="delete the file to measure again")
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) != len(raw):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        if not whole:  # the process was killed before it wrote the first line
            self._append(self._head)
            return
        head, *lines = whole.splitlines()
        self._check(_parsed(head, path, 1))
        for number, line in enumerate(lines, start=2):
            data = _parsed(line, path, number)
            try:
                _Line.model_validate(data)
                _check_facts(data.get("facts", {}))
            except (ValueError, TypeError) as error:  # pydantic raises a ValueError
                raise _damaged(path, number, str(error).splitlines()[0]) from None
            self._take(data)

    @property
    def _head(self) -> dict[str, Any]:
        return {"bitwright_samples": VERSION, **self.circumstances}

    def _check(self, head: dict[str, Any]) -> None:
        wanted = self._head
        if head != wanted:
            wrong = next((key for key in wanted if head.get(key) != wanted[key]), "bitwright_samples")
            raise BitwrightError(
                f"these samples were taken under different circumstances ({wrong})",
                where=str(self.path),
                value=head.get(wrong),
                fix=f"this run has {wanted.get(wrong)!r}: use another file for it",
                code="samples-differ",
            )

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        with self._locked(self.path), writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _take(self, line: dict[str, Any]) -> None:
        if line.get("round"):
            number = len(self.totals)
            rows = line["round"]
            for text, format, forward, backward in rows:
                self.samples[(text, format)].append((forward, backward, number))
            self.alike[frozenset((row[0], row[1]) for row in rows)].append(number)
            if "beyond" in line:
                forward, backward, loss = line["beyond"]
                self.overhead[number] = (forward, backward, loss)
            self.totals.append(line.get("total") or sum(row[2] + row[3] for row in rows))
        if "yardstick" in line:
            self.yardsticks.append(line["yardstick"])
        if "engine" in line:
            self.engine.append(line["engine"])
        for text, format, ports, own in line.get("saved", ()):
            self.saved[(text, format)] = SavedTensors(ports=ports, own=own)
        self.facts.update(line.get("facts", {}))

    def add(self, line: dict[str, Any]) -> None:
        """Append a line and use its content."""
        self._append(line)
        self._take(line)

    def add_round(self, sample: Sample, *, wanted: int, overhead: TimerOverhead | None = None) -> None:
        """Add one step: the mean time of each key's calls. Keys that already have enough rounds are left out.

        `overhead` is the difference between this step and a plain step next to it.
        """
        keys = [key for key in sample.calls if len(self.samples[key]) < wanted]
        rows = [
            [*key, sample.forward.get(key, 0.0) / sample.calls[key], sample.backward.get(key, 0.0) / sample.calls[key]]
            for key in keys
        ]
        total = sum(sample.forward.get(key, 0.0) + sample.backward.get(key, 0.0) for key in keys)
        line: dict[str, Any] = {"round": rows, "total": total, "engine": sample.engine}
        if overhead is not None:
            line["beyond"] = [overhead.forward, overhead.backward, overhead.loss]
        self.add(line)

    def add_saved(self, sample: Sample) -> None:
        """Add the tensors that calls save for backward."""
        self.add({"saved": [[*key, sorted(saved.ports), saved.own] for key, saved in sample.saved.items()]})

    def rounds(self, keys: Iterable[Key]) -> int:
        """The number of rounds that all of these keys have."""
        return min((len(self.samples.get(key, ())) for key in keys), default=0)

    def costs(self) -> dict[Key, OperatorCost]:
        """Return the mean cost of each key over typical rounds, without the overhead of the timer."""
        found: dict[Key, OperatorCost] = {}
        weights, resampled, added = self._ordinary(), self._resampled(), self._added()
        for key, rows in self.samples.items():
            if rows:
                numbers = [number for *_, number in rows]
                forward, backward = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
                over, over_back = added[2 if is_loss(key[0]) else 0, numbers], added[1, numbers]
                counts = weights[numbers], resampled[:, numbers]
                found[key] = OperatorCost(
                    operator=key[0],
                    format=key[1],
                    forward=timing(forward - over, *counts),
                    backward=timing(backward - over_back, *counts) if backward.any() else None,
                    saved=self.saved.get(key),
                )
        return found

    def _added(self) -> np.ndarray:
        """The overhead per call in each round: forward, backward and loss.

        It is the typical value of all rounds with the same operators, because a single step may be disturbed.
        """
        found = np.zeros((3, len(self.totals)))
        for numbers in self.alike.values():
            known = [self.overhead[number] for number in numbers if number in self.overhead]
            if known:
                found[:, numbers] = [[typical(column)] for column in zip(*known, strict=True)]
        return found

    def _ordinary(self) -> np.ndarray:
        """The weight of each round: 1 for the middle half of equal rounds by total time, 0 for the others.

        Medians of parts don't add up to the median of the whole: a pause that hits a different operator in each step is
        in no operator's median. Means over these rounds add up to a typical step.
        """
        found = np.zeros(len(self.totals))
        for numbers in self.alike.values():
            found[middle_half(numbers, key=self.totals.__getitem__)] = 1.0
        return found

    def _resampled(self) -> np.ndarray:
        """The weights of bootstrap samples of the rounds.

        All rounds are drawn, because the middle half alone would underestimate the uncertainty of the mean.
        """
        chance = np.random.default_rng(0)
        found = np.zeros((_DRAWS, len(self.totals)))
        draws = np.arange(_DRAWS)[:, None]
        totals = np.asarray(self.totals)
        for numbers in map(np.asarray, self.alike.values()):
            drawn = numbers[chance.integers(0, len(numbers), (_DRAWS, len(numbers)))]
            cut = len(numbers) // 4
            order = np.argsort(totals[drawn], axis=1)[:, cut : len(numbers) - cut]
            np.add.at(found, (draws, np.take_along_axis(drawn, order, axis=1)), 1.0)
        return found


def timing(values: np.ndarray, counts: np.ndarray, resampled: np.ndarray) -> OperatorTime:
    """The weighted mean with its 95 % confidence interval.

    The interval comes from the bootstrap samples, or from the standard error of the weighted rounds if that is larger.
    The bootstrap gives no spread if each kind of round occurs only once.
    """
    repetitions = int(counts.sum())
    mean = max(0.0, float(values @ counts / repetitions))
    reach = 0.0
    if repetitions > 1:
        drawn = float(np.std(resampled @ values / resampled.sum(axis=1))) * sqrt(len(values) / (len(values) - 1))
        plain = float(np.std(values[counts > 0], ddof=1)) / sqrt(repetitions)
        reach = _student(repetitions - 1) * max(drawn, plain)
    return OperatorTime(seconds=mean, low=max(0.0, mean - reach), high=mean + reach, repetitions=repetitions)


def _student(freedom: int) -> float:
    """The approximate 97.5 % quantile of Student's t distribution.

    >>> round(_student(15), 2)
    2.13
    """
    freedom = max(1, freedom)
    return 1.96 + 2.372 / freedom + 2.82 / freedom**2


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = parse_json(line, where=str(path))
    except BitwrightError as error:
        raise _damaged(path, number, error.problems[0].what) from None
    if not isinstance(found, dict):
        raise _damaged(path, number, type(found).__name__)
    return found


def _damaged(path: Path, number: int, value: str) -> BitwrightError:
    return BitwrightError(
        "the samples are damaged",
        where=f"{path}, line {number}",
        value=value,
        fix="delete the file to measure again" if number == 1 else "delete this line; its samples are measured again",
        code="damaged-samples",
    )
