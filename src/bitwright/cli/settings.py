"""`@with_settings`: command-line options from the fields of a pydantic model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Function = Callable[..., None]


def with_settings(model: type[BaseModel]) -> Callable[[Function], Function]:
    """Add one option for each field to a verb, which gets the model as `settings`."""

    def add(function: Function) -> Function:
        own = inspect.signature(function, eval_str=True)
        kept = [parameter for name, parameter in own.parameters.items() if name != "settings"]
        fields = [_option(name, field) for name, field in model.model_fields.items()]

        @functools.wraps(function)
        def run(*args: Any, **arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in model.model_fields}
            said = {name: value for name, value in given.items() if value is not None}
            function(*args, settings=model(**said), **arguments)

        run.__signature__ = inspect.Signature([*kept, *fields])  # type: ignore[attr-defined]
        del run.__wrapped__  # or inspect would look through
        return run

    return add


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = _without_none(field.annotation)
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag += f"/--no-{name.replace('_', '-')}"
    words: dict[str, Any] = {"help": f"{field.description} {_default(field)}".strip(), "show_default": False}
    option = typer.Option(flag, **words)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def _default(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return f"[default: {'yes' if field.default else 'no'}]"
    return "" if field.default is None else f"[default: {field.default}]"
