"""How much each site suffers from its format, and what to do about it."""

from bitwright.sensitivity.hessian import hessian_traces
from bitwright.sensitivity.score import score
from bitwright.sensitivity.scores import Scores, SiteScore
from bitwright.sensitivity.suggest import Suggestion, Trial, suggest
from bitwright.sensitivity.switched import errors_without

__all__ = ["Scores", "SiteScore", "Suggestion", "Trial", "errors_without", "hessian_traces", "score", "suggest"]
