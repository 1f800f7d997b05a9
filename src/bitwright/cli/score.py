"""`bitwright score`: the accuracy cost of each quantized site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bitwright.cli.options import ReportOption, WorkloadArg, exclude, open_workload, option, require
from bitwright.cli.out import Out
from bitwright.cli.settings import with_choices
from bitwright.cli.verb import verb


@verb(
    "score",
    writes=("output",),
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
    backend: str | None,
    plan: Any,
    choices: Any,
    samples: Annotated[int, option("Samples to score with.", min=1, show_default=True)] = 128,
    top: Annotated[int, option("Sites to show.", min=1, show_default=True)] = 20,
    most: Annotated[
        int, option("Maximum number of operators that the suggestion keeps in float.", min=1, show_default=True)
    ] = 5,
    output: Annotated[
        Path | None, option("Write the suggested plan (with --indicator: the scores) here.", "--output", "-o")
    ] = None,
    indicator: Annotated[str | None, option("Score training kernels by this indicator (`list indicators`).")] = None,
    formats: Annotated[
        str | None,
        option("With --indicator: kernels to score, separated by commas (default: int8).", metavar="KERNELS"),
    ] = None,
    report: ReportOption = None,
) -> None:
    """Quantize one site at a time, measure the error of the outputs and the loss, and suggest a better plan.

    The scores use the evaluation data if the workload has a loss, else its inputs alone. The suggestion is measured
    with the workload's metric. With --indicator, low-precision training kernels are scored instead, for the planners.
    """
    from bitwright.workflows import score_workload, score_workload_operators

    if indicator is not None:  # indicators use the float model
        given = {f"--{name.replace('_', '-')}": value for name, value in choices.items()}
        exclude("--indicator", {"--backend": backend, "--plan": plan, **given, "--report": report})
    elif formats is not None:
        require("--indicator", None, "--formats names its kernels: add --indicator gradient-variance")
    found = open_workload(out, workload)
    if indicator is not None:
        names = [text.strip() for text in (formats or "int8").split(",") if text.strip()]
        with out.progress(f"{indicator} of {', '.join(names)}"):
            scores = score_workload_operators(found, indicator, names, samples=samples)
        if output is not None:
            scores.save(output)
        out.show(scores, output=output, most=top)
        return
    with out.progress("calibrating") as progress:
        result = score_workload(
            found,
            backend=backend,
            plan=plan,
            samples=samples,
            most=most,
            output=output,
            report=report,
            progress=progress,
            **choices,
        )
    out.show(result, output=output, most=top)
