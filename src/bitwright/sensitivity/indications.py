"""What `indicate` finds: how much each operator suffers in each format of its kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from bitwright.arguments import strict
from bitwright.documents import Strict, parse_json, read_text, validated
from bitwright.errors import BitwrightError, did_you_mean
from bitwright.files import write_text

_VERSION = 1
_FIX = "write it with `bitwright score WORKLOAD --indicator gradient-variance --formats int8 -o FILE`"

_Value = Annotated[float, Field(ge=0, le=1e30)]


class _File(Strict):
    """What a file may say. A sensitivity is a squared error or a variance: never negative."""

    version: Literal[1] = Field(alias="bitwright-indications")
    indicator: str
    samples: int = Field(ge=0, le=10**12)
    seconds: float = Field(default=0.0, ge=0, le=1e12)
    values: dict[str, dict[str, _Value]]


@strict
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
        data = parse_json(text, where=where, what="the indications", fix=_FIX)
        if isinstance(data, dict) and (version := data.get("bitwright-indications", _VERSION)) != _VERSION:
            fix = f"this version of Bitwright reads {_VERSION}"
            raise BitwrightError("unknown version of indications", where=where, value=version, fix=fix)
        file = validated(_File, data, title=f"{where} is no file of indications", fix=_FIX)
        return Indications(indicator=file.indicator, values=file.values, samples=file.samples, seconds=file.seconds)

    def save(self, path: str | Path) -> None:
        """Write the file."""
        write_text(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Indications:
        """Read a file."""
        return Indications.from_json(read_text(path, what="the indications", fix=_FIX), where=str(path))
