"""Arguments that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Unpack, cast

import typer

from bitwright.backends import Choices
from bitwright.core.errors import BitwrightError
from bitwright.plan import Plan

WorkloadArg = Annotated[
    str,
    typer.Argument(metavar="WORKLOAD", help="file.py:function, or a name that `bitwright list workloads` has."),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="The target: a name of `bitwright list backends`, or your own table.yaml "
        "(default: what the plan file says, else onnxruntime).",
        show_default=False,
    ),
]
PlanFileOption = Annotated[
    Path | None,
    typer.Option("--plan", help="Use this plan file instead of making a plan.", show_default=False),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", metavar="FORMAT", help="Format of weights, e.g. int8/channel/sym.", show_default=False),
]
ActivationsOption = Annotated[
    str | None,
    typer.Option(
        "--activations",
        metavar="FORMAT",
        help="Format of activations, e.g. uint8/tensor/asym.",
        show_default=False,
    ),
]
ObserverOption = Annotated[
    str | None,
    typer.Option("--observer", metavar="NAME", help="Range observer of activations.", show_default=False),
]
WeightObserverOption = Annotated[
    str | None,
    typer.Option("--weight-observer", metavar="NAME", help="Range observer of weights.", show_default=False),
]
QuantizerOption = Annotated[
    str | None,
    typer.Option(
        "--quantizer",
        metavar="NAME",
        help="Arithmetic of activations, and of weights if nothing else is said: plain, lsq, … "
        "(see `bitwright list quantizers`).",
        show_default=False,
    ),
]
WeightQuantizerOption = Annotated[
    str | None,
    typer.Option("--weight-quantizer", metavar="NAME", help="Arithmetic of weights.", show_default=False),
]
KeepFloatOption = Annotated[
    list[str] | None,
    typer.Option("--keep-float", metavar="PATTERN", help="Operators that stay in float; may be given several times."),
]
FoldingOption = Annotated[
    int | None,
    typer.Option(
        "--fold",
        metavar="STRATEGY",
        help="How batch norms are folded: -1 not at all, 0 to 4 by that strategy (default: 4).",
        show_default=False,
    ),
]
FirstLastBitsOption = Annotated[
    int | None,
    typer.Option(
        "--first-last-bits",
        metavar="N",
        help="Bits of the first and the last operator (default: those of the backend; 8 if the precision is lower).",
        show_default=False,
    ),
]
SaturatingOption = Annotated[
    bool | None,
    typer.Option(
        "--saturating/--no-saturating",
        help="Whether 8-bit products saturate on the machine that will run the model (default: this one is probed).",
        show_default=False,
    ),
]
StepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--step",
        "--algorithm",
        metavar="NAME[:KEY=VALUE,…]",
        help="A PTQ algorithm of `bitwright list steps`, e.g. equalize or adaround:iterations=500; "
        "given several times, they run in this order.",
        show_default=False,
    ),
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", min=1, help="Use at most this many samples.", show_default=False)
]
HistogramsOption = Annotated[
    bool,
    typer.Option("--histograms/--no-histograms", help="Whether the report has a histogram of each site."),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FOLDER",
        help="Add what was found to the report in this folder, or begin one there.",
        show_default=False,
    ),
]


def chosen(plan: Path | None, **options: Unpack[Choices]) -> Choices:
    """The plan options that were given. A plan file has all choices in it: options beside it would do nothing."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    if plan is not None and given:
        raise BitwrightError(
            "a plan file and options for making a plan exclude each other",
            value=", ".join(f"--{name.replace('_', '-')}" for name in given),
            fix="change the plan file, or leave out --plan",
        )
    return cast(Choices, given)


def load_plan(path: Path | None) -> Plan | None:
    """The plan of a file, if one was given."""
    return None if path is None else Plan.load(path)


def target(backend: str | None, plan: Plan | None) -> str:
    """The backend that was asked for, else the plan's own."""
    return backend or (plan.backend if plan is not None else None) or "onnxruntime"
