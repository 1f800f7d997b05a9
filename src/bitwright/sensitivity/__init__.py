"""How much each site suffers from its format, and what to do about it."""

from bitwright.sensitivity.hessian import hessian_traces
from bitwright.sensitivity.indicate import Subject, indicate, spec_of
from bitwright.sensitivity.indications import Indications
from bitwright.sensitivity.score import score
from bitwright.sensitivity.scores import Scores, SiteScore
from bitwright.sensitivity.suggest import Suggestion, Trial, suggest
from bitwright.sensitivity.switched import errors_without

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
