"""`bitwright quantize`: quantize a model into a folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bitwright.cli.options import OptionalWorkloadArg, PrecisionOption, SamplesOption, exclude, option, require
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
    bitwright quantize --config mqbench/r18_8_8.yaml --data imagenet -o out
    """,
)
@with_choices
def quantize(
    out: Out,
    backend: str | None,
    plan: Any,
    choices: Any,
    workload: OptionalWorkloadArg = None,
    output: Annotated[Path | None, option("Output folder.", "--output", "-o")] = None,
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
    config: Annotated[
        Path | None,
        option(
            "Run this file of MQBench's toolkit, instead of WORKLOAD and other options.", "--config", metavar="FILE"
        ),
    ] = None,
    blockwise: Annotated[bool, option("Read and write weights of hf:FOLDER by blocks.", "--blockwise")] = False,
    data: Annotated[
        Path | None, option("With --config: the folder of images or texts.", "--data", metavar="FOLDER")
    ] = None,
    checkpoint: Annotated[
        Path | None, option("With --config: the float weights, or a folder of a text model.", "--checkpoint")
    ] = None,
    iterations: Annotated[
        int | None, option("With --config: optimizer steps for each layer or block.", "--iterations", min=1)
    ] = None,
    histograms: Annotated[
        bool,
        option("Whether the report has a histogram of each site.", "--histograms/--no-histograms", show_default=True),
    ] = True,
) -> None:
    """Quantize a model and write its plan, checkpoint, artefact and report into a folder.

    Accuracy is measured before and after, simulated and on the real runtime, if the workload has a metric. Steps are
    PTQ algorithms that recover accuracy without training. If they are interrupted, rerun the command to resume after
    the last finished layer or block. --blockwise is for models that don't fit into memory: it writes only weights.
    """
    if config is not None:
        given = {"WORKLOAD": workload, "--backend": backend, "--plan": plan, "--precision": precision}
        exclude("--config", {**given, "--samples": samples, "--step": step, "other options": list(choices)})
        from bitwright.workflows import quantize_mqbench

        with out.progress(f"reading {config}") as progress:
            run = quantize_mqbench(
                config, output, data=data, checkpoint=checkpoint, iterations=iterations, progress=progress
            )
        out.show(run)
        return
    exclude("WORKLOAD", {"--data": data, "--checkpoint": checkpoint, "--iterations": iterations})
    require("WORKLOAD", workload, "bitwright quantize WORKLOAD -o FOLDER, or --config FILE")
    require("--output", output, "--output FOLDER")
    assert workload is not None and output is not None
    from bitwright import quantize_folder, quantize_workload  # imports torch, so later than the checks

    with out.progress(f"loading {workload}") as progress:
        folder = partial(quantize_folder, steps=step or ())
        function: Any = folder if blockwise else partial(quantize_workload, steps=step or None, histograms=histograms)
        result: Any = function(
            workload,
            output,
            backend=backend,
            plan=plan,
            precision=precision,
            samples=samples,
            seed=seed,
            memory=memory,
            progress=progress,
            **choices,
        )
    out.show(result, output=output)
