"""Tuning: search for a quantized model that meets an accuracy goal."""

from bitwright.tuning.candidate import Base, Candidate, Outcome, Override
from bitwright.tuning.config import TuneConfig
from bitwright.tuning.evaluate import Measuring
from bitwright.tuning.goal import Budget, Drop, Goal
from bitwright.tuning.result import Tuned
from bitwright.tuning.search import Asking, Search, Strategy
from bitwright.tuning.space import Rule, SearchSpace, Space
from bitwright.tuning.tune import tune

__all__ = [
    "Asking",
    "Base",
    "Budget",
    "Candidate",
    "Drop",
    "Goal",
    "Measuring",
    "Outcome",
    "Override",
    "Rule",
    "Search",
    "SearchSpace",
    "Space",
    "Strategy",
    "TuneConfig",
    "Tuned",
    "tune",
]
