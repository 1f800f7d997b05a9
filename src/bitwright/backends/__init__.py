"""What a target can run: tables, and the placement that follows from them."""

from bitwright.backends.placement import make_plan, place
from bitwright.backends.table import BackendTable, backend
from bitwright.backends.validation import (
    Choices,
    check_plan,
    fitting,
    misfit,
    mistakes,
    patterns_of,
    refuse_beside_plan,
)

__all__ = [
    "BackendTable",
    "Choices",
    "backend",
    "check_plan",
    "fitting",
    "make_plan",
    "misfit",
    "mistakes",
    "patterns_of",
    "place",
    "refuse_beside_plan",
]
