"""`@strict`: public functions and classes refuse keyword arguments that they don't have, and name the nearest one."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, Unpack, cast, get_args, get_origin, overload

from bitwright.errors import PlanError, Problem, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


class UnknownArgument(PlanError, TypeError):
    """A call with a keyword argument that the function doesn't have; also a `TypeError`, as in Python itself."""

    def __init__(self, problems: list[Problem], *, title: str = "unknown arguments") -> None:
        super().__init__(problems, title=title)
        if len(problems) == 1:
            self.args = (str(problems[0]),)


@overload
def strict(target: C) -> C: ...
@overload
def strict(target: Callable[P, R]) -> Callable[P, R]: ...
def strict(target: Any) -> Any:
    """Check keyword arguments of a function, or of the constructor and the public methods of a class.

    Keywords of an `**choices: Unpack[…]` count as arguments of their own, in the check and in the signature that
    `help()` shows. Other `**keywords` are left to the function.
    """
    return _strict_class(target) if isinstance(target, type) else _strict_function(target, target.__qualname__)


def reject_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for every name of `given` that isn't in `known`."""
    names = list(known)
    problems = [
        Problem(
            what=f"{function}() has no argument {name!r}",
            where=name,
            fix=did_you_mean(name, names) if names else "leave it out: it takes no keyword arguments",
            code="unknown-argument",
        )
        for name in given
        if name not in names
    ]
    if problems:
        raise UnknownArgument(problems)


def _strict_function(function: Callable[..., Any], title: str, known: Iterable[str] | None = None) -> Any:
    signature = _expanded(function)
    if known is None:
        if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            return function
        known = [
            name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
    names = frozenset(known)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not names.issuperset(kwargs):
            reject_unknown(title, [name for name in kwargs if name not in names], sorted(names - {"self", "cls"}))
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _expanded(function: Callable[..., Any]) -> inspect.Signature:
    """The signature with the keys of `**name: Unpack[SomeTypedDict]` as keywords."""
    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        keys = _unpacked(function, parameter.annotation) if parameter.kind is parameter.VAR_KEYWORD else None
        if keys is None:
            parameters.append(parameter)
            continue
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=getattr(kind, "__forward_arg__", kind)
            )
            for name, kind in keys.items()
        ]
    return signature.replace(parameters=parameters)


def _unpacked(function: Callable[..., Any], annotation: Any) -> Mapping[str, Any] | None:
    if isinstance(annotation, str):  # from __future__ import annotations
        name = annotation.removeprefix("Unpack[").removesuffix("]")
        found = vars(sys.modules[function.__module__]).get(name) if name != annotation else None
    else:
        found = get_args(annotation)[0] if get_origin(annotation) is Unpack else None
    return None if found is None else dict(found.__annotations__)


def _strict_class(cls: type) -> type:
    changed = cast(Any, cls)
    for name, member in list(vars(cls).items()):
        if name.startswith("_"):
            continue
        title = f"{cls.__name__}.{name}"
        if inspect.isfunction(member):
            setattr(cls, name, _strict_function(member, title))
        elif isinstance(member, classmethod | staticmethod):
            setattr(cls, name, type(member)(_strict_function(member.__func__, title)))
    fields = getattr(cls, "model_fields", None)
    if fields is not None:
        if "__init__" not in vars(cls):  # pydantic's; set here it doesn't run when files are validated
            aliases = [field.alias for field in fields.values() if field.alias is not None]
            changed.__init__ = _strict_function(changed.__init__, cls.__name__, [*fields, *aliases])
    elif "__init__" in vars(cls):
        changed.__init__ = _strict_function(changed.__init__, cls.__name__)
    return cls
