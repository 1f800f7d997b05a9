"""What pydantic found in a file, in our words: the path, the value, and the nearest key where one is unknown."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from bitwright.errors import Problem, did_you_mean


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """All of them."""
    found = []
    for one in error.errors():
        where = ".".join(str(part) for part in one["loc"])
        if one["type"] == "extra_forbidden":
            known = _keys(model, one["loc"][:-1])
            found.append(Problem(what="unknown key", where=where, fix=did_you_mean(str(one["loc"][-1]), known)))
        else:
            found.append(Problem(what=one["msg"], where=where, value=one["input"]))
    return found


def _keys(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The keys that a mapping at this place may have."""
    here: Any = model
    named = False
    for part in path:
        if isinstance(part, int) or named:  # an item of a list or of a mapping is of its kind
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
