"""Tuning: search for a quantized model that meets an accuracy goal."""

from bitwright.tuning.config import TuneConfig
from bitwright.tuning.evaluation import Measuring
from bitwright.tuning.goal import Budget, Drop, Goal, TrialOutcome
from bitwright.tuning.result import Tuned
from bitwright.tuning.search import CandidateGenerator, Search, Strategy
from bitwright.tuning.space import Base, Candidate, Override, SearchSpace, Space, SpaceRule
from bitwright.tuning.tune import tune

__all__ = [
    "Base",
    "Budget",
    "Candidate",
    "CandidateGenerator",
    "Drop",
    "Goal",
    "Measuring",
    "Override",
    "Search",
    "SearchSpace",
    "Space",
    "SpaceRule",
    "Strategy",
    "TrialOutcome",
    "TuneConfig",
    "Tuned",
    "tune",
]
