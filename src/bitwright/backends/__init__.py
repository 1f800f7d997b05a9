"""Hardware targets as tables, and the placement of quantizers by their rules."""

from bitwright.backends.bit_budget import FormatCost, WeightCosts
from bitwright.backends.placement import make_plan, place
from bitwright.backends.precisions import (
    Choices,
    choice_problems,
    patterns_of,
    reject_choices_with_plan,
)
from bitwright.backends.table import (
    DEFAULT_BACKEND,
    DEFAULT_RUNTIME,
    BackendTable,
    backend,
    check_plan,
    problems_title,
    resolve_for_backend,
)
from bitwright.backends.token_models import default_steps, plan_warnings

__all__ = [
    "DEFAULT_BACKEND",
    "DEFAULT_RUNTIME",
    "BackendTable",
    "Choices",
    "FormatCost",
    "WeightCosts",
    "backend",
    "check_plan",
    "choice_problems",
    "default_steps",
    "make_plan",
    "patterns_of",
    "place",
    "plan_warnings",
    "problems_title",
    "reject_choices_with_plan",
    "resolve_for_backend",
]
