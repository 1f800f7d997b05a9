"""`@strict`: public functions and classes refuse unknown keyword arguments and arguments of the wrong type."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, Unpack, cast, get_args, get_origin, get_type_hints, overload

from bitwright.argument_types import fits, name_of
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


class WrongArgument(PlanError, TypeError):
    """A call with arguments of the wrong type; also a `TypeError`, as in Python itself."""

    def __init__(self, problems: list[Problem], *, title: str = "arguments of the wrong type") -> None:
        super().__init__(problems, title=title)
        if len(problems) == 1:
            self.args = (str(problems[0]),)


@overload
def strict(target: C) -> C: ...
@overload
def strict(target: Callable[P, R]) -> Callable[P, R]: ...
def strict(target: Any) -> Any:
    """Check the arguments of a function, or of the constructor and the public methods of a class.

    Unknown keywords are refused, and so are arguments that aren't of the annotated type (`argument_types.py`).

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


def reject_wrong_types(function: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise for every argument that isn't of the type that `hints` has for it."""
    problems = []
    for name, value in given.items():
        if name in hints and not fits(value, hints[name]):
            wanted = name_of(hints[name])
            problems.append(
                Problem(
                    what=f"{function}() takes {wanted} as {name!r}",
                    where=name,
                    value=type(value).__name__,
                    fix=_fix(value, hints[name], wanted),
                    code="wrong-argument-type",
                )
            )
    if problems:
        raise WrongArgument(problems)


def _fix(value: Any, hint: Any, wanted: str) -> str:
    if isinstance(value, type) and fits_class(value, hint):
        return f"give an object of the class: {value.__name__}(…)"
    if fits([value], hint):
        return "give a list, also of one"
    return f"give {wanted}"


def fits_class(cls: type, hint: Any) -> bool:
    """Whether objects of `cls` are what `hint` asks for."""
    kinds = get_args(hint) or (hint,)
    return any(isinstance(kind, type) and issubclass(cls, kind) for kind in kinds)


def _hints(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """The types of parameters; those that exist only for type checkers are left out. A default is always accepted."""
    scope = vars(sys.modules[function.__module__])
    hints: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            hints |= _unpacked(function, parameter.annotation, get_type_hints) or {}
            continue
        hint = parameter.annotation
        if isinstance(hint, str):
            try:
                hint = eval(hint, scope)  # an annotation of this package
            except Exception:
                continue
        if hint is not parameter.empty:
            hints[parameter.name] = hint
    defaults = {name: signature.parameters[name].default for name in hints if name in signature.parameters}
    return {
        name: hint | None if defaults.get(name, 0) is None and _joins(hint) else hint for name, hint in hints.items()
    }


def _joins(hint: Any) -> bool:
    try:
        hint | None
    except TypeError:
        return False
    return True


def _strict_function(
    function: Callable[..., Any], title: str, known: Iterable[str] | None = None, *, types: bool = True
) -> Any:
    signature = _expanded(function)
    hints: dict[str, Any] | None = None if types and known is None else {}  # pydantic checks types itself
    positional = [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if known is None:
        if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            return function
        known = [
            name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
    names = frozenset(known)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal hints
        if kwargs and not names.issuperset(kwargs):
            reject_unknown(title, [name for name in kwargs if name not in names], sorted(names - {"self", "cls"}))
        if hints is None:  # now all of the module is defined
            hints = _hints(function, signature)
        if hints:
            reject_wrong_types(title, {**dict(zip(positional, args, strict=False)), **kwargs}, hints)
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


def _unpacked(
    function: Callable[..., Any], annotation: Any, read: Callable[[Any], Any] = lambda kind: kind.__annotations__
) -> Mapping[str, Any] | None:
    if isinstance(annotation, str):  # from __future__ import annotations
        name = annotation.removeprefix("Unpack[").removesuffix("]")
        found = vars(sys.modules[function.__module__]).get(name) if name != annotation else None
    else:
        found = get_args(annotation)[0] if get_origin(annotation) is Unpack else None
    return None if found is None else dict(read(found))


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
        # a dataclass with a check of its own knows better what to say
        changed.__init__ = _strict_function(changed.__init__, cls.__name__, types="__post_init__" not in vars(cls))
    return cls
