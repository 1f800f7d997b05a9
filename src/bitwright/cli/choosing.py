"""The options that make a plan, said once: a verb asks for them with `with_choices`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from bitwright.cli.options import (
    ActivationsOption,
    BackendOption,
    FirstLastBitsOption,
    FoldingOption,
    KeepFloatOption,
    ObserverOption,
    PlanFileOption,
    QuantizerOption,
    SaturatingOption,
    WeightObserverOption,
    WeightQuantizerOption,
    WeightsOption,
    chosen,
    load_plan,
    target,
)

_CHOICES: dict[str, Any] = {
    "weights": WeightsOption,
    "activations": ActivationsOption,
    "observer": ObserverOption,
    "weight_observer": WeightObserverOption,
    "quantizer": QuantizerOption,
    "weight_quantizer": WeightQuantizerOption,
    "first_last_bits": FirstLastBitsOption,
    "keep_float": KeepFloatOption,
    "fold": FoldingOption,
    "saturating": SaturatingOption,
}
_OPTIONS = {"backend": BackendOption, "plan": PlanFileOption, **_CHOICES}


def with_choices(function: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options; it gets `backend`, `plan` (loaded, or None) and `choices` for `make_plan`."""
    own = inspect.signature(function, eval_str=True).parameters
    kept = [parameter for name, parameter in own.items() if name not in ("backend", "plan", "choices")]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in _OPTIONS.items()]

    @functools.wraps(function)
    def run(*args: Any, backend: str | None, plan: Any, **arguments: Any) -> None:
        choices = chosen(plan, **{name: arguments.pop(name) for name in _CHOICES})
        given = load_plan(plan)
        function(*args, backend=target(backend, given), plan=given, choices=choices, **arguments)

    run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    del run.__wrapped__  # or inspect would look through
    return run
