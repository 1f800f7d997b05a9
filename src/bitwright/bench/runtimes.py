"""`compare_runtimes(workload)`: one model on every runtime that runs here, and the fastest of them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bitwright.attach import in_mode, strip
from bitwright.backends import backend as find_backend
from bitwright.batching import first, rebatched, regrouped
from bitwright.deploy import Runtime, available_runtimes, measure_latency, open_runtime
from bitwright.errors import BitwrightError, did_you_mean
from bitwright.graph.tree import as_call
from bitwright.recipe import Quantized, quantize
from bitwright.registry import BACKENDS, RUNTIMES
from bitwright.report import Accuracy, Size, Timing, environment, parity, timing
from bitwright.report.comparison import Comparison, Fastest, OnRuntime, Skipped
from bitwright.workload import Workload, batches, can_measure

log = logging.getLogger("bitwright")
Variant = Literal["float", "quantized"]
_VARIANTS: tuple[Variant, ...] = ("float", "quantized")


@dataclass
class _Opened:
    """One runtime with its artefacts of each batch size."""

    backend: str
    sessions: dict[tuple[Variant, int], Runtime] = field(default_factory=dict)
    sizes: dict[Variant, int] = field(default_factory=dict)


def compare_runtimes(
    workload: Workload,
    runtimes: Iterable[str] | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    threads: int = 1,
    runs: int = 100,
    samples: int | None = None,
    evaluate: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Quantize the workload's model for each runtime by that runtime's own table, and measure all of them in turns.

    What can't run here is in the result's `skipped` with its reason. `samples` bounds calibration and check, not the
    evaluation; without `evaluate` accuracies aren't measured. The model is float again when this returns.
    """
    tell = progress or (lambda text: None)
    skipped: list[Skipped] = []
    opened: dict[str, _Opened] = {}
    rows: dict[str, OnRuntime] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in _wanted(runtimes, skipped):
            tell(f"preparing {name}")
            try:
                found = _Opened(_backend_for(name))
                place = Path(folder) / name
                place.mkdir()
                rows[name] = _prepare(workload, name, found, place, batch_sizes, threads, samples, evaluate, tell)
                opened[name] = found
            except BitwrightError as error:
                skipped.append(Skipped(runtime=name, why=str(error)))
        timings = [row for size in batch_sizes for row in _time(workload, opened, size, threads, runs, tell)]
    results = tuple(
        row.model_copy(update={"timings": tuple(t for t in timings if t.runtime == name)}) for name, row in rows.items()
    )
    return Comparison(
        workload=workload.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(),
        runtimes=results,
        skipped=tuple(skipped),
        fastest=tuple(_fastest(results, timings, size) for size in batch_sizes if results),
    )


def _wanted(runtimes: Iterable[str] | None, skipped: list[Skipped]) -> list[str]:
    found = available_runtimes()
    names = list(found) if runtimes is None else list(runtimes)
    for name in names:
        if name not in found:
            raise BitwrightError("there is no such runtime", value=name, fix=did_you_mean(name, found))
        if found[name] is not None:
            skipped.append(Skipped(runtime=name, why=str(found[name])))
    return [name for name in names if found[name] is None]


def _backend_for(runtime: str) -> str:
    """The table that is made for this runtime; that of ONNX Runtime where there is none."""
    named = [name for name in BACKENDS.names() if find_backend(name).runtime == runtime]
    return runtime if runtime in named else named[0] if named else "onnxruntime"


def _prepare(
    workload: Workload,
    name: str,
    found: _Opened,
    folder: Path,
    batch_sizes: Sequence[int],
    threads: int,
    samples: int | None,
    evaluate: bool,
    tell: Callable[[str], None],
) -> OnRuntime:
    """Quantize, export, check and evaluate on one runtime; its sessions stay open for the timing."""
    quantized = quantize(
        workload.model,
        first(batches(workload.calibration), samples),
        backend=found.backend,
        example=workload.inputs,
        name=workload.name,
        artefact=True,
    )
    try:
        _write(workload, quantized, name, found, folder, batch_sizes, threads, tell)
        session = found.sessions["quantized", batch_sizes[0]]
        tell(f"checking {name}")
        data = rebatched(_inputs(workload, samples), session.batch)
        check = quantized.check(
            _file(folder, "quantized", batch_sizes[0], session), data, runtime=name, threads=threads
        )
    finally:
        strip(workload.model)
    accuracies: list[Accuracy] = []
    if evaluate and can_measure(workload):
        for variant in _VARIANTS:
            tell(f"evaluating {name}, {variant}")
            values = found.sessions[variant, batch_sizes[0]].accuracy(workload)
            count = int(values["n"]) if "n" in values else None
            accuracies.append(
                Accuracy(where=variant, metric=workload.metric, value=values[workload.metric], samples=count)
            )
    return OnRuntime(
        runtime=name,
        backend=found.backend,
        executed=session.executed(),
        sizes=tuple(Size(name=variant, bytes=found.sizes[variant]) for variant in _VARIANTS),
        parity=parity(check),
        accuracies=tuple(accuracies),
        timings=(),
    )


def _file(folder: Path, variant: Variant, batch: int, runtime: Runtime | type[Runtime]) -> Path:
    return folder / (f"{variant}{runtime.suffix}" if runtime.any_batch else f"{variant}-{batch}{runtime.suffix}")


def _write(
    workload: Workload,
    quantized: Quantized,
    name: str,
    found: _Opened,
    folder: Path,
    batch_sizes: Sequence[int],
    threads: int,
    tell: Callable[[str], None],
) -> None:
    kind: type[Runtime] = RUNTIMES.get(name)
    for batch in batch_sizes:
        for variant in _VARIANTS:
            path = _file(folder, variant, batch, kind)
            if not path.exists():
                tell(f"exporting for {name}, {variant}" + ("" if kind.any_batch else f", batch {batch}"))
                inputs = workload.inputs if kind.any_batch else _batch_of(workload, batch)
                if variant == "quantized":
                    kind.write(quantized.model, path, inputs)
                else:
                    with in_mode(quantized.model, "float"):
                        kind.write_float(quantized.model, path, inputs)
                found.sizes[variant] = path.stat().st_size
            found.sessions[variant, batch] = open_runtime(name, path, threads=threads)


def _inputs(workload: Workload, samples: int | None) -> Iterable[Any]:
    if workload.evaluation is not None:
        return first((inputs for inputs, _ in workload.evaluation()), samples)
    return first(batches(workload.calibration), samples)


def _batch_of(workload: Workload, size: int) -> Any:
    return next(rebatched(regrouped(_inputs(workload, size), size), size))


def _time(
    workload: Workload,
    opened: dict[str, _Opened],
    batch: int,
    threads: int,
    runs: int,
    tell: Callable[[str], None],
) -> list[Timing]:
    """All runtimes, float and quantized, in turns on the same samples."""
    args, kwargs = as_call(_batch_of(workload, batch))
    calls: dict[tuple[str, Variant], Callable[[], Any]] = {}
    for name, found in opened.items():
        for variant in _VARIANTS:
            session = found.sessions[variant, batch]
            if session.batch in (None, batch):
                calls[name, variant] = partial(session.run, session.feed(*args, **kwargs))
            else:
                log.warning(
                    "%s isn't timed with batch %d: the model's own code fixes it to %d", name, batch, session.batch
                )
    measured = measure_latency(calls, runs=runs, progress=lambda done: tell(f"timing batch {batch}: {done} of {runs}"))
    return [
        timing(name, variant, batch, threads, latency, yardstick=measured[name, "float"])
        for (name, variant), latency in measured.items()
    ]


def _fastest(results: Iterable[OnRuntime], timings: Iterable[Timing], batch: int) -> Fastest:
    """A quantized artefact that doesn't compute what was promised is no pick, however fast it is."""
    sound = {row.runtime for row in results if row.parity.passed}
    best = min(
        (t for t in timings if t.batch == batch and (t.variant == "float" or t.runtime in sound)),
        key=lambda timing: timing.median_ms,
    )
    return Fastest(batch=batch, runtime=best.runtime, variant=best.variant, median_ms=best.median_ms)
