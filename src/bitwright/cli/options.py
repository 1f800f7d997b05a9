"""Arguments that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from bitwright.backends import Choices
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
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="int8, int4 or w4a8 (4-bit weights, 8-bit activations); fewer than 8 bits are simulated by default.",
        show_default=False,
    ),
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
        help="Quantizer of activations, and by default of weights: plain, lsq, … (see `bitwright list quantizers`).",
        show_default=False,
    ),
]
WeightQuantizerOption = Annotated[
    str | None,
    typer.Option("--weight-quantizer", metavar="NAME", help="Quantizer of weights.", show_default=False),
]
KeepFloatOption = Annotated[
    list[str] | None,
    typer.Option("--keep-float", metavar="PATTERN", help="Operators to keep in float; can be repeated."),
]
FoldingOption = Annotated[
    int | None,
    typer.Option(
        "--fold",
        metavar="STRATEGY",
        help="Batch-norm folding: -1 for none, or strategy 0 to 4 (default: 4).",
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
        help="Whether 8-bit products saturate on the machine that will run the model (default: test this machine).",
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
        "can be repeated; steps run in the given order.",
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
        help="Add the results to the report in this folder.",
        show_default=False,
    ),
]


def chosen(plan: Path | None, **options: Any) -> Choices:
    """The plan options that were given. They exclude a plan file."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    if plan is not None and given:
        raise BitwrightError(
            "a plan file and options for making a plan exclude each other",
            value=", ".join(f"--{name.replace('_', '-')}" for name in given),
            fix="change the plan file, or leave out --plan",
            code="ignored-argument",
        )
    return cast("Choices", given)


def load_plan(path: Path | None) -> Plan | None:
    """The plan of a file, if one was given."""
    from bitwright.plan import Plan

    return None if path is None else Plan.load(path)


def target(backend: str | None, plan: Plan | None) -> str:
    """The backend that was asked for, else the plan's own."""
    from bitwright.backends import DEFAULT_BACKEND

    return backend or (plan.backend if plan is not None else None) or DEFAULT_BACKEND
