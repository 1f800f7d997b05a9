"""A backend is a table: what a target can run, where its compiler wants quantizers, how it fuses."""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from bitwright.errors import BackendError, BitwrightError, PlanError, Problem
from bitwright.formats import Format
from bitwright.registry import BACKENDS

TABLE_VERSION = 2


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(_Strict):
    """The default format of weights or activations, and all that the target can run."""

    format: str
    formats: tuple[str, ...]
    observer: str = "minmax"
    quantizer: str = Field("plain", description="The target's arithmetic, where levels aren't evenly spaced.")

    @field_validator("format")
    @classmethod
    def _readable(cls, text: str) -> str:
        try:
            return str(Format.parse(text))
        except BitwrightError as error:
            raise ValueError(str(error)) from error

    def allows(self, format: Format) -> bool:
        """Whether the target can run this format."""
        return format.is_plain_float or any(fnmatch.fnmatchcase(str(format), p) for p in self.formats)


class Rule(_Strict):
    """Where one kind of operator wants quantizers."""

    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    when: Literal["always", "between-anchors", "fused"] = Field(
        "always",
        description="between-anchors: only where all inputs come from anchors (integer neighbours); "
        "fused: only where the target takes the operator into an anchor before it.",
    )
    unless: tuple[Literal["embedding", "broadcast"], ...] = Field(
        (), description="Float behind an embedding, or where an operand is broadcast (masks of attention)."
    )
    output: bool = Field(
        False, description="Quantize the (fused) output even if its readers are float: the target needs it."
    )
    float_operands: int = Field(
        0, description="How many operands stay float because the target fuses the add into the operator before."
    )
    shared: bool = Field(
        False, description="One grid for the operands and the output: the target moves codes without rescaling."
    )
    why: str = ""


class Guard(_Strict):
    """A limit on weight codes, and when it is needed."""

    name: str
    when: Literal["always", "saturating"]
    why: str


class BackendTable(_Strict):
    """One target."""

    schema_version: Literal[1, 2] = Field(
        alias="schema", description="2 added quantizer, unless, shared, when: fused, edges and artefacts."
    )
    name: str
    title: str
    runtime: str | None = None
    artefacts: tuple[str, ...] = Field(
        ("qdq",), min_length=1, description="What the target's tools read; the first is what `export` writes."
    )
    weights: Choice
    activations: Choice
    edges: int | None = Field(
        None, description="Bits of the first and the last operator with a weight where the others have fewer."
    )
    guard: Guard | None = None
    bias: Literal["int32", "float"] = "float"
    fold: tuple[str, ...] = Field((), description="Kinds of operators that take in the batch norm behind them.")
    operators: dict[str, Rule]
    transparent: tuple[str, ...] = Field(
        (), description="Kinds that only move or select values: the grid passes through them."
    )
    absorbed: dict[str, tuple[str, ...]] = Field(
        {}, description="Kinds that the target merges into these readers: quantize before them, not after."
    )
    anchors: tuple[str, ...] = Field((), description="Kinds after which numbers are integers on the target.")
    passing: tuple[str, ...] = Field(
        (), description="Kinds that the target fuses behind an anchor (activation functions, the folded norm)."
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a table."""
    schema = BackendTable.model_json_schema()
    identity = f"bitwright-backend-{TABLE_VERSION}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": identity, **schema}


def load_table(path: Path) -> BackendTable:
    """Read a table from a YAML file."""
    try:
        data: Any = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        return BackendTable.model_validate(data)
    except (OSError, UnicodeDecodeError) as error:
        raise BackendError(f"can't read the backend table: {error}", where=str(path)) from error
    except YAMLError as error:
        raise BackendError(f"not valid YAML: {error}", where=str(path), fix="mend the file") from error
    except ValidationError as error:
        problems = [
            Problem(what=e["msg"], where=".".join(str(part) for part in e["loc"]), value=e["input"])
            for e in error.errors()
        ]
        raise PlanError(problems, title=f"the backend table {path} has problems") from error


def backend(name: str | BackendTable) -> BackendTable:
    """A backend by registered name, or from the user's own table file (`path.yaml`)."""
    if isinstance(name, BackendTable):
        return name
    if name.endswith((".yaml", ".yml")):
        return load_table(Path(name))
    table: BackendTable = BACKENDS.get(name)()
    return table


if __name__ == "__main__":  # python -m bitwright.backends.table > docs/schemas/backend-2.json
    sys.stdout.write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
