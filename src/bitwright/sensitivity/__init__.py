"""How much each site suffers from its format, and what to do about it."""

from bitwright.sensitivity.score import score
from bitwright.sensitivity.scores import Scores, SiteScore
from bitwright.sensitivity.suggest import Suggestion, Trial, suggest

__all__ = ["Scores", "SiteScore", "Suggestion", "Trial", "score", "suggest"]
