"""Samples on their way to a profile: a file to which lines are added, so that a killed run goes on where it was."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.profile.device import Kept, OperatorCost, Timing
from bitwright.profile.repeat import middle_half
from bitwright.profile.watch import Key, Sample

VERSION = 1


class SampleStore:
    """Lines of JSON: rounds of samples, and facts by name. A last line that was cut off is dropped.

    Without a path everything stays in memory. Another device's file, or other circumstances, are refused.
    """

    def __init__(self, path: Path | None = None, *, circumstances: dict[str, Any] | None = None) -> None:
        self.path = path
        self.circumstances = circumstances or {}
        self.samples: dict[Key, list[tuple[float, float, int]]] = defaultdict(list)
        """Forward, backward, and in which round."""
        self.totals: list[float] = []
        """Of each round, all that was watched."""
        self.alike: dict[frozenset[Key], list[int]] = defaultdict(list)
        """Rounds of the same operators: steps of one model under one plan."""
        self.saved: dict[Key, Kept] = {}
        self.facts: dict[str, Any] = {}
        self.engine: list[float] = []
        self.yardsticks: list[float] = []
        if path is not None and path.exists():
            self._load(path)
        elif path is not None:
            self._append({"bitwright_samples": VERSION, **self.circumstances})

    def _load(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        head, *lines = [json.loads(line) for line in whole.splitlines()] or [{}]
        wanted = {"bitwright_samples": VERSION, **self.circumstances}
        if head != wanted:
            wrong = next((key for key in wanted if head.get(key) != wanted[key]), "bitwright_samples")
            raise BitwrightError(
                f"these samples were taken under other circumstances ({wrong})",
                where=str(path),
                value=head.get(wrong),
                fix=f"this run has {wanted.get(wrong)!r}: use another file for it",
            )
        if len(whole) != len(text):
            with path.open("r+b") as file:
                file.truncate(len(whole.encode()))
        for line in lines:
            self._take(line)

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
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
            self.totals.append(line.get("total") or sum(row[2] + row[3] for row in rows))
        if "yardstick" in line:
            self.yardsticks.append(line["yardstick"])
        if "engine" in line:
            self.engine.append(line["engine"])
        for text, format, ports, own in line.get("saved", ()):
            self.saved[(text, format)] = Kept(ports=ports, own=own)
        self.facts.update(line.get("facts", {}))

    def add(self, line: dict[str, Any]) -> None:
        """Keep a line, and have its contents at once."""
        self._append(line)
        self._take(line)

    def add_round(self, sample: Sample, *, wanted: int) -> None:
        """Keep one step: the mean of a key's calls. Keys that have enough rounds from other models stay as they are."""
        keys = [key for key in sample.calls if len(self.samples[key]) < wanted]
        rows = [
            [*key, sample.forward.get(key, 0.0) / sample.calls[key], sample.backward.get(key, 0.0) / sample.calls[key]]
            for key in keys
        ]
        total = sum(sample.forward.get(key, 0.0) + sample.backward.get(key, 0.0) for key in keys)
        self.add({"round": rows, "total": total, "engine": sample.engine})

    def add_saved(self, sample: Sample) -> None:
        """Keep what calls keep for backward."""
        self.add({"saved": [[*key, sorted(saved.ports), saved.own] for key, saved in sample.saved.items()]})

    def rounds(self, keys: Iterable[Key]) -> int:
        """How many rounds all of these keys have."""
        return min((len(self.samples.get(key, ())) for key in keys), default=0)

    def costs(self) -> dict[Key, OperatorCost]:
        """Means over ordinary rounds."""
        found: dict[Key, OperatorCost] = {}
        ordinary = self._ordinary()
        for key, rows in self.samples.items():
            if rows:
                kept = [row for row in rows if row[2] in ordinary]
                backward = [back for _, back, _ in kept]
                found[key] = OperatorCost(
                    operator=key[0],
                    format=key[1],
                    forward=mean_of([forward for forward, _, _ in kept]),
                    backward=mean_of(backward) if any(backward) else None,
                    saved=self.saved.get(key),
                )
        return found

    def _ordinary(self) -> set[int]:
        """The middle half of the rounds of each kind, by what a round took as a whole.

        Medians of parts don't add up to the median of the whole: a pause that hits some operator in each step is in no
        operator's median. Means do add up, and over these rounds they add up to an ordinary step.
        """
        found: set[int] = set()
        for numbers in self.alike.values():
            found.update(middle_half(numbers, key=self.totals.__getitem__))
        return found


def mean_of(values: list[float]) -> Timing:
    """The mean with its 95 % interval."""
    mean = statistics.fmean(values)
    reach = 1.96 * statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Timing(seconds=mean, low=max(0.0, mean - reach), high=mean + reach, repetitions=len(values))
