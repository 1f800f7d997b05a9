"""What a target can run: tables, and the placement that follows from them."""

from bitwright.backends.check import check_plan, fitting, misfit
from bitwright.backends.choices import Choices, patterns_of, refuse_beside_plan
from bitwright.backends.mistakes import mistakes
from bitwright.backends.placement import place
from bitwright.backends.table import BackendTable, backend

__all__ = [
    "BackendTable",
    "Choices",
    "backend",
    "check_plan",
    "fitting",
    "misfit",
    "mistakes",
    "patterns_of",
    "place",
    "refuse_beside_plan",
]
