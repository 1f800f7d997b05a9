"""Sensitivity: how much each site or operator degrades the model in low precision, and which ones to keep in float."""

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
