"""Arguments that several verbs have. A flag means the same in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitwright.core.errors import BitwrightError

if TYPE_CHECKING:
    from bitwright.cli.out import Out
    from bitwright.ptq.quantize import SavedModel
    from bitwright.workload import Workload


def option(help: str, *flags: str, **settings: Any) -> Any:
    """An option of a verb. Its default is shown in the help text only with `show_default`."""
    return typer.Option(*flags, help=help, **{"show_default": False, **settings})


_WORKLOAD = "file.py:function, hf:FOLDER, gguf:FILE, or a name from `bitwright list workloads`."
WorkloadArg = Annotated[str, typer.Argument(metavar="WORKLOAD", help=_WORKLOAD)]
OptionalWorkloadArg = Annotated[str | None, typer.Argument(metavar="WORKLOAD", help=_WORKLOAD, show_default=False)]
FolderOption = Annotated[Path, option("Output folder.", "--output", "-o")]
BackendOption = Annotated[
    str | None,
    option("The target: a name of `bitwright list backends`, or your own table.yaml.", "--backend"),
]
PlanOption = Annotated[Path | None, option("Follow this plan file.", "--plan", metavar="FILE")]
PrecisionOption = Annotated[
    str | None,
    option(
        "int8, int4, w4a8 (4-bit weights, 8-bit activations), w4a16, w8a16 (weights only), w8a8-dynamic or fp8; "
        "other widths work, too. train, predict and profile also take qsync-int8 (kernels).",
        "--precision",
        metavar="NAME",
    ),
]
CheckpointOption = Annotated[Path | None, option("The prepared model's .safetensors.", "--checkpoint", metavar="FILE")]
ModelOption = Annotated[Path | None, option("Instead of --plan and --checkpoint: a `quantize` folder.", "--model")]
WeightsOption = Annotated[
    str | None, option("Format of weights, e.g. int8/channel/sym.", "--weights", metavar="FORMAT")
]
ActivationsOption = Annotated[
    str | None, option("Format of activations, e.g. uint8/tensor/asym.", "--activations", metavar="FORMAT")
]
ObserverOption = Annotated[str | None, option("Range observer of activations.", "--observer", metavar="NAME")]
WeightObserverOption = Annotated[str | None, option("Range observer of weights.", "--weight-observer", metavar="NAME")]
QuantizerOption = Annotated[
    str | None,
    option(
        "Quantizer of activations, and by default of weights: plain, lsq, … (see `bitwright list quantizers`).",
        "--quantizer",
        metavar="NAME",
    ),
]
WeightQuantizerOption = Annotated[str | None, option("Quantizer of weights.", "--weight-quantizer", metavar="NAME")]
KeepFloatOption = Annotated[
    list[str] | None, option("Operators to keep in float; can be repeated.", "--keep-float", metavar="PATTERN")
]
FoldOption = Annotated[
    int | None,
    option("Batch-norm folding: -1 for none, or strategy 0 to 4 (default: 4).", "--fold", metavar="STRATEGY"),
]
FirstLastBitsOption = Annotated[
    int | None,
    option(
        "Bits of the first and the last operator (default: those of the backend; 8 if the precision is lower).",
        "--first-last-bits",
    ),
]
SaturatingOption = Annotated[
    bool | None,
    option(
        "Whether 8-bit products saturate on the machine that will run the model (default: test this machine).",
        "--saturating/--no-saturating",
    ),
]
SamplesOption = Annotated[int | None, option("Use at most this many samples.", "--samples", min=1)]
ReportOption = Annotated[
    Path | None, option("Add the results to the report in this folder.", "--report", metavar="FOLDER")
]
BatchOption = Annotated[int | None, option("Samples per step (default: the loader's, else 64).", "--batch", min=1)]
ChannelsLastOption = Annotated[
    bool, option("Keep images as NHWC in memory, as `train --channels-last` does.", "--channels-last")
]
DataOption = Annotated[
    Path | None,
    option("The folder of images for MQBench's config.yaml, with train and val.", "--data", metavar="FOLDER"),
]
IterationsOption = Annotated[
    int | None, option("Iterations instead of max_iter in MQBench's config.yaml.", "--iterations", min=1)
]
GridWorkloadOption = Annotated[str | None, option("The workload, if the file doesn't name one.", "--workload")]


def open_workload(out: Out, ref: str) -> Workload:
    """Load a workload, with a spinner."""
    with out.progress(f"loading {ref}"):
        from bitwright.workload import open_workload as load

        return load(ref)


def require(flag: str, value: object, fix: str) -> None:
    """Reject a call without this option."""
    if not value:
        raise BitwrightError(f"{flag} is required", fix=fix, code="option-missing")


def exclude(flag: str, others: Mapping[str, object]) -> None:
    """Reject options (flag → value) that `flag` would ignore."""
    given = [name for name, value in others.items() if value not in (None, False, [], {})]
    if given:
        raise BitwrightError(
            f"{flag} would ignore {', '.join(given)}",
            where=flag,
            value=", ".join(given),
            fix=f"leave out {flag}, or the other options",
            code="ignored-option",
        )


def saved_model(model: Path | None, plan: Path | None, checkpoint: Path | None) -> SavedModel:
    """The model in a folder, or that of a plan and a checkpoint."""
    from bitwright.ptq.quantize import SavedModel

    if model is not None:
        exclude("--model", {"--plan": plan, "--checkpoint": checkpoint})
        return SavedModel.read(model)
    fix = "`bitwright quantize WORKLOAD -o DIR` writes both; --model DIR names them together"
    require("--plan", plan, fix)
    require("--checkpoint", checkpoint, fix)
    return SavedModel.of(Path(plan or ""), Path(checkpoint or ""))
