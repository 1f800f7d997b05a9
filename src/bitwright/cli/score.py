"""`bitwright score`: the accuracy cost of each quantized site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.cli.choosing import with_choices
from bitwright.cli.data import calibration, labelled, open_workload, probes
from bitwright.cli.options import ReportOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from torch import nn

    from bitwright.ptq.quantize import Quantized
    from bitwright.sensitivity import Scores, Suggestion
    from bitwright.workload import Workload

_BATCH = 32  # the activations of one batch are kept in memory


@verb(
    "score",
    examples="""
    bitwright score digits
    bitwright score digits --weights int4/channel/sym --backend academic --output better.yaml
    bitwright score my_workload.py:small --plan plan.yaml --samples 512 --top 30
    bitwright score digits --report digits-int8
    bitwright score digits --indicator gradient-variance --formats int8,bf16 --output scores.json
    """,
)
@with_choices
def score(
    out: Out,
    workload: WorkloadArg,
    backend: str,
    plan: Any,
    choices: Any,
    samples: Annotated[int, typer.Option(min=1, help="Samples to score with.")] = 128,
    top: Annotated[int, typer.Option(min=1, help="Sites to show.")] = 20,
    most: Annotated[int, typer.Option(min=1, help="Operators to keep in float at most, in the suggestion.")] = 5,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the suggested plan (or the scores) here.", show_default=False),
    ] = None,
    indicator: Annotated[
        str | None,
        typer.Option(help="Score training kernels by this indicator (`list indicators`).", show_default=False),
    ] = None,
    formats: Annotated[
        str, typer.Option(metavar="KERNELS", help="With --indicator: kernels to score, separated by commas.")
    ] = "int8",
    report: ReportOption = None,
) -> None:
    """Quantize one site at a time, measure the error of the outputs and the loss, and suggest a better plan.

    The scores use the evaluation data if the workload has a loss, else its inputs alone. The suggestion is measured
    with the workload's metric. With --indicator, low-precision training kernels are scored instead, for the planners.
    """
    from bitwright.cli.indicating import refuse_choices, show_operator_scores
    from bitwright.cli.score_tables import show_scores
    from bitwright.ptq.quantize import quantize as quantize_model
    from bitwright.reports import add_to_report, network, report_of, sensitivity
    from bitwright.sensitivity import score as score_model
    from bitwright.workload import can_measure, loss_of
    from bitwright.workload.data import split

    if indicator is not None:
        refuse_choices(plan, choices)
        if report is not None:
            raise BitwrightError(
                "a report can't contain scores of an indicator", where="--report", fix="leave --indicator out"
            )
    found = open_workload(out, workload)
    if report is not None:
        report_of(report, found.name)  # one of another workload is an error now, not after the work
    if indicator is not None:
        show_operator_scores(out, found, indicator, formats, samples=samples, top=top, output=output)
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
    show_scores(out, found, quantized.plan, scores, suggestion, top=top, output=output)


def _suggestion(out: Out, workload: Workload, quantized: Quantized, scores: Scores, most: int) -> Suggestion:
    from bitwright.sensitivity import suggest
    from bitwright.workload import evaluate

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
