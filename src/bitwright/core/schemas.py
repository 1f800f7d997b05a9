"""Validate data with pydantic models: base classes, common types, and the translation of errors to problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean, shortened

__all__ = ["DeviceName", "NonBlank", "ResultModel", "Strict", "argument_problems", "problems_of", "validated"]

ModelT = TypeVar("ModelT")
_MOST_PROBLEMS = 100


def not_blank(value: str) -> str:
    """The text, if it isn't blank."""
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def device_name(value: str) -> str:
    """Return the text if it can name a device type, else raise."""
    slashes = "/" in value or "\\" in value
    if value.strip(" .") == "" or not value.isprintable() or slashes or len(value) > 120:
        raise ValueError("a device name must have 1 to 120 printable characters, no slashes, and not only dots")
    return value


NonBlank = Annotated[str, AfterValidator(not_blank)]
"""A string that is not blank."""
DeviceName = Annotated[str, AfterValidator(device_name)]
"""The name of a device type."""


class Strict(BaseModel):
    """Base class of file models. Unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ResultModel(BaseModel):
    """Base class of results. Unknown keys are errors and instances are immutable. Unlike `Strict`, it accepts NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def validated(
    model: type[ModelT] | TypeAdapter[ModelT],
    data: Any,
    *,
    title: str,
    fix: str | None = None,
    error: Callable[[list[Problem]], BitwrightError] | None = None,
) -> ModelT:
    """Validate `data` as a model. Raise all problems as a PlanError, or as the exception that `error` creates."""
    try:
        return model.validate_python(data) if isinstance(model, TypeAdapter) else model.model_validate(data)  # type: ignore[attr-defined]
    except ValidationError as cause:
        problems = problems_of(cause, model, fix=fix)
        raise (PlanError(problems, title=title) if error is None else error(problems)) from cause
    except RecursionError as cause:
        problem = Problem(what="nested too deeply", code="nested-too-deeply", fix=fix)
        raise (PlanError([problem], title=title) if error is None else error([problem])) from cause


def problems_of(
    error: ValidationError, model: object, *, fix: str | None = None, union_branches: Collection[str] = ()
) -> list[Problem]:
    """Convert pydantic's errors to problems with path, value, and similar names for unknown keys.

    For a union, pydantic reports one error per branch and adds the branch's name to the path. `union_branches` lists
    these names. They are removed, and each location is reported once.
    """
    details = error.errors(include_url=False, include_context=False)
    if union_branches:
        details = _merge_branches(details, union_branches)
    found = [_problem(one, model, fix) for one in details[:_MOST_PROBLEMS]]
    if len(details) > _MOST_PROBLEMS:
        found.append(Problem(what=f"there are {len(details) - _MOST_PROBLEMS} more problems", code="more-problems"))
    return found


_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "string": "text", "finite": "a number"}


def argument_problems(error: ValidationError, fields: Collection[str], code: str = "invalid-value") -> list[Problem]:
    """Pydantic's errors about the arguments of a class, one for each argument, with a fix that says what it takes.

    The branches of a union have an error each; that of a parser says most.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for detail in error.errors(include_url=False):
        path = list(detail["loc"][:1])
        path += [part for part in detail["loc"][1:2] if isinstance(part, int)]
        where = ".".join(str(part) for part in path)
        if where not in found or (found[where]["type"] != "value_error" and detail["type"] == "value_error"):
            found[where] = detail
    return [_argument_problem(where, detail, fields, code) for where, detail in found.items()]


def _argument_problem(where: str, detail: Mapping[str, Any], fields: Collection[str], code: str) -> Problem:
    kind, context = str(detail["type"]), detail.get("ctx", {})
    if kind == "extra_forbidden":
        fix = did_you_mean(where, fields)
        return Problem(what="unknown setting", where=where, fix=fix, code="unknown-argument")
    what, fix = str(detail["msg"]).removeprefix("Value error, "), ""
    bound = next((f"{words} {context[key]:g}" for key, words in _BOUNDS.items() if key in context), None)
    if kind == "value_error":
        what, _, fix = what.partition(": ")
    elif kind == "literal_error":
        what, fix = "this isn't one of the possible values", f"use {context['expected']}"
    elif bound is not None:
        what, fix = "the number is outside of its limits", f"give {bound}"
    elif (taken := _KINDS.get(kind.partition("_")[0])) is not None:
        what, fix = f"this isn't {taken}", f"give {taken}"
    else:
        what = what.replace("Input should be", "it must be")
    return Problem(what=what, where=where, value=detail["input"], fix=fix or "omit it to use the default", code=code)


def _merge_branches(details: Iterable[Mapping[str, Any]], branches: Collection[str]) -> list[Any]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for detail in details:
        path = tuple(part for part in detail["loc"] if part not in branches)
        wrong_type = detail["loc"][-1] in branches or detail["type"] == "model_type"
        message = "must be a string or a mapping" if wrong_type else detail["msg"]
        found.setdefault(path, {**detail, "loc": path, "msg": message})
    # omit "must be a string" for a mapping that contains another problem
    outer = {path[:length] for path in found for length in range(len(path))}
    return [detail for path, detail in found.items() if path not in outer]


def _problem(one: Mapping[str, Any], model: object, fix: str | None) -> Problem:
    if one["loc"][-1:] == ("[key]",):  # pydantic appends the rejected key and this marker to the mapping's path
        what = str(one["msg"]).removeprefix("Value error, ")
        return Problem(
            what=what, where=".".join(str(part) for part in one["loc"][:-2]), value=one["input"], code="invalid-name"
        )
    where = ".".join(str(part) for part in one["loc"])
    if one["type"] == "extra_forbidden":
        near = did_you_mean(shortened(str(one["loc"][-1])), _keys(model, one["loc"][:-1]))
        return Problem(what="unknown key", where=where, fix=near, code="unknown-key")
    code = "missing-key" if one["type"] == "missing" else "invalid-value"
    what = str(one["msg"]).removeprefix("Value error, ")
    return Problem(what=what, where=where, value=one["input"], fix=fix, code=code)


def _keys(model: object, path: tuple[Any, ...]) -> list[str]:
    """The valid keys of the mapping at this path."""
    here: Any = model
    named = False
    for part in path:
        if isinstance(part, int) or named:  # list indexes and mapping keys don't change the model
            named = False
            continue
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = _field(here, str(part))
            named = get_origin(field) is dict
            here = None if field is None else _inner(field)
    return [f.alias or name for name, f in here.model_fields.items()] if _is_model(here) else []


def _field(model: type[BaseModel], name: str) -> Any:
    """The annotation of a field, by name or alias."""
    for own, field in model.model_fields.items():
        if name in (own, field.alias):
            return field.annotation
    return None


def _inner(annotation: Any) -> Any:
    """The model inside `X | None`, `dict[str, X]` and the like."""
    if _is_model(annotation):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := _inner(part)) is not None), None)


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)
