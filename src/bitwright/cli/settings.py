"""Decorators that add groups of options to a verb: the fields of a pydantic model, or the choices of a plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bitwright.cli import options
from bitwright.cli.options import exclude, option, require

Function = Callable[..., None]

_CHOICES: dict[str, Any] = {
    "weights": options.WeightsOption,
    "activations": options.ActivationsOption,
    "group": Annotated[
        int | None, option("Values that share a scale of a weight, e.g. 32.", "--group", min=1, metavar="N")
    ],
    "head_bits": Annotated[int | None, option("Bits of a language model's head.", "--head-bits", min=2, metavar="N")],
    "observer": options.ObserverOption,
    "weight_observer": options.WeightObserverOption,
    "quantizer": options.QuantizerOption,
    "weight_quantizer": options.WeightQuantizerOption,
    "first_last_bits": options.FirstLastBitsOption,
    "keep_float": options.KeepFloatOption,
    "fold": options.FoldOption,
    "saturating": options.SaturatingOption,
}

_TEXT: dict[str, Any] = {
    "text": Annotated[
        Path | None, option("Text for calibration and perplexity of hf:FOLDER or gguf:FILE.", "--text", metavar="FILE")
    ],
    "sequence": Annotated[
        int | None, option("Tokens of each sample of the text (default: 256).", "--sequence", min=2, metavar="N")
    ],
}


def with_choices(function: Function) -> Function:
    """Add the options of verbs that make a plan. The verb gets `backend`, `plan` (loaded) and `choices`."""
    added = {"backend": options.BackendOption, "plan": options.PlanOption, **_CHOICES}

    def run(*args: Any, plan: Any, **arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in _CHOICES}
        choices = {name: value for name, value in given.items() if value not in (None, [])}
        if plan is not None:
            exclude("--plan", {f"--{name.replace('_', '-')}": value for name, value in choices.items()})
        loaded = None
        if plan is not None:
            from bitwright.workflows.artefacts import read_plan  # imports torch

            loaded = read_plan(plan, arguments.get("workload"))
        function(*args, plan=loaded, choices=choices, **arguments)

    return _with_options(function, run, ("backend", "plan", "choices"), added)


def with_settings(model: type[BaseModel], *, nested: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Add one option for each field of a model to a verb, which gets the model as `settings`. `nested` have none."""

    def add(function: Function) -> Function:
        fields = {name: field for name, field in model.model_fields.items() if name not in nested}
        added = {name: _field_option(name, field) for name, field in fields.items()}

        def run(*args: Any, **arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in added}
            said = {name: value for name, value in given.items() if value is not None}
            function(*args, settings=model(**said), **arguments)

        return _with_options(function, run, ("settings",), added)

    return add


def with_text(function: Function, own: list[inspect.Parameter]) -> tuple[Function, list[inspect.Parameter]]:
    """Add the options of language models to a verb that takes a workload. They become part of its reference."""
    name = next((parameter.name for parameter in own if _is_workload(parameter)), None)
    if name is None:
        return function, own

    def run(*args: Any, text: Any, sequence: Any, **arguments: Any) -> None:
        given = {"text": text, "sequence": sequence}
        if any(value is not None for value in given.values()):
            require("WORKLOAD", arguments[name], "hf:FOLDER or gguf:FILE, to which --text and --sequence belong")
            from bitwright.workload.language_models import with_text

            arguments[name] = with_text(arguments[name], **given)
        function(*args, **arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    return run, [*own, *(inspect.Parameter(key, keyword, default=None, annotation=kind) for key, kind in _TEXT.items())]


def _is_workload(parameter: inspect.Parameter) -> bool:
    return any("WORKLOAD" in (getattr(info, "metavar", None) or "") for info in get_args(parameter.annotation)[1:])


def _with_options(function: Function, run: Function, replaced: tuple[str, ...], added: dict[str, Any]) -> Function:
    """`run` with the signature of `function`, in which the options replace some parameters."""
    own = inspect.signature(function, eval_str=True).parameters
    kept = [parameter for name, parameter in own.items() if name not in replaced]
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in added.items()]
    wrapped = functools.wraps(function)(run)
    wrapped.__signature__ = inspect.Signature([*kept, *more])  # type: ignore[attr-defined]
    del wrapped.__wrapped__  # otherwise inspect would use the original signature
    return wrapped


def _field_option(name: str, field: FieldInfo) -> Any:
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag += f"/--no-{name.replace('_', '-')}"
    return Annotated[kind | None, option(f"{field.description} {_default(field)}".strip(), flag)]


def _default(field: FieldInfo) -> str:
    if isinstance(field.default, bool):
        return f"[default: {'yes' if field.default else 'no'}]"
    return "" if field.default is None else f"[default: {field.default}]"
