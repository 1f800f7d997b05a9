"""Hardware targets as tables, and the placement of quantizers by their rules."""

from bitwright.backends.placement import make_plan, place
from bitwright.backends.table import DEFAULT_BACKEND, DEFAULT_RUNTIME, BackendTable, backend
from bitwright.backends.validation import (
    Choices,
    check_plan,
    choice_problems,
    patterns_of,
    problems_title,
    reject_choices_with_plan,
    resolve_for_backend,
)

__all__ = [
    "DEFAULT_BACKEND",
    "DEFAULT_RUNTIME",
    "BackendTable",
    "Choices",
    "backend",
    "check_plan",
    "choice_problems",
    "make_plan",
    "patterns_of",
    "place",
    "problems_title",
    "reject_choices_with_plan",
    "resolve_for_backend",
]
