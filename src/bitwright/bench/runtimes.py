"""`compare_runtimes(workload)`: one model on every runtime that runs here, and the fastest of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bitwright.arguments import strict
from bitwright.backends import backend as find_backend
from bitwright.bench.artefacts import VARIANTS, Opened, Settings, Variant, batch_of, open_artefacts
from bitwright.bench.instances import Job, arrange, can_pin, run_together
from bitwright.bench.made import Made
from bitwright.deploy import Runtime, available_runtimes, measure_latency
from bitwright.disk import scratch_folder
from bitwright.errors import BitwrightError, DiskError, did_you_mean
from bitwright.graph.tree import as_call
from bitwright.report import Timing, environment, timing
from bitwright.report.comparison import Comparison, Fastest, OnRuntime, Skipped, Together
from bitwright.workload import Workload, can_measure

log = logging.getLogger("bitwright")


@strict
def compare_runtimes(
    workload: Workload,
    runtimes: Iterable[str] | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    threads: int | None = None,
    runs: int = 100,
    warmup: int = 5,
    samples: int | None = None,
    evaluate: bool = True,
    time: bool = True,
    made: Made | str | Path | None = None,
    instances: int | None = None,
    cores: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Quantize the workload's model for each runtime by that runtime's own table, and measure all of them in turns.

    With `made` (a folder of `bitwright quantize -o`) nothing is quantized: that model is measured, on the runtime that
    its plan is for if no others are named. With `instances` or `cores` so many processes run at a time, each on cores
    of its own; the result then has `together` instead of timings.

    What can't run here is in the result's `skipped` with its reason. `samples` bounds calibration and check, not the
    evaluation; without `evaluate` accuracies aren't measured, without `time` latencies. The model is float again when
    this returns.
    """
    tell = progress or (lambda text: None)
    several = instances is not None or cores is not None
    _refuse(workload, threads=threads, several=several, evaluate=evaluate, time=time)
    places = arrange(instances, cores) if several else []
    made = Made.load(made) if isinstance(made, str | Path) else made
    if made is not None and runtimes is None:
        runtimes = [find_backend(made.plan.backend or "onnxruntime").runtime or "onnxruntime"]
    threads = len(places[0]) if places else threads or 1
    settings = Settings(
        batch_sizes=batch_sizes, threads=threads, samples=samples, evaluate=evaluate, made=made, tell=tell
    )
    skipped: list[Skipped] = []
    opened: dict[str, Opened] = {}
    rows: dict[str, OnRuntime] = {}
    with scratch_folder() as folder:
        for name in _wanted(runtimes, skipped):
            tell(f"preparing {name}")
            place = folder / name
            place.mkdir()
            try:
                opened[name], rows[name] = open_artefacts(workload, name, place, settings)
            except DiskError:
                raise  # says nothing about the runtime
            except BitwrightError as error:
                skipped.append(Skipped(runtime=name, why=str(error)))
        timings: list[Timing] = []
        together: list[Together] = []
        if time and several:
            for name, found in opened.items():
                together += _crowd(workload, name, found, places, runs, warmup, tell)
        elif time:
            for size in batch_sizes:
                timings += _time(workload, opened, size, threads, runs, warmup, tell)
    results = tuple(
        row.model_copy(update={"timings": tuple(t for t in timings if t.runtime == name)}) for name, row in rows.items()
    )
    return Comparison(
        workload=workload.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(),
        runtimes=results,
        skipped=tuple(skipped),
        fastest=tuple(_fastest(results, timings, together)),
        together=tuple(together),
    )


def _refuse(workload: Workload, *, threads: int | None, several: bool, evaluate: bool, time: bool) -> None:
    """What would be found out late, or never."""
    if not time and not evaluate:
        raise BitwrightError("there is nothing to measure", fix="let it evaluate, time, or both")
    if not time and not can_measure(workload):
        raise BitwrightError(
            "nothing says how good the model is",
            where=f"workload {workload.name!r}",
            fix="give the Workload evaluation= or evaluate=",
        )
    if several and threads is not None:
        raise BitwrightError(
            "an instance has as many threads as cores", where="threads", value=threads, fix="say it with --cores alone"
        )
    if several and time and not can_pin():
        log.warning("this system doesn't bind processes to cores: instances run wherever it puts them")


def _wanted(runtimes: Iterable[str] | None, skipped: list[Skipped]) -> list[str]:
    found = available_runtimes()
    names = list(found) if runtimes is None else list(runtimes)
    for name in names:
        if name not in found:
            raise BitwrightError("there is no such runtime", value=name, fix=did_you_mean(name, found))
        if found[name] is not None:
            skipped.append(Skipped(runtime=name, why=str(found[name])))
    return [name for name in names if found[name] is None]


def _sessions(name: str, found: Opened, batch: int) -> Iterator[tuple[Variant, Runtime]]:
    """Those that take this batch size."""
    for variant in VARIANTS:
        session = found.sessions[variant, batch]
        if session.batch in (None, batch):
            yield variant, session
        else:
            log.warning("%s isn't timed with batch %d: the model's own code fixes it to %d", name, batch, session.batch)


def _time(
    workload: Workload,
    opened: dict[str, Opened],
    batch: int,
    threads: int,
    runs: int,
    warmup: int,
    tell: Callable[[str], None],
) -> list[Timing]:
    """All runtimes, float and quantized, in turns on the same samples."""
    args, kwargs = as_call(batch_of(workload, batch))
    calls: dict[tuple[str, Variant], Callable[[], Any]] = {
        (name, variant): partial(session.run, session.feed(*args, **kwargs))
        for name, found in opened.items()
        for variant, session in _sessions(name, found, batch)
    }
    measured = measure_latency(
        calls, runs=runs, warmup=warmup, progress=lambda done: tell(f"timing batch {batch}: {done} of {runs}")
    )
    return [
        timing(name, variant, batch, threads, latency, yardstick=measured[name, "float"])
        for (name, variant), latency in measured.items()
    ]


def _crowd(
    workload: Workload,
    name: str,
    found: Opened,
    places: Sequence[tuple[int, ...]],
    runs: int,
    warmup: int,
    tell: Callable[[str], None],
) -> list[Together]:
    """One runtime in several processes; all batch sizes, float and quantized, in turns."""
    tell(f"starting {len(places)} instances of {name}")
    jobs: list[Job] = []
    for batch in sorted({batch for _, batch in found.sessions}):
        args, kwargs = as_call(batch_of(workload, batch))
        for variant, session in _sessions(name, found, batch):
            feed = session.feed(*args, **kwargs)
            jobs.append(Job(variant=variant, batch=batch, artefact=found.files[variant, batch], feed=feed))
    return run_together(
        name, jobs, places, runs=runs, warmup=warmup, progress=lambda done: tell(f"timing {name}: {done} of {runs}")
    )


def _fastest(
    results: Iterable[OnRuntime], timings: Iterable[Timing], together: Iterable[Together]
) -> Iterator[Fastest]:
    """A quantized artefact that doesn't compute what was promised is no pick, however fast it is."""
    sound = {row.runtime for row in results if row.parity.passed}
    measured: list[Timing | Together] = [*timings, *together]
    rows = [row for row in measured if row.variant == "float" or row.runtime in sound]
    for batch in dict.fromkeys(row.batch for row in rows):
        best = min((row for row in rows if row.batch == batch), key=_cost)
        yield Fastest(
            batch=batch,
            runtime=best.runtime,
            variant=best.variant,
            median_ms=best.median_ms,
            throughput=best.throughput if isinstance(best, Together) else None,
        )


def _cost(row: Timing | Together) -> float:
    """What is less where it is faster: milliseconds of one process, seconds per sample of several."""
    return row.median_ms if isinstance(row, Timing) else 1 / row.throughput
