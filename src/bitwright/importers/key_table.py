"""Tables of the keys of other systems' files, and the walk that checks a file against such a table.

A table is a pydantic model. Each field has one marker in its annotation: `Honoured`, `Noted`, `InCode` or `Rejected`.
The same markers give the rows that `bitwright list` and the migration pages show, so documentation and behaviour can't
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.schemas import Strict, problems_of

__all__ = [
    "Honoured",
    "Imported",
    "InCode",
    "KeyRow",
    "Named",
    "Noted",
    "Option",
    "Rejected",
    "Section",
    "read",
    "rows",
]

Handling = Literal["honoured", "noted", "in code", "rejected"]


@dataclass(frozen=True)
class Honoured:
    """The key changes the result as it does in the other system."""

    meaning: str


@dataclass(frozen=True)
class Noted:
    """The key can't change the result. It is accepted and reported once."""

    reason: str


@dataclass(frozen=True)
class InCode:
    """The file is read, but it only runs if this part is replaced by an object in Python."""

    reason: str


@dataclass(frozen=True)
class Rejected:
    """The key is an error."""

    reason: str
    advice: str


Marker = Honoured | Noted | InCode | Rejected


class Section(Strict):
    """A mapping with known keys."""

    model_config = ConfigDict(populate_by_name=True)


class Option(Section):
    """The options of one name, such as one transform of a pipeline."""

    about: ClassVar[Marker]
    """What this name means."""
    shorthand: ClassVar[str | None] = None
    """The option that a single value sets: `topk: 1` means `topk: {k: 1}`."""

    @property
    def name(self) -> str:
        """The name in the file."""
        return type(self).__name__


@dataclass(frozen=True)
class Named:
    """A mapping of names to their options, in the order of the file: `{Resize: {size: 256}, ToTensor: {}}`."""

    options: Mapping[str, type[Option]]
    most: int | None = None
    """How many names a file may give; None: any number."""


ModelT = TypeVar("ModelT", bound=Section)


@dataclass(frozen=True, kw_only=True)
class Imported(Generic[ModelT]):
    """A file of another system that was read completely."""

    config: ModelT
    notes: tuple[Problem, ...] = ()
    """Keys that were accepted and don't change the result: one entry per reason."""


@dataclass(frozen=True, kw_only=True)
class KeyRow:
    """One key of a table."""

    key: str
    handling: Handling
    text: str
    advice: str = ""


@dataclass
class _Findings:
    problems: list[Problem] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)


def read(
    model: type[ModelT],
    data: Any,
    *,
    title: str,
    moved: Mapping[str, str] | None = None,
) -> Imported[ModelT]:
    """Check a document against a table. All problems are raised together.

    `moved` maps the paths of keys that an older layout has elsewhere to their paths in the file.
    """
    found = _Findings()
    config = _read(model, data, "", found)
    if found.problems or config is None:
        raise PlanError([_at_origin(problem, moved or {}) for problem in found.problems], title=title)
    notes = [
        Problem(what=reason, where=", ".join(_origin(path, moved or {}) for path in paths), code="no-effect")
        for reason, paths in found.notes.items()
    ]
    return Imported(config=config, notes=tuple(notes))


def _read(model: type[ModelT], data: Any, path: str, found: _Findings) -> ModelT | None:
    if not isinstance(data, Mapping):
        found.problems.append(Problem(what="must be a mapping", where=path or None, value=data, code="not-a-mapping"))
        return None
    before = len(found.problems)
    cleaned = _walk(model, data, path, found)
    try:
        made = model.model_validate(cleaned)
    except ValidationError as error:
        for problem in problems_of(error, model):
            where = _join(path, problem.where or "")
            plain = "must be a mapping" if "valid dictionary" in problem.what else problem.what
            found.problems.append(replace(problem, where=where, what=plain.removeprefix("Value error, ")))
        return None
    return made if len(found.problems) == before else None


def _walk(model: type[Section], data: Mapping[str, Any], path: str, found: _Findings) -> dict[str, Any]:
    """The data that pydantic should validate: without unknown and rejected keys, with named options as objects."""
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    cleaned: dict[str, Any] = {}
    for key, value in data.items():
        place = _join(path, key)
        info = fields.get(key)
        if info is not None and isinstance(_marker(info), Rejected) and value in (None, [], {}):
            continue  # an empty value asks for nothing
        if info is not None and value is None and not info.is_required():
            continue  # `key:` without a value: the default
        if info is None:
            fix = did_you_mean(key, fields)
            found.problems.append(Problem(what="unknown key", where=place, fix=fix, code="unknown-key"))
            continue
        if not _report(_marker(info), place, value, found):
            continue
        cleaned[key] = _value(info, value, place, found)
    return cleaned


def _report(marker: Marker | None, place: str, value: Any, found: _Findings) -> bool:
    """Record a note or a rejection. The result is whether to read the value."""
    if isinstance(marker, Rejected):
        shown = value if isinstance(value, str | int | float) else None
        found.problems.append(
            Problem(what=marker.reason, where=place, value=shown, fix=marker.advice, code="unsupported-key")
        )
        return False
    if isinstance(marker, Noted):
        found.notes.setdefault(marker.reason, []).append(place)
    return True


def _value(info: FieldInfo, value: Any, place: str, found: _Findings) -> Any:
    named = next((item for item in info.metadata if isinstance(item, Named)), None)
    if named is not None:
        return _options(named, {} if value is None else value, place, found)
    inner, container = _section(info.annotation)
    if inner is None:
        return value
    if container is dict and isinstance(value, Mapping):
        return {key: _inner(inner, item, _join(place, key), found) for key, item in value.items()}
    if container is tuple and isinstance(value, list):
        return [_inner(inner, item, f"{place}.{index}", found) for index, item in enumerate(value)]
    return _inner(inner, value, place, found) if container is None else value


def _inner(model: type[Section], value: Any, place: str, found: _Findings) -> Any:
    if value is None:
        return {}  # YAML's `key:` without a value
    return _walk(model, value, place, found) if isinstance(value, Mapping) else value


def _options(named: Named, value: Any, place: str, found: _Findings) -> tuple[Option, ...]:
    if not isinstance(value, Mapping):
        fix = f"write one of: {', '.join(named.options)}"
        found.problems.append(
            Problem(what="must be a mapping", where=place, value=value, fix=fix, code="not-a-mapping")
        )
        return ()
    if named.most is not None and len(value) > named.most:
        fix = f"give {named.most}"
        found.problems.append(
            Problem(what="too many names", where=place, value=list(value), fix=fix, code="invalid-value")
        )
    made: list[Option] = []
    for name, options in value.items():
        where = _join(place, name)
        model = named.options.get(name)
        if model is None:
            fix = did_you_mean(name, named.options)
            found.problems.append(Problem(what="unknown name", where=where, fix=fix, code="unknown-name"))
            continue
        if not _report(model.about, where, None, found):
            continue
        if not isinstance(options, Mapping) and options is not None and model.shorthand is None:
            known = ", ".join(info.alias or key for key, info in model.model_fields.items())
            fix = f"write its options as a mapping: {known}" if known else "write {}: it has no options"
            found.problems.append(
                Problem(what="must be a mapping", where=where, value=options, fix=fix, code="not-a-mapping")
            )
            continue
        if model.shorthand is not None and not isinstance(options, Mapping) and options is not None:
            options = {model.shorthand: options}
        option = _read(model, {} if options is None else options, where, found)
        if option is not None:
            made.append(option)
    return tuple(made)


def _marker(info: FieldInfo) -> Marker | None:
    return next((item for item in info.metadata if isinstance(item, Marker)), None)


def _section(annotation: Any) -> tuple[type[Section] | None, type | None]:
    """The section in an annotation such as `X | None`, `dict[str, X]` or `tuple[X, ...]`, and its container."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, None
    origin = get_origin(annotation)
    for part in get_args(annotation):
        inner, container = _section(part)
        if inner is not None:
            return inner, origin if origin in (dict, tuple) else container
    return None, None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key else path or key


def _origin(path: str, moved: Mapping[str, str]) -> str:
    """The path of a key in the file."""
    for new in sorted(moved, key=len, reverse=True):
        if path == new or path.startswith(f"{new}."):
            return moved[new] + path[len(new) :]
    return path


def _at_origin(problem: Problem, moved: Mapping[str, str]) -> Problem:
    return problem if problem.where is None else replace(problem, where=_origin(problem.where, moved))


def rows(model: type[Section], path: str = "", *, seen: dict[Any, str] | None = None) -> Iterator[KeyRow]:
    """All keys of a table. `*` is any name.

    With `seen={}`, a section that occurs several times is listed once; the other places refer to it.
    """
    for name, info in model.model_fields.items():
        place = _join(path, info.alias or name)
        marker = _marker(info)
        named = next((item for item in info.metadata if isinstance(item, Named)), None)
        inner, container = _section(info.annotation)
        if marker is not None:
            yield _row(place, marker)
        if named is not None:
            for own, option in named.options.items():
                yield _named_row(f"{place}.{own}", option)
                if isinstance(option.about, Honoured | Noted):
                    yield from rows(option, f"{place}.{own}", seen=seen)
        elif inner is not None and not isinstance(marker, Rejected | Noted):
            below = place if container is None else f"{place}.*"
            if seen is None or inner not in seen:
                if seen is not None:
                    seen[inner] = below
                yield from rows(inner, below, seen=seen)
            else:
                yield KeyRow(key=f"{below}.…", handling="honoured", text=f"As `{seen[inner]}`.")
        elif marker is None:
            raise TypeError(f"{model.__name__}.{name} has no marker")


def _row(place: str, marker: Marker) -> KeyRow:
    if isinstance(marker, Honoured):
        return KeyRow(key=place, handling="honoured", text=marker.meaning)
    if isinstance(marker, Noted):
        return KeyRow(key=place, handling="noted", text=marker.reason)
    if isinstance(marker, InCode):
        return KeyRow(key=place, handling="in code", text=f"{marker.reason[0].upper()}{marker.reason[1:]}.")
    return KeyRow(key=place, handling="rejected", text=marker.reason, advice=marker.advice)


def _named_row(place: str, option: type[Option]) -> KeyRow:
    """The row of a name: what it is, and how it is handled."""
    row = _row(place, option.about)
    return replace(row, text=f"{(option.__doc__ or '').partition(chr(10))[0]} {row.text}".strip())
