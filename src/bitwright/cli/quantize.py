"""`bitwright quantize`: quantize a model into a folder."""

from __future__ import annotations

from typing import Annotated, Any

from bitwright.cli.options import FolderOption, PrecisionOption, SamplesOption, WorkloadArg, option
from bitwright.cli.out import Out
from bitwright.cli.settings import with_choices
from bitwright.cli.verb import verb


@verb(
    "quantize",
    examples="""
    bitwright quantize digits -o digits-int8
    bitwright quantize digits --precision w4a8 -o digits-w4a8
    bitwright quantize my_workload.py:small --observer mse --keep-float 'head*' -o out
    bitwright quantize my_workload.py:small --plan plan.yaml --samples 512 -o out
    bitwright quantize digits --weights int8/tensor/sym --step equalize --step bias-correction -o out
    bitwright quantize digits --weights int4/channel/sym --algorithm adaround:iterations=500 -o out
    """,
)
@with_choices
def quantize(
    out: Out,
    workload: WorkloadArg,
    output: FolderOption,
    backend: str | None,
    plan: Any,
    choices: Any,
    precision: PrecisionOption = None,
    samples: SamplesOption = None,
    step: Annotated[
        list[str] | None,
        option(
            "A PTQ algorithm of `bitwright list steps`, e.g. equalize or adaround:iterations=500; "
            "can be repeated; steps run in the given order.",
            "--step",
            "--algorithm",
            metavar="NAME[:KEY=VALUE,…]",
        ),
    ] = None,
    seed: Annotated[int, option("Random seed of the steps.", min=0, show_default=True)] = 0,
    memory: Annotated[int, option("MiB of activations that steps keep in memory.", min=1, show_default=True)] = 1024,
    histograms: Annotated[
        bool,
        option("Whether the report has a histogram of each site.", "--histograms/--no-histograms", show_default=True),
    ] = True,
) -> None:
    """Quantize a model and write its plan, checkpoint, artefact and report into a folder.

    Accuracy is measured before and after, simulated and on the real runtime, if the workload has a metric. Steps are
    PTQ algorithms that recover accuracy without training. If they are interrupted, rerun the command to resume after
    the last finished layer or block.
    """
    from bitwright.workflows import quantize_workload

    with out.progress(f"loading {workload}") as progress:
        result = quantize_workload(
            workload,
            output,
            backend=backend,
            plan=plan,
            precision=precision,
            samples=samples,
            steps=step or [],
            seed=seed,
            memory=memory,
            histograms=histograms,
            progress=progress,
            **choices,
        )
    out.show(result, output=output)
