"""`deploy(workload, run, output)`: export a quantized model, check and measure it on real runtimes, write a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

from bitwright.backends import DEFAULT_BACKEND, DEFAULT_RUNTIME
from bitwright.backends import backend as find_backend
from bitwright.bench.comparison import unreliable_latency
from bitwright.core import formatting
from bitwright.core.arguments import strict
from bitwright.core.display import Progress, Summarized, Table, phases
from bitwright.core.errors import BitwrightError, PlanError, Problem, log_warnings
from bitwright.core.output_folder import staged_output, visible_files
from bitwright.core.registry import RUNTIMES
from bitwright.core.tensor_tree import as_call
from bitwright.deployment import (
    Artefact,
    Check,
    Distance,
    Runtime,
    available_runtimes,
    export_float,
    measure_distance,
    measure_latency,
    open_runtime,
)
from bitwright.deployment.checkpoint import checkpoint_file, load_checkpoint
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized, SavedModel, load_prepared
from bitwright.reports import Accuracy, LatencyRow, Record, Size, make_record, parity, timings, write_report
from bitwright.reports.record import float_and_quantized
from bitwright.workload import Workload, can_measure, evaluate, open_workload
from bitwright.workload.data import first, probes, rebatched, regrouped

__all__ = ["Deployment", "deploy"]

log = getLogger("bitwright")
_BATCHES, _RUNS = (1, 64), 100
_THREADS = 1  # a second thread only adds noise on a small model
_SAMPLES = 256  # for the statistics of sites


@strict
@dataclass(frozen=True, kw_only=True)
class Deployment(Summarized):
    """A quantized model in a folder, and its measurements. `deploy` and `quantize_workload` return it.

    >>> import tempfile, torch, bitwright
    >>> x = torch.randn(16, 8)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> workload = bitwright.Workload(name="small", model=model, inputs=(x,), calibration=lambda: [x])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     deployed = bitwright.quantize_workload(workload, f"{folder}/out")
    ...     sorted(deployed.files)
    ['checkpoint.safetensors', 'model.onnx', 'plan.yaml', 'report.html', 'report.json', 'report.md']
    """

    folder: Path
    record: Record
    """The content of report.json: accuracy, size, latency, agreement with the simulation."""
    quantized: Quantized

    @property
    def passed(self) -> bool:
        """Whether all runtimes compute what the simulated model computes."""
        return all(row.passed for row in self.record.parities)

    @property
    def files(self) -> dict[str, Path]:
        """The files in the folder, by name."""
        return {file.name: file for file in visible_files(self.folder)}

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "diverges"
        runtimes = ", ".join(row.runtime for row in self.record.parities) or "no runtime"
        return f"<Deployment {self.record.workload} in {self.folder}: {verdict} on {runtimes}>"

    def summary(self) -> Iterator[Table | str]:
        """Accuracy, size, latency, parity with the runtime and the distance from float."""
        yield Table([self.record.title, "#", ""], list(self._rows()))

    def failures(self) -> list[str]:
        """Runtimes on which the artefact diverges."""
        diverged = [row for row in self.record.parities if not row.passed]
        names = ", ".join(f"{row.runtime} (first at {row.first_divergence or 'the output'})" for row in diverged)
        return [f"the artefact diverges from the simulation on {names}"] if diverged else []

    def _rows(self) -> Iterator[Sequence[object]]:
        record = self.record
        for one in record.accuracies:
            change = None if one is record.accuracies[0] else one.change_from(record.accuracies[0])
            yield f"{one.metric}, {one.where}", one.text, change
        sizes = float_and_quantized(record)
        if sizes is not None:
            before, after = sizes
            share = f"{100 * after.bytes / before.bytes:.0f} % of {formatting.size(before.bytes)} ({before.name})"
            yield "size", formatting.size(after.bytes), share
        for row in record.timings:
            if row.variant == "quantized":
                where = f"latency, {row.runtime}, batch {row.batch}"
                yield where, f"{row.median_ms:.3g} ms", f"{row.rate_text}, {row.ratio_text}"
        for check in record.parities:
            verdict = "agrees" if check.passed else f"diverges, first at {check.first_divergence or 'the output'}"
            yield f"parity, {check.runtime}", verdict, _agreement_text(check.sqnr_db, check.top1_agreement)
        far = record.distance
        if far is not None:
            verdict = "far from float" if far.far else "close to float"
            yield "simulated against float", verdict, _agreement_text(far.sqnr_db, far.top1_agreement)
        yield (
            "quantized sites",
            len(record.sites),
            f"{formatting.counted(len(record.float_operators), 'operator')} left in float",
        )

    def to_dict(self) -> dict[str, Any]:
        """The files and the report as plain data."""
        files = {name: str(file) for name, file in self.files.items()}
        return {"files": files, "report": self.record.model_dump(mode="json")}


def _agreement_text(sqnr_db: float | None, top1: float | None) -> str:
    classes = "" if top1 is None else f", top-1 agrees on {100 * top1:.4g} %"
    return f"{formatting.decibels(sqnr_db)} SQNR{classes}"


@strict
def deploy(
    workload: Workload | str,
    run: str | Path,
    output: str | Path,
    *,
    reference: str | Path | None = None,
    progress: Progress | None = None,
) -> Deployment:
    """Export a trained or quantized model, check it on the real runtime, and measure accuracy and latency.

    `run` is the output folder of `Trainer`, `Quantized.save`, or of the commands `train`, `quantize` and `tune`.
    `reference` has the float weights to compare with: a folder or a file (default: the weights before the training).

    >>> import tempfile, torch, bitwright
    >>> x, folder = torch.randn(16, 8), tempfile.mkdtemp()
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> bitwright.quantize(model, [x], name="small").save(folder + "/run", artefact=False) and None
    >>> workload = bitwright.Workload(name="small", model=torch.nn.Sequential(torch.nn.Linear(8, 4)), inputs=(x,))
    >>> deployed = bitwright.deploy(workload, folder + "/run", folder + "/out")
    >>> deployed.passed, "model.onnx" in deployed.files
    (True, True)
    """
    from bitwright.reports.sections import training_record, weights_before

    begin = phases(progress)
    folder = Path(run)
    if not (folder / "checkpoint.safetensors").is_file() or not (folder / "plan.yaml").is_file():
        what = "the folder doesn't exist" if not folder.is_dir() else "this is not the folder of a quantized run"
        fix = "give the output folder of `bitwright train --precision …` or `bitwright quantize`"
        raise BitwrightError(what, where=str(run), fix=fix, code="no-saved-model")
    saved = SavedModel.read(folder)
    runtimes = usable_runtimes(saved.plan.backend or DEFAULT_BACKEND)
    with staged_output(output) as staged:
        found = open_workload(workload) if isinstance(workload, str) else workload
        weights = reference or weights_before(folder)
        _check_same_model(found, saved.plan, folder)
        if weights is not None:
            load_checkpoint(found.model, checkpoint_file(Path(weights)))
        before = accuracy(found, found.model, "float", begin)
        begin("exporting the float model")
        float_file = export_float(found.model, staged / "model-float.onnx", found.inputs)
        quantized = load_prepared(found, saved.plan, saved.checkpoint)
        record = finish(
            found,
            quantized,
            staged,
            runtimes=runtimes,
            accuracies=before,
            float_size=Size(name="model-float.onnx", bytes=float_file.stat().st_size),
            float_file=float_file,
            training=training_record(folder),
            progress=progress,
        )
    return Deployment(folder=Path(output), record=record, quantized=quantized)


def finish(
    workload: Workload,
    quantized: Quantized,
    folder: Path,
    *,
    runtimes: Iterable[str],
    accuracies: Iterable[Accuracy],
    float_size: Size,
    float_file: Path | None = None,
    seed: int | None = None,
    histograms: bool = True,
    written: Artefact | None = None,
    progress: Progress | None = None,
    **parts: Any,
) -> Record:
    """Save and export the model unless it is `written`, check and evaluate it on `runtimes`, and write the report.

    With `float_file`, the float and the quantized artefact are timed. `parts` are further fields of the record.
    """
    begin, runtimes = phases(progress), list(runtimes)
    artefact = folder / "model.onnx"
    if written is None and not artefact.is_file():
        begin("exporting")
        written = quantized.write(folder)
    measured = [
        row for name in runtimes if float_file for row in _latencies(workload, name, float_file, artefact, begin)
    ]
    scores = [*accuracies, *accuracy(workload, quantized.model, "simulated", begin)]
    checks: list[Check] = []
    for runtime in runtimes:
        begin(f"checking on {runtime}")
        opened = open_runtime(runtime, artefact)
        data = rebatched(probes(workload), opened.batch)
        checks.append(quantized.check(artefact, data, runtime=runtime, per_site=True))
        scores += accuracy(workload, opened, runtime, begin)
    begin("measuring sites")
    # Prefer the evaluation data of the check to the few calibration samples of `quantize`.
    distance = checks[0].distance if checks else quantized.distance
    if distance is None:
        distance = measure_distance(quantized.model, next(iter(probes(workload))))
        log_warnings(distance.warnings)
    unreliable = unreliable_latency(measured)
    log_warnings(unreliable)
    record = make_record(
        quantized,
        first(probes(workload), _SAMPLES),
        workload=workload.name,
        seed=seed,
        accuracies=scores,
        sizes=[float_size, Size(name="model.onnx", bytes=artefact.stat().st_size)],
        timings=measured,
        parities=[parity(check) for check in checks],
        histograms=histograms,
        distance=distance,
        warnings=(*_warnings(quantized, written, checks, distance), *unreliable),
    ).model_copy(update=parts)
    write_report(record, folder)
    return record


def accuracy(workload: Workload, predict: object, where: str, begin: Callable[[str], None]) -> list[Accuracy]:
    """The workload's metric of a model or an open runtime; empty if the workload has no metric."""
    if not can_measure(workload) or not callable(predict):
        return []
    begin(f"evaluating: {where}")
    values = predict.accuracy(workload) if isinstance(predict, Runtime) else evaluate(workload, predict)
    samples = int(values["n"]) if "n" in values else None
    value, lower = values[workload.metric], workload.less_is_better()
    return [Accuracy(where=where, metric=workload.metric, value=value, samples=samples, lower_is_better=lower)]


def usable_runtimes(backend: str) -> list[str]:
    """The runtime on which the ONNX file of a backend is checked: the backend's own if it reads ONNX."""
    table = find_backend(backend)
    runtime = table.runtime or DEFAULT_RUNTIME
    own = runtime in RUNTIMES and RUNTIMES.get(runtime).suffix != ".onnx"
    if own:
        log.info("%s reads other artefacts: `bitwright bench` measures it, `bitwright export` writes them", runtime)
        runtime = DEFAULT_RUNTIME
    if table.artefacts[0] != "qdq":
        if not own:
            log.info("the artefact is not checked: only %s reads %s", table.title, table.artefacts[0])
        return []
    problem = available_runtimes().get(runtime, "it is not registered")
    if problem is not None:
        log.info("the artefact is not checked: %s can't be used here: %s", runtime, problem)
        return []
    return [runtime]


def _latencies(
    workload: Workload, runtime: str, reference: Path, artefact: Path, begin: Callable[[str], None]
) -> list[LatencyRow]:
    """Time both artefacts in turns on real samples, so that other load on the machine affects both."""
    plain, fast = (open_runtime(runtime, path, threads=_THREADS) for path in (reference, artefact))
    rows: list[LatencyRow] = []
    for batch in _BATCHES if fast.batch is None else (fast.batch,):
        args, kwargs = as_call(next(rebatched(regrouped(probes(workload), batch), batch)))
        begin(f"timing on {runtime}, batch {batch}")
        measured = measure_latency(
            {
                "float": partial(plain.run, plain.feed(*args, **kwargs)),
                "quantized": partial(fast.run, fast.feed(*args, **kwargs)),
            },
            runs=_RUNS,
        )
        rows += timings(runtime, batch, _THREADS, float=measured["float"], quantized=measured["quantized"])
    return rows


def _warnings(
    quantized: Quantized, written: Artefact | None, checks: list[Check], distance: Distance
) -> tuple[Problem, ...]:
    """All warnings, one of each code. Those of the checks come first because they are based on evaluation data."""
    given = [*(problem for check in checks for problem in check.warnings), *distance.warnings, *quantized.warnings]
    codes: dict[str | None, Problem] = {}
    for problem in given:
        codes.setdefault(problem.code, problem)
    return (*codes.values(), *(() if written is None else written.warnings))


def _check_same_model(workload: Workload, plan: Plan, run: Path) -> None:
    """Report one problem for a run of another workload, instead of one for each tensor."""
    if plan.model in (None, workload.name):
        return
    try:
        plan.resolve(capture(workload.model, workload.inputs))
    except PlanError as error:
        raise BitwrightError(
            f"this run is of another workload, {plan.model!r}, and its plan doesn't fit {workload.name!r}",
            where=str(run),
            value=f"{formatting.counted(len(error.problems), 'problem')}",
            fix=f"deploy the workload {plan.model!r}, or a run of {workload.name!r}",
            code="other-workload",
        ) from error
