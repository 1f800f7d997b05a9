"""How much each site suffers from its format, and what to do about it."""

from bitwright.sensitivity.indicate import Indications, Subject, indicate, spec_of
from bitwright.sensitivity.indicators.hessian import hessian_traces
from bitwright.sensitivity.score import Scores, SiteScore, score
from bitwright.sensitivity.suggestions import Suggestion, Trial, errors_without, suggest

__all__ = [
    "Indications",
    "Scores",
    "SiteScore",
    "Subject",
    "Suggestion",
    "Trial",
    "errors_without",
    "hessian_traces",
    "indicate",
    "score",
    "spec_of",
    "suggest",
]
