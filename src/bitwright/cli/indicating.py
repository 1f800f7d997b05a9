"""`bitwright score --indicator`: the penalty of each operator in the formats of kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright.cli.data import labelled
from bitwright.cli.out import Out
from bitwright.core.errors import BitwrightError
from bitwright.plan import Plan
from bitwright.sensitivity import OperatorScores, score_operators
from bitwright.workload import Workload, loss_of
from bitwright.workload.data import split

_BATCH = 32

IndicatorOption = Annotated[
    str | None,
    typer.Option(
        help="Score kernels of low-precision training with this indicator: gradient-variance, hessian, …",
        show_default=False,
    ),
]
FormatsOption = Annotated[
    str, typer.Option(help="For --indicator: formats with commas between, as int8,int8/stochastic/weight,bf16.")
]


def refuse_choices(plan: Plan | None, choices: Mapping[str, Any]) -> None:
    """Indicators look at the float model: what says how to quantize it has no meaning."""
    given = [name for name, value in choices.items() if value]
    if plan is not None or given:
        value = "--plan" if plan is not None else f"--{given[0].replace('_', '-')}"
        raise BitwrightError("an indicator looks at the float model", value=value, fix="leave it out, or --indicator")


def show_operator_scores(
    out: Out, workload: Workload, indicator: str, formats: str, *, samples: int, top: int, output: Path | None
) -> None:
    """Score, write the file and show the worst operators."""
    where = f"workload {workload.name!r}"
    if workload.loss is None:
        raise BitwrightError("an indicator needs a loss", where=where, fix="give Workload(loss=…)")
    if workload.evaluation is None and workload.training is None:
        fix = "give the Workload evaluation= or training="
        raise BitwrightError("an indicator needs inputs with targets", where=where, fix=fix)
    if workload.evaluation is None:
        out.note("there is no evaluation=: the indicator looks at training data")
    asked = [text.strip() for text in formats.split(",") if text.strip()]
    with out.steps(f"{indicator} of {', '.join(asked)}"):
        data = split(labelled(workload, samples), _BATCH)
        found = score_operators(workload.model, data, loss_of(workload), indicator=indicator, formats=asked)
    if output is not None:
        found.save(output)
    out.data(json.loads(found.to_json()))
    out.table(["operator", *(f"#{text}" for text in asked)], _rows(found, asked, top))
    left = len(found.values) - top
    more = f", {left} more operators with --top" if left > 0 else ""
    out.say(f"{indicator} by {found.samples} samples in {found.seconds:.1f} s of CPU time{more}")
    if output is not None:
        out.say(f"{output}: the sensitivity scores")


def _rows(found: OperatorScores, formats: list[str], top: int) -> list[tuple[str, ...]]:
    worst = sorted(found.values, key=lambda name: -max(found.values[name].values()))
    return [
        (name, *(f"{found.values[name][text]:.3g}" if text in found.values[name] else "" for text in formats))
        for name in worst[:top]
    ]
