"""The result of `bitwright score` in a record."""

from __future__ import annotations

from math import isfinite

from pydantic import Field

from bitwright.core.arguments import strict
from bitwright.core.documents import ResultModel
from bitwright.sensitivity import Scores, SiteScore, Suggestion


class SiteSensitivity(ResultModel):
    """Errors of the model when only this site is quantized."""

    site: str
    format: str
    sqnr_db: float | None = Field(description="Of the numbers at the site. None: no error.")
    output_error: float
    cosine_distance: float
    loss_change: float | None = Field(description="None: the workload has no loss.")


class FloatTrial(ResultModel):
    """The metric with these operators in float."""

    operators: tuple[str, ...]
    metric: float


class SuggestionRow(ResultModel):
    """The effect of keeping the worst operators in float."""

    metric: str
    before: float
    trials: tuple[FloatTrial, ...]
    operators: tuple[str, ...] = Field(description="The suggestion; empty if float operators give no gain.")


class Sensitivity(ResultModel):
    """Sites, worst first."""

    samples: int
    sites: tuple[SiteSensitivity, ...]
    together: SiteSensitivity
    suggestion: SuggestionRow | None = None


@strict
def sensitivity(scores: Scores, suggestion: Suggestion | None = None, metric: str = "") -> Sensitivity:
    """Make the part of a record from scores."""
    return Sensitivity(
        samples=scores.samples,
        sites=tuple(_row(score) for score in scores.sites),
        together=_row(scores.together),
        suggestion=None
        if suggestion is None
        else SuggestionRow(
            metric=metric,
            before=suggestion.before,
            trials=tuple(FloatTrial(operators=tuple(t.operators), metric=t.metric) for t in suggestion.trials),
            operators=tuple(suggestion.operators),
        ),
    )


def _row(score: SiteScore) -> SiteSensitivity:
    return SiteSensitivity(
        site=score.site,
        format=score.format,
        sqnr_db=score.sqnr_db if score.sqnr_db is not None and isfinite(score.sqnr_db) else None,
        output_error=score.output_error,
        cosine_distance=score.cosine_distance,
        loss_change=score.loss_change,
    )
