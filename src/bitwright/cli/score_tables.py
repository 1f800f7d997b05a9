"""Print sensitivity scores and the suggested plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from bitwright.cli.out import Out
from bitwright.core import formatting
from bitwright.plan import Plan
from bitwright.sensitivity import Scores, SiteScore, Suggestion
from bitwright.workload import Workload


def show_scores(
    out: Out,
    workload: Workload,
    plan: Plan,
    scores: Scores,
    suggestion: Suggestion | None,
    *,
    top: int,
    output: Path | None,
) -> None:
    """Print the scores as tables, or as JSON."""
    changes = [] if suggestion is None else plan.diff(suggestion.plan)
    out.data(
        {
            **asdict(scores),
            "suggestion": None
            if suggestion is None
            else {
                **{key: value for key, value in vars(suggestion).items() if key not in ("plan", "trials")},
                "trials": [asdict(trial) for trial in suggestion.trials],
                "metric": workload.metric,
                "changes": [str(change) for change in changes],
            },
        }
    )
    rows = [_row(score) for score in (*scores.sites[:top], scores.together)]
    out.table(["site", "format", "#own SQNR", "#output error", "#1 − cosine", "#loss change"], rows)
    left = len(scores.sites) - top
    more = f", {left} more sites with --top" if left > 0 else ""
    out.say(
        f"{scores.samples} samples; {100 * scores.shared:.0f} % of the operators' runs shared, "
        f"{formatting.size(scores.kept_bytes)} kept{more}"
    )
    if suggestion is None:
        out.say("no suggestion: the workload has no metric")
        return
    metric = workload.metric
    out.table(
        ["operators in float", f"#{metric}", "#change"],
        [
            ("none", formatting.metric_value(metric, suggestion.before), ""),
            *(
                (
                    f"+ {t.operators[-1]}",
                    formatting.metric_value(metric, t.metric),
                    formatting.metric_change(metric, t.metric - suggestion.before),
                )
                for t in suggestion.trials
            ),
        ],
    )
    if not suggestion.operators:
        out.say("keeping operators in float does not improve the metric")
        return
    names, gain = ", ".join(suggestion.operators), formatting.metric_change(metric, suggestion.gain)
    out.say(f"keep {len(suggestion.operators)} in float: {gain} {metric} ({names})")
    for change in changes:
        out.say(f"  {change}")
    if output is not None:
        out.say(f"{output}: the suggested plan")


def _row(score: SiteScore) -> tuple[str, ...]:
    return (
        score.site,
        score.format,
        "" if score.sqnr_db is None else formatting.decibels(None if score.sqnr_db == float("inf") else score.sqnr_db),
        f"{100 * score.output_error:.3g} %",
        f"{score.cosine_distance:.2g}",
        "" if score.loss_change is None else f"{score.loss_change:+.3g}",
    )
