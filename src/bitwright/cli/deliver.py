"""From a quantized model to a folder: plan, artefact, checkpoint, and a report of what they are worth."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from bitwright.cli.data import probes
from bitwright.cli.out import Out
from bitwright.cli.verb import CHECK_FAILED
from bitwright.core import formatting
from bitwright.core.errors import Problem, log_warnings
from bitwright.core.output_folder import visible
from bitwright.core.tensor_tree import as_call
from bitwright.deploy import Artefact, Check, Distance, Runtime, measure_distance, measure_latency, open_runtime
from bitwright.deploy.checkpoint import save_checkpoint
from bitwright.ptq.quantize import Quantized
from bitwright.report import Accuracy, LatencyRow, Record, Size, make_record, parity, timings
from bitwright.report import write_report as write_files
from bitwright.report.formatting import float_and_quantized
from bitwright.workload import Workload, can_measure, measure
from bitwright.workload.data import first, rebatched, regrouped

_BATCHES, _RUNS = (1, 64), 100
_THREADS = 1  # on a small model a second thread only adds noise
_LOOKED_AT = 256  # samples; enough for shares and ratios, quick for large models


def evaluate(out: Out, workload: Workload, predict: object, where: str) -> list[Accuracy]:
    """The workload's metric, or nothing if the workload has none."""
    if not can_measure(workload) or not callable(predict):
        return []
    with out.steps(f"evaluating: {where}"):
        values = predict.accuracy(workload) if isinstance(predict, Runtime) else measure(workload, predict)
    samples = int(values["n"]) if "n" in values else None
    value, lower = values[workload.metric], workload.less_is_better()
    return [Accuracy(where=where, metric=workload.metric, value=value, samples=samples, lower_is_better=lower)]


def write_artefacts(out: Out, quantized: Quantized, folder: Path) -> Artefact:
    """Plan, checkpoint and model."""
    with out.steps("exporting"):
        quantized.plan.save(folder / "plan.yaml")
        save_checkpoint(quantized.model, folder / "checkpoint.safetensors")
        return quantized.export(folder / "model.onnx")


def latencies(out: Out, workload: Workload, runtime: str, reference: Path, artefact: Path) -> list[LatencyRow]:
    """Float and quantized in turns on real samples, so that a busy machine disturbs both alike."""
    plain, fast = (open_runtime(runtime, path, threads=_THREADS) for path in (reference, artefact))
    rows: list[LatencyRow] = []
    for batch in _BATCHES if fast.batch is None else (fast.batch,):
        args, kwargs = as_call(next(rebatched(regrouped(probes(workload), batch), batch)))
        with out.steps(f"timing on {runtime}, batch {batch}", _RUNS) as step:
            measured = measure_latency(
                {
                    "float": partial(plain.run, plain.feed(*args, **kwargs)),
                    "quantized": partial(fast.run, fast.feed(*args, **kwargs)),
                },
                runs=_RUNS,
                progress=step,
            )
        rows += timings(runtime, batch, _THREADS, float=measured["float"], quantized=measured["quantized"])
    return rows


def write_report(
    out: Out,
    workload: Workload,
    quantized: Quantized,
    folder: Path,
    *,
    runtimes: Iterable[str],
    accuracies: Iterable[Accuracy],
    float_size: Size,
    timings: Iterable[LatencyRow] = (),
    seed: int | None = None,
    histograms: bool = True,
    written: Artefact | None = None,
    **parts: Any,
) -> Record:
    """Check the artefact on real runtimes, evaluate it there, and write the report; `parts` are the verb's own."""
    artefact = folder / "model.onnx"
    scores = [*accuracies, *evaluate(out, workload, quantized.model, "simulated")]
    checks: list[Check] = []
    for runtime in runtimes:
        with out.steps(f"checking on {runtime}"):
            opened = open_runtime(runtime, artefact)
            data = rebatched(probes(workload), opened.batch)
            checks.append(quantized.check(artefact, data, runtime=runtime, per_site=True))
        scores += evaluate(out, workload, opened, runtime)
    with out.steps("looking at sites"):
        # evaluation data says more than the few calibration samples that `quantize` looked at
        distance = checks[0].distance if checks else quantized.distance
        if distance is None:
            distance = measure_distance(quantized.model, next(iter(probes(workload))))
            log_warnings(distance.warnings)
        record = make_record(
            quantized,
            first(probes(workload), _LOOKED_AT),
            workload=workload.name,
            seed=seed,
            accuracies=scores,
            sizes=[float_size, Size(name="model.onnx", bytes=artefact.stat().st_size)],
            timings=timings,
            parities=[parity(check) for check in checks],
            histograms=histograms,
            distance=distance,
            warnings=_noted(quantized, written, checks, distance),
        ).model_copy(update=parts)
    write_files(record, folder)
    return record


def _noted(
    quantized: Quantized, written: Artefact | None, checks: list[Check], distance: Distance
) -> tuple[Problem, ...]:
    """All warnings, each kind once: those of the checks have evaluation data, so they come before `quantize`'s."""
    given = [*(problem for check in checks for problem in check.warnings), *distance.warnings, *quantized.warnings]
    codes: dict[str | None, Problem] = {}
    for problem in given:
        codes.setdefault(problem.code, problem)
    return (*codes.values(), *(() if written is None else written.warnings))


def show(out: Out, record: Record, folder: Path) -> None:
    """The summary, where the files are, and the exit code if a runtime diverged."""
    files = {file.name: str(file) for file in visible(folder)}
    out.data({"files": files, "report": record.model_dump(mode="json")})
    rows: list[tuple[str, str, str]] = []
    for accuracy in record.accuracies:
        rows.append(
            (
                f"{accuracy.metric}, {accuracy.where}",
                accuracy.text,
                "" if accuracy is record.accuracies[0] else accuracy.change_from(record.accuracies[0]),
            )
        )
    sizes = float_and_quantized(record)
    if sizes is not None:
        share = f"{100 * sizes[1].bytes / sizes[0].bytes:.0f} % of {formatting.size(sizes[0].bytes)} ({sizes[0].name})"
        rows.append(("size", formatting.size(sizes[1].bytes), share))
    for timing in record.timings:
        if timing.variant == "quantized":
            where = f"latency, {timing.runtime}, batch {timing.batch}"
            rows.append((where, f"{timing.median_ms:.3g} ms", f"{timing.rate_text}, {timing.ratio_text}"))
    for row in record.parities:
        agreement = "" if row.top1_agreement is None else f"top-1 agrees on {100 * row.top1_agreement:.4g} %"
        verdict = "agrees" if row.passed else f"diverges, first at {row.first_divergence or 'the output'}"
        rows.append(
            (
                f"parity, {row.runtime}",
                verdict,
                f"{formatting.decibels(row.sqnr_db)} SQNR, {agreement}".rstrip(", "),
            )
        )
    if record.distance is not None:
        far = record.distance
        agreement = "" if far.top1_agreement is None else f", top-1 agrees on {100 * far.top1_agreement:.4g} %"
        text = f"{formatting.decibels(far.sqnr_db)} SQNR{agreement}"
        rows.append(("simulated against float", "far from float" if far.far else "close to float", text))
    rows.append(("quantized sites", str(len(record.sites)), f"{len(record.float_operators)} operators left in float"))
    out.table([record.title, "#", ""], rows)
    for file in files.values():
        out.say(f"  {file}")
    diverged = [row for row in record.parities if not row.passed]
    if diverged:
        names = ", ".join(f"{row.runtime} (first at {row.first_divergence or 'the output'})" for row in diverged)
        out.stderr.print(f"check failed: the artefact diverges from the simulation on {names}")
        raise typer.Exit(CHECK_FAILED)
