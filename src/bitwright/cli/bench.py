"""`bitwright bench`: one model on all runtimes of this machine, and the fastest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.bench import compare_runtimes
from bitwright.cli.data import open_workload
from bitwright.cli.options import SamplesOption, WorkloadArg
from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED, verb
from bitwright.files import write_text
from bitwright.report import words
from bitwright.report.comparison import Comparison, OnRuntime


@verb(
    "bench",
    examples="""
    bitwright bench digits
    bitwright bench my_workload.py:small --runtimes onnxruntime,openvino --batch 1 --batch 16 --threads 2
    bitwright bench digits --runtimes all -o comparison.json
    """,
)
def bench(
    out: Out,
    workload: WorkloadArg,
    runtimes: Annotated[str, typer.Option(help="Names with commas between them, or `all` that run here.")] = "all",
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch", min=1, help="A batch size; may be given several times (default: 1).", show_default=False
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each runtime.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each artefact, taking turns.")] = 100,
    samples: SamplesOption = None,
    evaluate: Annotated[bool, typer.Option(help="Measure accuracy on each runtime.")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the figures as JSON.", show_default=False)
    ] = None,
) -> None:
    """Quantize a model for every runtime that runs here; measure latency, accuracy, size and agreement; pick one.

    Latencies are medians of runs that take turns. Exits with 1 if a runtime diverges from the simulated model.
    """
    found = open_workload(out, workload)
    with out.phases("starting") as phase:
        result = compare_runtimes(
            found,
            None if runtimes == "all" else [name.strip() for name in runtimes.split(",")],
            batch_sizes=batch or [1],
            threads=threads,
            runs=runs,
            samples=samples,
            evaluate=evaluate,
            progress=phase,
        )
    if output is not None:
        write_text(output, result.model_dump_json(indent=1) + "\n")
    _show(out, result)
    if not result.runtimes or any(not row.parity.passed for row in result.runtimes):
        names = ", ".join(row.runtime for row in result.runtimes if not row.parity.passed) or "every runtime"
        out.stderr.print(f"check failed: {names} can't run the quantized model as it was simulated")
        raise typer.Exit(CHECK_FAILED)


def _show(out: Out, result: Comparison) -> None:
    out.data(result.model_dump(mode="json"))
    rows = [cells for row in result.runtimes for cells in _rows(row)]
    heads = ["runtime", "variant", "#batch", "#median", "#10–90 %", "#of float", "#metric", "#size", "ran as", "agrees"]
    out.table(heads, rows, title=f"{result.workload}, {_threads(result)}")
    for skip in result.skipped:
        out.say(f"skipped {skip.runtime}: {skip.why}")
    for pick in result.fastest:
        out.say(f"fastest with batch {pick.batch}: {pick.runtime}, {pick.variant}, {pick.median_ms:.3g} ms")


def _threads(result: Comparison) -> str:
    counts = {timing.threads for row in result.runtimes for timing in row.timings}
    return ", ".join(f"{count} thread{'s' if count > 1 else ''}" for count in sorted(counts))


def _rows(row: OnRuntime) -> list[tuple[str, ...]]:
    scores = {accuracy.where: words.score(accuracy) for accuracy in row.accuracies}
    sizes = {size.name: words.size(size.bytes) for size in row.sizes}
    kinds = "not told" if row.executed is None else ", ".join(f"{n} {kind}" for kind, n in row.executed.items() if n)
    verdict = f"{'yes' if row.parity.passed else 'no'}, {words.decibels(row.parity.sqnr_db)}"
    return [
        (
            row.runtime,
            timing.variant,
            str(timing.batch),
            f"{timing.median_ms:.3g} ms",
            f"{timing.p10_ms:.3g}–{timing.p90_ms:.3g}",
            f"{timing.ratio:.2f}×",
            scores.get(timing.variant, ""),
            sizes[timing.variant],
            kinds if timing.variant == "quantized" else "float",
            verdict if timing.variant == "quantized" else "",
        )
        for timing in row.timings
    ]
