"""`bitwright bench`: compare the runtimes of this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from bitwright.cli.options import (
    CheckpointOption,
    ModelOption,
    PlanOption,
    ReportOption,
    SamplesOption,
    WorkloadArg,
    open_workload,
    option,
    saved_model,
)
from bitwright.cli.out import Out
from bitwright.cli.verb import verb
from bitwright.core.errors import BitwrightError


class Mode(StrEnum):
    """What is measured."""

    accuracy = "accuracy"
    performance = "performance"


@verb(
    "bench",
    writes=("output",),
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
        option("Names separated by commas, or `all` (default: all; for a saved model, the runtime of its plan)."),
    ] = None,
    mode: Annotated[Mode | None, option("Measure only this (default: both).")] = None,
    batch: Annotated[list[int] | None, option("A batch size; can be repeated (default: 1).", "--batch", min=1)] = None,
    threads: Annotated[int | None, option("Threads of each runtime (default: 1).", min=1)] = None,
    warmup: Annotated[int, option("Runs before the timed ones.", min=0, show_default=True)] = 5,
    runs: Annotated[
        int,
        option("Timed runs of each artefact, in turns.", "--runs", "--iterations", min=1, show_default=True),
    ] = 100,
    instances: Annotated[
        int | None,
        option("Number of processes, each on its own cores (default with --cores: as many as fit).", min=1),
    ] = None,
    cores: Annotated[
        int | None, option("Cores of each process (default with --instances: all, shared equally).", min=1)
    ] = None,
    model: ModelOption = None,
    plan: PlanOption = None,
    checkpoint: CheckpointOption = None,
    samples: SamplesOption = None,
    output: Annotated[Path | None, option("Write the figures as JSON.", "--output", "-o")] = None,
    report: ReportOption = None,
) -> None:
    """Measure latency, accuracy and size of a model, float and quantized, on every runtime that works here.

    The model is quantized for each runtime, or taken from a folder (--model) or from a plan and its checkpoint. Exits
    with 1 if a runtime diverges from the simulated model.
    """
    from bitwright.bench import benchmark
    from bitwright.core.files import write_text
    from bitwright.reports import add_to_report, report_of

    saved = saved_model(model, plan, checkpoint) if model or plan or checkpoint else None
    if runtimes == "all" and saved is not None:
        fix = "--runtimes onnxruntime,openvino"
        raise BitwrightError("name the runtimes for a saved model", value="all", fix=fix, code="no-runtimes")
    found = open_workload(out, workload)
    if report is not None:
        report_of(report, found.name)  # fails now if the report is of another workload
    with out.progress() as progress:
        result = benchmark(
            found,
            None if runtimes in (None, "all") else [name.strip() for name in str(runtimes).split(",")],
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
    out.show(result, output=output)
