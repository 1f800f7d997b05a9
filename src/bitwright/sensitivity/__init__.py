"""Sensitivity: how much each site or operator degrades the model in low precision, and which ones to keep in float."""

from bitwright.sensitivity.indicators import hessian_traces
from bitwright.sensitivity.operator_scores import OperatorScores, Subject, score_operators, spec_of
from bitwright.sensitivity.score import FloatTrial, Scores, SiteScore, Suggestion, errors_without, score, suggest
from bitwright.sensitivity.weight_costs import weight_costs

__all__ = [
    "FloatTrial",
    "OperatorScores",
    "Scores",
    "SiteScore",
    "Subject",
    "Suggestion",
    "errors_without",
    "hessian_traces",
    "score",
    "score_operators",
    "spec_of",
    "suggest",
    "weight_costs",
]
