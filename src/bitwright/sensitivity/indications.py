"""What `indicate` finds: how much each operator suffers in each format of its kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from bitwright.errors import BitwrightError, did_you_mean
from bitwright.files import write_text

_VERSION = 1
_FIX = "write it with `bitwright score WORKLOAD --indicator gradient-variance --formats int8 -o FILE`"


@dataclass(frozen=True, kw_only=True)
class Indications:
    """Ω(operator, format): planners add it up over operators. `float` is always 0."""

    indicator: str
    values: Mapping[str, Mapping[str, float]]
    samples: int
    #: CPU time of the whole run, for all operators and formats.
    seconds: float = 0.0

    def value(self, operator: str, format: str) -> float:
        """Of one operator in one format."""
        if operator not in self.values:
            fix = did_you_mean(operator, self.values)
            raise BitwrightError("this operator was not scored", value=operator, fix=fix)
        formats = self.values[operator]
        if format not in formats:
            fix = did_you_mean(format, formats)
            raise BitwrightError("not scored in this format", where=operator, value=format, fix=fix)
        return formats[format]

    def total(self, formats: Mapping[str, str]) -> float:
        """Of a choice of a format for each operator; operators that aren't named are float."""
        return sum(self.value(operator, format) for operator, format in formats.items())

    def sorted(self, format: str) -> list[tuple[str, float]]:
        """Operators with their value in this format, worst first; those without a kernel for it are left out."""
        known = [(name, found[format]) for name, found in self.values.items() if format in found]
        return sorted(known, key=lambda item: -item[1])

    def to_json(self) -> str:
        """As the file has it."""
        data = {
            "bitwright-indications": _VERSION,
            "indicator": self.indicator,
            "samples": self.samples,
            "seconds": self.seconds,
            "values": {name: dict(found) for name, found in self.values.items()},
        }
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str = "indications") -> Indications:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
            version = data["bitwright-indications"]
            values = {
                str(name): {str(format): float(value) for format, value in found.items()}
                for name, found in data["values"].items()
            }
            made = Indications(
                indicator=str(data["indicator"]),
                values=values,
                samples=int(data["samples"]),
                seconds=float(data.get("seconds", 0.0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BitwrightError(f"this is no file of indications: {error!r}", where=where, fix=_FIX) from error
        if version != _VERSION:
            fix = f"this version of Bitwright reads {_VERSION}"
            raise BitwrightError("unknown version of indications", where=where, value=version, fix=fix)
        _check(values, where)
        return made

    def save(self, path: str | Path) -> None:
        """Write the file."""
        write_text(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Indications:
        """Read a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise BitwrightError(f"can't read the indications: {error.strerror}", where=str(path), fix=_FIX) from None
        return Indications.from_json(text, where=str(path))


def _check(values: Mapping[str, Mapping[str, float]], where: str) -> None:
    wrong: Iterable[tuple[str, str, float]] = (
        (name, format, value)
        for name, found in values.items()
        for format, value in found.items()
        if not isfinite(value)
    )
    for name, format, value in wrong:
        raise BitwrightError("a value is no number", where=f"{where}: {name}: {format}", value=value, fix="score again")
