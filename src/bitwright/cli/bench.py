"""`bitwright bench`: one model on all runtimes of this machine, or a grid of trainings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bitwright.bench import benchmark
from bitwright.bench.comparison import Comparison, LatencyRow, OnRuntime, Together
from bitwright.cli import again, grid
from bitwright.cli.data import open_workload
from bitwright.cli.options import ReportOption, SamplesOption
from bitwright.cli.out import Out
from bitwright.cli.prepared import CheckpointOption, PlanOption, read_plan
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.core import formatting
from bitwright.core.errors import BitwrightError
from bitwright.core.files import write_text
from bitwright.ptq.saved_model import SavedModel
from bitwright.report import add_to_report, report_of


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
    bitwright bench grid.yaml -o leaderboard.json
    bitwright bench mqbench/config.yaml --workload my_workload.py:resnet18
    bitwright bench grid.yaml --show
    bitwright bench grid.yaml -o leaderboard.json --reports reports
    bitwright bench leaderboard.json --row 3f9c --reports reports
    """,
)
def bench(
    out: Out,
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD|GRID.yaml|LEADERBOARD.json",
            help="file.py:function, a name that `bitwright list workloads` has, the file of a grid (docs/grid.md), or "
            "its results.",
        ),
    ],
    runtimes: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between them, or `all` that run here (default: all; of a made model, its own).",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="Measure only this (default: both).", show_default=False)
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch", min=1, help="A batch size; may be given several times (default: 1).", show_default=False
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each runtime (default: 1).", show_default=False)
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Runs of each artefact before the timed ones.")] = 5,
    runs: Annotated[
        int, typer.Option("--runs", "--iterations", min=1, help="Timed runs of each artefact, taking turns.")
    ] = 100,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes at a time, each on cores of its own (default with --cores: as many as fit).",
            show_default=False,
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores of each instance (default with --instances: all, in equal parts).", show_default=False
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="Measure what `bitwright quantize -o FOLDER` has made; don't quantize.", show_default=False
        ),
    ] = None,
    plan: PlanOption = None,
    checkpoint: CheckpointOption = None,
    samples: SamplesOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the figures as JSON.", show_default=False)
    ] = None,
    report: ReportOption = None,
    of_grid: Annotated[
        str | None,
        typer.Option("--workload", help="Of a grid: the model, if the file shall not name it.", show_default=False),
    ] = None,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, help="Of a grid: how often a row that fails is tried in all.", show_default=False),
    ] = None,
    starts: Annotated[
        Path | None,
        typer.Option(help="Of a grid: the folder of float networks (default: beside the store).", show_default=False),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(
            "--row",
            metavar="ID",
            help="Of a leaderboard: run this row again; the id, or how it begins. May be given several times.",
            show_default=False,
        ),
    ] = None,
    reports: Annotated[
        Path | None,
        typer.Option(
            "--reports",
            metavar="FOLDER",
            help="Of a grid or its rows: write the report of each row that runs into FOLDER/ID.",
            show_default=False,
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Of a grid: run nothing, show what is known.")] = False,
) -> None:
    """Measure latency, accuracy, size and agreement of a model, float and INT8, on every runtime that runs here.

    The model is quantized for each runtime, or taken from a folder (--model) or a plan and its checkpoint. Latencies
    are of runs that take turns. Exits with 1 if a runtime diverges from the simulated model.

    With the file of a grid: train every combination of its algorithms, backends, widths, models and seeds, and make a
    leaderboard of what really ran. A grid goes on where it was left; give the command several times, on any machines
    that see its store, to share the work. Exits with 1 if a row failed or is pending, or if all were refused.

    With the leaderboard that a grid has written: run some of its rows again (--row), from their configs and seeds, and
    write their reports. Exits with 1 if a row doesn't come out as the leaderboard says.
    """
    if workload.endswith((*grid.SUFFIXES, again.SUFFIX)):
        others = (runtimes, mode, batch, threads, instances, cores, model, plan, checkpoint, samples, report)
        if any(value is not None for value in others):
            raise BitwrightError(
                "a grid says itself what is measured", fix="leave out all options but --workload, --attempts, -o, …"
            )
        file = Path(workload)
        if file.suffix == again.SUFFIX:
            if attempts is not None or show or output is not None:
                raise BitwrightError("rows are run again, and the file stays as it is", fix="leave out -o, --attempts")
            again.run(out, file, rows=row or [], workload=of_grid, starts=starts, reports=reports)
            return
        if row:
            raise BitwrightError(
                "a grid runs all of its rows", where="--row", fix="give its leaderboard.json, or a grid of that row"
            )
        grid.run(
            out, file, workload=of_grid, attempts=attempts, starts=starts, show=show, output=output, reports=reports
        )
        return
    if any(value is not None for value in (of_grid, attempts, starts, row, reports)) or show:
        raise BitwrightError(
            "--workload, --attempts, --starts, --row, --reports and --show are of grids",
            value=workload,
            fix="give a grid.yaml",
        )
    made = _made(model, plan, checkpoint)
    found = open_workload(out, workload)
    if report is not None:
        report_of(report, found.name)  # one of another workload is an error now, not after the work
    names = None if runtimes in (None, "all") else [name.strip() for name in str(runtimes).split(",")]
    if names is None and runtimes == "all" and made is not None:
        raise BitwrightError(
            "a made model is measured on runtimes that are named", value="all", fix="--runtimes onnxruntime,openvino"
        )
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
            saved=made,
            instances=instances,
            cores=cores,
            progress=progress,
        )
    if output is not None:
        write_text(output, result.model_dump_json(indent=1) + "\n")
    if report is not None:
        add_to_report(report, found.name, comparison=result)
        out.note(f"{report / 'report.html'} has the runtimes")
    _show(out, result)
    if not result.runtimes or any(not row.parity.passed for row in result.runtimes):
        failed = ", ".join(row.runtime for row in result.runtimes if not row.parity.passed) or "every runtime"
        out.stderr.print(f"check failed: {failed} can't run the quantized model as it was simulated")
        raise typer.Exit(CHECK_FAILED)


def _made(model: Path | None, plan: Path | None, checkpoint: Path | None) -> SavedModel | None:
    if model is not None and (plan is not None or checkpoint is not None):
        raise BitwrightError("--model has a plan and a checkpoint", fix="leave out --plan and --checkpoint, or --model")
    if model is not None:
        return SavedModel.read(model)
    if plan is None and checkpoint is None:
        return None
    chosen, state = read_plan(plan, checkpoint)
    return SavedModel(plan=chosen, checkpoint=state)


def _show(out: Out, result: Comparison) -> None:
    out.data(result.model_dump(mode="json"))
    heads = ["runtime", "variant", "metric", "#size", "ran as", "agrees"]
    out.table(heads, [cells for row in result.runtimes for cells in _quality(row)], title=result.workload)
    timings = [timing for row in result.runtimes for timing in row.timings]
    if timings:
        heads = ["runtime", "variant", "#batch", "#p50", "#p90", "#p99", "#of float", "#samples/s"]
        out.table(
            heads, map(_latency, timings), title=f"latency in ms, {formatting.counted(timings[0].threads, 'thread')}"
        )
    if result.together:
        one = result.together[0]
        cores = formatting.counted(len(one.instances[0].cores), "core")
        share = f"{formatting.counted(len(one.instances), 'instance')} × {cores}"
        heads = ["runtime", "variant", "#batch", "instance", "#p50", "#p90", "#p99", "#samples/s", "#of float"]
        rows = [cells for row in result.together for cells in _crowd(row)]
        out.table(heads, rows, title=f"latency in ms and throughput, {share}{'' if one.pinned else ' (not bound)'}")
    for skip in result.skipped:
        out.say(f"skipped {skip.runtime}: {skip.why}")
    for pick in result.fastest:
        speed = f"{pick.median_ms:.3g} ms" if pick.throughput is None else f"{pick.throughput:,.0f} samples/s"
        out.say(f"fastest with batch {pick.batch}: {pick.runtime}, {pick.variant}, {speed}")


def _quality(row: OnRuntime) -> list[tuple[str, ...]]:
    """One line for each variant: what doesn't depend on the batch size."""
    kinds = row.executed_text
    verdict = f"{'yes' if row.parity.passed else 'no'}, {formatting.decibels(row.parity.sqnr_db)}"
    rows: list[tuple[str, ...]] = []
    for size in row.sizes:
        scores = [f"{one.metric} {one.text}" for one in row.accuracies if one.where == size.name]
        told = (kinds, verdict) if size.name == "quantized" else ("float", "")
        rows.append((row.runtime, size.name, ", ".join(scores), formatting.size(size.bytes), *told))
    return rows


def _latency(row: LatencyRow) -> tuple[str, ...]:
    times = [f"{value:.3g}" for value in (row.median_ms, row.p90_ms, row.p99_ms) if value is not None]
    rate = f"{row.batch / row.median_ms * 1e3:,.0f}"
    return (row.runtime, row.variant, str(row.batch), *times, f"{row.ratio:.2f}×", rate)


def _crowd(row: Together) -> list[tuple[str, ...]]:
    """A line for each instance, and one for all of them."""
    name = (row.runtime, row.variant, str(row.batch))
    lines = [
        (
            *name,
            f"cores {','.join(map(str, one.cores))}",
            *_percentiles(one.median_ms, one.p90_ms, one.p99_ms),
            f"{one.throughput:,.0f}",
            "",
        )
        for one in row.instances
    ]
    whole = _percentiles(row.median_ms, row.p90_ms, row.p99_ms)
    return [*lines, (*name, "all", *whole, f"{row.throughput:,.0f}", f"{row.ratio:.2f}×")]


def _percentiles(*values: float) -> tuple[str, ...]:
    return tuple(f"{value:.3g}" for value in values)
