"""`bitwright score`: which sites suffer, and what keeping the worst in float would bring."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from bitwright.backends import Choices
from bitwright.cli.choosing import with_choices
from bitwright.cli.data import calibration, labelled, open_workload, probes
from bitwright.cli.indicating import FormatsOption, IndicatorOption, refuse_choices, show_indications
from bitwright.cli.options import ReportOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized
from bitwright.ptq.quantize import quantize as quantize_model
from bitwright.report import add_to_report, network, report_of, sensitivity
from bitwright.sensitivity import Scores, SiteScore, Suggestion, suggest
from bitwright.sensitivity import score as score_model
from bitwright.workload import Workload, can_measure, evaluate, loss_of
from bitwright.workload.data import split

_BATCH = 32  # the numbers of one batch are kept: small ones need little memory


@verb(
    "score",
    examples="""
    bitwright score digits
    bitwright score digits --weights int4/channel/sym --backend academic --output better.yaml
    bitwright score my_workload.py:small --plan plan.yaml --samples 512 --top 30
    bitwright score digits --report digits-int8
    bitwright score digits --indicator gradient-variance --formats int8,bf16 --output indications.json
    """,
)
@with_choices
def score(
    out: Out,
    workload: WorkloadArg,
    backend: str,
    plan: Plan | None,
    choices: Choices,
    samples: Annotated[int, typer.Option(min=1, help="Samples to score with.")] = 128,
    top: Annotated[int, typer.Option(min=1, help="Sites to show.")] = 20,
    most: Annotated[int, typer.Option(min=1, help="Operators to keep in float at most, in the suggestion.")] = 5,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the suggested plan (or the indications) here.", show_default=False),
    ] = None,
    indicator: IndicatorOption = None,
    formats: FormatsOption = "int8",
    report: ReportOption = None,
) -> None:
    """Quantize one site at a time, measure what becomes of the outputs and the loss, and suggest a better plan.

    Scored on the workload's evaluation data if it has a loss, else on its inputs alone; the suggestion is measured
    with the workload's own metric. With --indicator, kernels that train in low precision are scored instead, operator
    by operator, for the planners.
    """
    if indicator is not None:
        refuse_choices(plan, choices)
        if report is not None:
            raise BitwrightError("indications have no part in a report", where="--report", fix="leave --indicator out")
    found = open_workload(out, workload)
    if report is not None:
        report_of(report, found.name)  # one of another workload is an error now, not after the work
    if indicator is not None:
        show_indications(out, found, indicator, formats, samples=samples, top=top, output=output)
        return
    if output is not None and not can_measure(found):
        fix = "give the Workload evaluation= or evaluate=, or leave --output out"
        raise BitwrightError("no suggestion can be measured", where=f"workload {found.name!r}", fix=fix)
    with out.progress("calibrating") as progress:
        quantized = quantize_model(
            found.model,
            calibration(found),
            backend=backend,
            plan=plan,
            example=found.inputs,
            name=found.name,
            progress=progress,
            **choices,
        )
    loss = None if found.loss is None or found.evaluation is None else loss_of(found)
    data = probes(found, samples) if loss is None else labelled(found, samples)
    with out.progress("scoring") as progress:
        scores = score_model(quantized.model, split(data, _BATCH), loss=loss, progress=progress)
    suggestion = _suggestion(out, found, quantized, scores, most) if can_measure(found) else None
    if suggestion is not None and output is not None:
        suggestion.plan.save(output)
    if report is not None:
        part = sensitivity(scores, suggestion, found.metric)
        add_to_report(report, found.name, sensitivity=part, graph=network(quantized.graph))
        out.note(f"{report / 'report.html'} has the scores")
    _show(out, found, quantized.plan, scores, suggestion, top=top, output=output)


def _suggestion(out: Out, workload: Workload, quantized: Quantized, scores: Scores, most: int) -> Suggestion:
    def metric(model: nn.Module) -> float:
        return evaluate(workload, model)[workload.metric]

    doubt = workload.direction_note()
    if doubt is not None:
        out.note(doubt)
    with out.progress("measuring suggestions") as progress:
        less = workload.less_is_better()
        return suggest(
            quantized.model, quantized.plan, scores, metric, most=most, lower_is_better=less, progress=progress
        )


def _show(
    out: Out,
    workload: Workload,
    plan: Plan,
    scores: Scores,
    suggestion: Suggestion | None,
    *,
    top: int,
    output: Path | None,
) -> None:
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
        out.say("no suggestion: the workload doesn't say how good a model is")
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
        out.say("nothing is won by keeping operators in float")
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
