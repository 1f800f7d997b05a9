"""`@strict`: public functions and classes reject unknown keyword arguments and arguments of the wrong type."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ParamSpec,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError

from bitwright.core.errors import PlanError, Problem, did_you_mean
from bitwright.core.schemas import argument_problems

Count = Annotated[int, Ge(1), Lt(2**63)]
"""A number of items: at least 1."""
Amount = Annotated[int, Ge(0), Lt(2**63)]
"""A number of items or bytes: 0 or more."""
Seed = Annotated[int, Ge(0), Lt(2**32)]
"""The seed of random numbers."""
Share = Annotated[float, Ge(0), Le(1e12)]
"""A number that is not negative, such as a share or a factor."""
Positive = Annotated[float, Gt(0), Le(1e12)]
"""A number above 0."""

_CONTAINERS = {
    "Mapping": "a mapping",
    "dict": "a dict",
    "Callable": "a function",
    "Iterable": "an iterable",
    "Iterator": "an iterator",
    "Sequence": "a list",
    "list": "a list",
    "tuple": "a tuple",
}


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` matches the type hint."""
    if hint is Any or hint is object:
        return True
    if hint is None or hint is NoneType:
        return value is None
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = get_args(hint)
        return any(fits(value, kind) for kind in kinds) or (
            str in kinds and Path in kinds and isinstance(value, os.PathLike)
        )
    if origin is Annotated:
        return fits(value, get_args(hint)[0])
    if isinstance(hint, TypeVar):
        return hint.__bound__ is None or fits(value, hint.__bound__)
    if origin is not None:
        return _fits_container(value, origin, get_args(hint))
    return _is_a(value, hint) if isinstance(hint, type) else True


def limit_problem(value: Any, hint: Any) -> str | None:
    """The limit of `hint` (`Annotated[int, Ge(1)]`) that a number violates; None if it violates none.

    >>> limit_problem(-5, Count | None), limit_problem(None, Count | None)
    ('at least 1', None)
    """
    if not isinstance(value, Real):
        return None
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        found = [limit_problem(value, kind) for kind in get_args(hint) if fits(value, kind)]
        return found[0] if found and all(found) else None
    if origin is not Annotated:
        return None
    number = float(value)
    for limit in hint.__metadata__:  # written so that NaN violates every limit
        if isinstance(limit, Ge) and not number >= cast(Any, limit.ge):
            return f"at least {limit.ge}"
        if isinstance(limit, Gt) and not number > cast(Any, limit.gt):
            return f"more than {limit.gt}"
        if isinstance(limit, Le) and not number <= cast(Any, limit.le):
            return f"at most {limit.le}"
        if isinstance(limit, Lt) and not number < cast(Any, limit.lt):
            return f"less than {limit.lt}"
    return None


def _is_a(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool") or value in (0, 1)
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol
        return True


def _fits_container(value: Any, origin: Any, of: tuple[Any, ...]) -> bool:
    if origin is Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if origin in (Iterable, Sequence, list):
        if _is_tensor(value) or isinstance(value, bytes):  # a single batch where a list of batches is expected
            return False
        if isinstance(value, str):
            return origin is Iterable and of == (str,)  # a single name is accepted for Iterable[str]
        if isinstance(value, Mapping) and of == (Any,):
            return False
        return hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if origin in (Mapping, dict, Iterator):
        return isinstance(value, origin)
    return True


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return (torch is not None and isinstance(value, torch.Tensor)) or type(value).__name__ == "ndarray"


def type_name(hint: Any) -> str:
    """A readable name of the type."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = get_args(hint)
        path = ["a path"] if str in kinds and Path in kinds else []
        rest = [type_name(kind) for kind in kinds if not path or kind not in (str, Path)]
        return " or ".join(dict.fromkeys([*path, *rest]))
    if hint is None or hint is NoneType:
        return "None"
    if isinstance(hint, TypeVar) and hint.__bound__ is not None:
        return type_name(hint.__bound__)
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        return _CONTAINERS.get(name, name)
    if getattr(hint, "__module__", "").startswith("torch.nn"):
        return f"a torch.nn.{hint.__name__}"
    return str(getattr(hint, "__name__", hint))


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


class UnknownArgument(PlanError, TypeError):
    """A call with a keyword argument that the function doesn't have. Also a `TypeError`, as in Python."""

    def __init__(self, problems: list[Problem], *, title: str = "unknown arguments") -> None:
        super().__init__(problems, title=title)
        if len(problems) == 1:
            self.args = (str(problems[0]),)


class WrongArgument(PlanError, TypeError):
    """A call with arguments of the wrong type. Also a `TypeError`, as in Python."""

    def __init__(self, problems: list[Problem], *, title: str = "arguments of the wrong type") -> None:
        super().__init__(problems, title=title)
        if len(problems) == 1:
            self.args = (str(problems[0]),)


class ImpossibleArgument(PlanError, ValueError):
    """A call with numbers outside of their limits; also a `ValueError`, as in Python itself."""

    def __init__(self, problems: list[Problem], *, title: str = "arguments out of range") -> None:
        super().__init__(problems, title=title)
        if len(problems) == 1:
            self.args = (str(problems[0]),)


@overload
def strict(target: C) -> C: ...
@overload
def strict(target: Callable[P, R]) -> Callable[P, R]: ...
def strict(target: Any) -> Any:
    """Check the arguments of a function, or of the constructor and public methods of a class.

    Unknown keywords and arguments that don't match the annotated type raise an error.

    The keys of `**choices: Unpack[…]` are treated as separate arguments, both in the check and in the signature that
    `help()` shows. Other `**keywords` are not checked.
    """
    return _strict_class(target) if isinstance(target, type) else _strict_function(target, target.__qualname__)


def reject_unknown(
    function: str, given: Iterable[str], known: Iterable[str], hints: Mapping[str, Any] | None = None
) -> None:
    """Raise an error that lists every name in `given` that isn't in `known`.

    The `hints` of arguments tell whether a name belongs to the settings that one of them takes.
    """
    names = list(known)
    nested = {
        field: f"{argument}={kind.__name__}({field}=…)"
        for argument, hint in (hints or {}).items()
        for kind in _classes(hint)
        if issubclass(kind, BaseModel) and argument in names
        for field in kind.model_fields
    }
    problems = [
        Problem(
            what=f"{function}() has no argument {name!r}",
            where=name,
            fix=f"pass {nested[name]}"
            if name in nested
            else did_you_mean(name, names)
            if names
            else "remove it: the function takes no keyword arguments",
            code="unknown-argument",
        )
        for name in given
        if name not in names
    ]
    if problems:
        raise UnknownArgument(problems)


def reject_wrong_types(function: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise an error that lists every argument that doesn't match its type in `hints`."""
    problems = []
    for name, value in given.items():
        if name in hints and not fits(value, hints[name]):
            wanted = type_name(hints[name])
            problems.append(
                Problem(
                    what=f"{function}() takes {wanted} as {name!r}",
                    where=name,
                    value=type(value).__name__,
                    fix=_fix(value, hints[name], wanted, {key: h for key, h in hints.items() if key not in given}),
                    code="wrong-argument-type",
                )
            )
    if problems:
        raise WrongArgument(problems)


def reject_impossible(function: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise an error that lists every number outside the limits in `hints`."""
    problems = []
    for name, value in given.items():
        limit = limit_problem(value, hints[name]) if name in hints else None
        if limit is not None:
            what = f"the argument {name!r} of {function}() is out of range"
            problems.append(
                Problem(what=what, where=name, value=value, fix=f"give {limit}", code="impossible-argument")
            )
    if problems:
        raise ImpossibleArgument(problems)


def _fix(value: Any, hint: Any, wanted: str, others: Mapping[str, Any]) -> str:
    """What to pass instead; `others` are the types of arguments that weren't given."""
    if isinstance(value, type) and class_matches(value, hint):
        return f"pass an instance of the class: {value.__name__}(…)"
    if isinstance(value, str | Path):
        made = next((made for kind in _classes(hint) if (made := _made_from_text(kind, str(value)))), None)
        if made is not None:
            return f"pass {made}"
        if "iterable" in wanted or "list" in wanted:
            return f'pass the data itself; bitwright.load_workload("{value}").calibration() reads that of a workload'
    elif fits([value], hint):
        return "pass a list, even for a single item"
    if _is_tensor(value) and wanted.startswith("a torch.nn."):
        return "pass the model here, and the inputs in the next argument"
    place = next(
        (name for name, other in others.items() if any(isinstance(value, kind) for kind in _classes(other))), None
    )
    if place is not None:
        return f"pass it as {place}=…"
    return f"pass {wanted}"


def _classes(hint: Any) -> list[type]:
    """The classes of this package and of torch in a hint."""
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    return [kind for kind in kinds if kind.__module__.startswith(("bitwright.", "torch."))]


def _made_from_text(kind: type, text: str) -> str | None:
    """The call that makes an object of this class from a path or a name."""
    if kind.__name__ == "Graph":
        return "capture(model, inputs), which makes a Graph"
    for name in ("load", "parse"):
        if hasattr(kind, name) and not hasattr(kind, "state_dict"):
            return f"{kind.__name__}.{name}({text!r})"
    return None


def class_matches(cls: type, hint: Any) -> bool:
    """Whether instances of `cls` match `hint`."""
    kinds = get_args(hint) or (hint,)
    return any(isinstance(kind, type) and issubclass(cls, kind) for kind in kinds)


def _hints(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """The types of parameters, without those that exist only for type checkers. A default value is always accepted."""
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
                hint = eval(hint, scope)  # annotations come from this package only
            except Exception:
                continue
        if hint is not parameter.empty:
            hints[parameter.name] = hint
    defaults = {name: signature.parameters[name].default for name in hints if name in signature.parameters}
    return {
        name: hint | None if defaults.get(name, 0) is None and _supports_union(hint) else hint
        for name, hint in hints.items()
    }


def _supports_union(hint: Any) -> bool:
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
        if hints is None:  # evaluated at the first call, when the module is fully defined
            hints = _hints(function, signature)
        if kwargs and not names.issuperset(kwargs):
            unknown = [name for name in kwargs if name not in names]
            reject_unknown(title, unknown, sorted(names - {"self", "cls"}), hints)
        if hints:
            given = {**dict(zip(positional, args, strict=False)), **kwargs}
            reject_wrong_types(title, given, hints)
            reject_impossible(title, given, hints)
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


def _translated(init: Callable[..., None], name: str, fields: Mapping[str, Any]) -> Callable[..., None]:
    """The constructor of a pydantic model, with errors of this package."""

    @functools.wraps(init)
    def call(self: Any, /, *args: Any, **values: Any) -> None:
        try:
            init(self, *args, **values)
        except ValidationError as error:
            title = f"{name} can't have these values"
            raise ImpossibleArgument(argument_problems(error, fields), title=title) from None

    return call


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
        if "__init__" not in vars(cls):  # pydantic's __init__; a replacement is not called when files are validated
            aliases = [field.alias for field in fields.values() if field.alias is not None]
            own = _strict_function(changed.__init__, cls.__name__, [*fields, *aliases])
            changed.__init__ = _translated(own, cls.__name__, fields)
    elif "__init__" in vars(cls):
        # a dataclass with its own checks gives better messages
        changed.__init__ = _strict_function(changed.__init__, cls.__name__, types="__post_init__" not in vars(cls))
    return cls
