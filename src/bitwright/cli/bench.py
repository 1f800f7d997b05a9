"""`bitwright bench`: compare the runtimes of this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.data import open_workload
from bitwright.cli.options import ReportOption, SamplesOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.prepared import CheckpointOption, PlanOption, read_plan
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.core.errors import BitwrightError


class Mode(StrEnum):
    """What is measured."""

    accuracy = "accuracy"
    performance = "performance"


@verb(
    "bench",
    examples="""
    bitwright bench digits
    bitwright bench my_workload.py:small --runtimes onnxruntime,openvino --batch 1 --batch 16 --threads 2
    bitwright bench digits --model digits-int8 --mode accuracy
    bitwright bench digits --mode performance --instances 2 --cores 1 --batch 32 -o comparison.json
    """,
)
def bench(
    out: Out,
    workload: WorkloadArg,
    runtimes: Annotated[
        str | None,
        typer.Option(
            help="Names separated by commas, or `all` (default: all; for a saved model, the runtime of its plan).",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="Measure only this (default: both).", show_default=False)
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="A batch size; can be repeated (default: 1).", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each runtime (default: 1).", show_default=False)
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before the timed ones.")] = 5,
    runs: Annotated[
        int,
        typer.Option("--runs", "--iterations", min=1, help="Timed runs of each artefact, in turns."),
    ] = 100,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes, each on its own cores (default with --cores: as many as fit).",
            show_default=False,
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores of each process (default with --instances: all, shared equally).", show_default=False
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Measure the model in this output folder of `quantize`.", show_default=False),
    ] = None,
    plan: PlanOption = None,
    checkpoint: CheckpointOption = None,
    samples: SamplesOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.", show_default=False)
    ] = None,
    report: ReportOption = None,
) -> None:
    """Measure latency, accuracy and size of a model, float and quantized, on every runtime that works here.

    The model is quantized for each runtime, or taken from a folder (--model) or from a plan and its checkpoint. Exits
    with 1 if a runtime diverges from the simulated model.
    """
    from bitwright.bench import benchmark
    from bitwright.cli.comparison_tables import show_comparison
    from bitwright.core.files import write_text
    from bitwright.ptq.quantize import SavedModel
    from bitwright.reports import add_to_report, report_of

    saved = None
    if plan is not None or checkpoint is not None:
        if model is not None:
            fix = "leave out --plan and --checkpoint, or --model"
            raise BitwrightError("--model has a plan and a checkpoint", fix=fix, code="ignored-argument")
        chosen, state = read_plan(plan, checkpoint)
        saved = SavedModel(plan=chosen, checkpoint=state)
    elif model is not None:
        saved = SavedModel.read(model)
    found = open_workload(out, workload)
    if report is not None:
        report_of(report, found.name)  # fails now if the report is of another workload
    names = None if runtimes in (None, "all") else [name.strip() for name in str(runtimes).split(",")]
    if runtimes == "all" and saved is not None:
        fix = "--runtimes onnxruntime,openvino"
        raise BitwrightError("name the runtimes for a saved model", value="all", fix=fix, code="no-runtimes")
    with out.progress() as progress:
        result = benchmark(
            found,
            names,
            batch_sizes=batch or [1],
            threads=threads,
            runs=runs,
            warmup=warmup,
            samples=samples,
            evaluate=mode is not Mode.performance,
            time=mode is not Mode.accuracy,
            saved=saved,
            instances=instances,
            cores=cores,
            progress=progress,
        )
    if output is not None:
        write_text(output, result.model_dump_json(indent=1) + "\n")
    if report is not None:
        add_to_report(report, found.name, comparison=result)
        out.note(f"the comparison is in {report / 'report.html'}")
    show_comparison(out, result)
    if not result.runtimes or any(not row.parity.passed for row in result.runtimes):
        failed = ", ".join(row.runtime for row in result.runtimes if not row.parity.passed) or "every runtime"
        out.stderr.print(f"check failed: {failed} can't run the quantized model as it was simulated")
        raise typer.Exit(CHECK_FAILED)
