"""A file is checked against a table of keys, and all problems come at once."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from bitwright.core.errors import PlanError
from bitwright.importers.key_table import Honoured, Marker, Named, Noted, Option, Rejected, Section, read, rows


class Crop(Option):
    """Cut out a part."""

    about: ClassVar[Marker] = Honoured("In order.")
    shorthand: ClassVar[str | None] = "size"
    size: Annotated[int, Field(ge=1), Honoured("Pixels.")]


class Flip(Option):
    """Mirror."""

    about: ClassVar[Marker] = Honoured("In order.")


class Record(Option):
    """A format of another framework."""

    about: ClassVar[Marker] = Rejected("can't be read", "convert it")


STEPS = {"Crop": Crop, "Flip": Flip, "Record": Record}


class Data(Section):
    batch: Annotated[int, Honoured("Samples.")] = 1
    workers: Annotated[int, Noted("Only speed.")] = 0
    steps: Annotated[tuple[Option, ...], Named(STEPS), Honoured("Steps.")] = ()
    kind: Annotated[tuple[Option, ...], Named(STEPS, most=1), Honoured("One.")] = ()


class Rule(Section):
    dtype: Annotated[str, Honoured("Type.")] = "int8"


class Table(Section):
    data: Data = Data()
    other: Data | None = None
    rules: dict[str, Rule] = Field(default_factory=dict)
    parts: tuple[Rule, ...] = ()
    pruning: Annotated[object, Rejected("no pruning", "prune first")] = None


def problems_of(data: object, **moved: str) -> dict[str | None, str | None]:
    with pytest.raises(PlanError) as caught:
        read(Table, data, title="t", moved={key.replace("__", "."): value for key, value in moved.items()})
    return {problem.where: problem.code for problem in caught.value.problems}


def test_everything_is_read_in_order() -> None:
    data = {
        "data": {"steps": {"Flip": None, "Crop": {"size": 3}}, "workers": 4},
        "other": {"workers": 2, "kind": {"Crop": 5}},
        "rules": {"a.b": {"dtype": "fp32"}, "c": None},
        "parts": [{"dtype": "x"}],
    }
    found = read(Table, data, title="t")
    assert [step.name for step in found.config.data.steps] == ["Flip", "Crop"]
    assert found.config.other is not None
    assert found.config.other.kind == (Crop(size=5),)
    assert found.config.rules["a.b"].dtype == "fp32"
    assert found.config.parts[0].dtype == "x"
    assert [(note.where, note.what) for note in found.notes] == [("data.workers, other.workers", "Only speed.")]


def test_a_section_without_a_value_is_empty() -> None:
    assert read(Table, {"data": None}, title="t").config == Table()


def test_all_problems_come_at_once_with_their_paths() -> None:
    data = {
        "dta": 1,
        "data": {"batch": "many", "steps": {"Crop": {"size": 0, "extra": 1}, "Flop": {}, "Record": {"any": 1}}},
        "rules": {"a": {"dtyp": 1}},
        "parts": [{"x": 1}],
        "pruning": {"a": 1},
    }
    assert problems_of(data) == {
        "dta": "unknown-key",
        "data.batch": "invalid-value",
        "data.steps.Crop.size": "invalid-value",
        "data.steps.Crop.extra": "unknown-key",
        "data.steps.Flop": "unknown-name",
        "data.steps.Record": "unsupported-key",
        "rules.a.dtyp": "unknown-key",
        "parts.0.x": "unknown-key",
        "pruning": "unsupported-key",
    }


def test_unknown_keys_have_the_nearest_names() -> None:
    with pytest.raises(PlanError) as caught:
        read(Table, {"data": {"bach": 1}}, title="t")
    assert "'batch'" in str(caught.value.problems[0].fix)


@pytest.mark.parametrize(
    ("data", "where"),
    [(3, None), ({"data": {"steps": [1]}}, "data.steps"), ({"data": {"kind": {"Flip": {}, "Crop": 1}}}, "data.kind")],
)
def test_other_types_are_told(data: object, where: str | None) -> None:
    assert where in problems_of(data)


def test_moved_keys_are_reported_where_they_were() -> None:
    assert problems_of({"data": {"steps": {"Crop": 0}}}, data__steps="old.steps") == {
        "old.steps.Crop.size": "invalid-value"
    }


def test_rows_list_every_key_with_its_handling() -> None:
    found = {row.key: row for row in rows(Table)}
    assert found["data.batch"].handling == "honoured"
    assert found["data.workers"].handling == "noted"
    assert (found["pruning"].handling, found["pruning"].advice) == ("rejected", "prune first")
    assert found["data.steps.Crop"].text == "Cut out a part. In order."
    assert found["data.steps.Crop.size"].text == "Pixels."
    assert found["data.steps.Record"].handling == "rejected"
    assert "rules.*.dtype" in found


def test_a_key_without_a_marker_is_a_mistake_of_ours() -> None:
    class Careless(Section):
        key: int = 1

    with pytest.raises(TypeError, match=r"Careless\.key"):
        list(rows(Careless))
