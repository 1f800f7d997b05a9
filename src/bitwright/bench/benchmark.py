"""`benchmark(workload)`: measure a model on every available runtime."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bitwright.backends import DEFAULT_BACKEND, DEFAULT_RUNTIME
from bitwright.backends import backend as find_backend
from bitwright.bench.comparison import (
    Accuracy,
    Comparison,
    Fastest,
    GenerationRow,
    LatencyRow,
    OnRuntime,
    Size,
    Skipped,
    Together,
    parity,
    timing,
)
from bitwright.bench.instances import Job, ModelVariant, arrange, can_pin, run_together
from bitwright.core.arguments import Amount, Count, strict
from bitwright.core.display import Progress, phases
from bitwright.core.environment import environment
from bitwright.core.errors import BitwrightError, DiskError, did_you_mean
from bitwright.core.files import scratch_folder
from bitwright.core.registry import BACKENDS, RUNTIMES
from bitwright.core.tensor_tree import as_array, as_call, tensors_in
from bitwright.deployment import Runtime, available_runtimes, measure_latency, open_runtime
from bitwright.deployment.decoder import is_decoder
from bitwright.deployment.measurement import measure_generation, peak_memory
from bitwright.ptq.quantize import Quantized, SavedModel, load_prepared, quantize
from bitwright.quantizers import strip
from bitwright.workload import Workload, batches, can_measure, pairs
from bitwright.workload.data import first, rebatched, regrouped

VARIANTS: tuple[ModelVariant, ...] = ("float", "quantized")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a benchmark, which are the same for all runtimes."""

    batch_sizes: Sequence[int]
    threads: int
    samples: int | None
    evaluate: bool
    saved: SavedModel | None
    tell: Callable[[str], None]


@dataclass
class Opened:
    """One runtime with its artefacts for each batch size."""

    backend: str
    sessions: dict[tuple[ModelVariant, int], Runtime] = field(default_factory=dict)
    files: dict[tuple[ModelVariant, int], Path] = field(default_factory=dict)
    sizes: dict[ModelVariant, int] = field(default_factory=dict)


def open_artefacts(workload: Workload, name: str, folder: Path, settings: Settings) -> tuple[Opened, OnRuntime]:
    """Quantize (or load the saved model), export, check and evaluate on one runtime. Its sessions stay open."""
    saved = settings.saved
    opened = Opened(_backend_for(name) if saved is None else saved.plan.backend or DEFAULT_BACKEND)
    batch = settings.batch_sizes[0]
    # Float comes first, because the saved model may have other weights (QAT, AdaRound).
    _write(workload, workload.model, "float", name, opened, folder, settings)
    with _quantized(workload, opened.backend, settings) as quantized:
        _write(workload, quantized.model, "quantized", name, opened, folder, settings)
        session = opened.sessions["quantized", batch]
        settings.tell(f"checking {name}")
        data = rebatched(inputs_of(workload, settings.samples), session.batch)
        file = opened.files["quantized", batch]
        check = quantized.check(file, data, runtime=name, threads=settings.threads)
    return opened, OnRuntime(
        runtime=name,
        backend=opened.backend,
        executed=session.executed(),
        left_in_float=session.left_in_float(),
        sizes=tuple(Size(name=variant, bytes=opened.sizes[variant]) for variant in VARIANTS),
        parity=parity(check),
        accuracies=tuple(_accuracies(workload, name, opened, batch, settings.tell)) if settings.evaluate else (),
        timings=(),
    )


def _backend_for(runtime: str) -> str:
    """The backend of this runtime; by default that of ONNX Runtime."""
    named = [name for name in BACKENDS.names() if find_backend(name).runtime == runtime]
    return runtime if runtime in named else named[0] if named else DEFAULT_BACKEND


@contextmanager
def _quantized(workload: Workload, backend: str, settings: Settings) -> Iterator[Quantized]:
    """The quantized model. The workload's model is float again at the end."""
    saved = settings.saved
    if saved is not None:
        yield load_prepared(replace(workload, model=copy.deepcopy(workload.model)), saved.plan, saved.checkpoint)
        return
    try:
        yield quantize(
            workload.model,
            first(batches(workload.calibration), settings.samples),
            backend=backend,
            example=workload.inputs,
            name=workload.name,
            artefact=True,
            measure=False,  # `check` measures the distance
        )
    finally:
        strip(workload.model)


def _write(
    workload: Workload, model: Any, variant: ModelVariant, name: str, opened: Opened, folder: Path, settings: Settings
) -> None:
    kind: type[Runtime] = RUNTIMES.get(name)
    given = settings.saved.artefact if settings.saved is not None and variant == "quantized" else None
    for batch in settings.batch_sizes:
        if given is not None and given.suffix == kind.suffix:
            path = given  # measure the file that will be served
        else:
            path = (
                folder / variant / "model.onnx"
                if kind.suffix == ".onnx" and is_decoder(model)
                else folder / (f"{variant}{kind.suffix}" if kind.any_batch else f"{variant}-{batch}{kind.suffix}")
            )
            if not path.exists():
                settings.tell(f"exporting for {name}, {variant}" + ("" if kind.any_batch else f", batch {batch}"))
                inputs = workload.inputs if kind.any_batch else batch_of(workload, batch)
                (kind.write if variant == "quantized" else kind.write_float)(model, path, inputs)
        opened.files[variant, batch] = path
        opened.sizes[variant] = kind.size(path)
        opened.sessions[variant, batch] = open_runtime(name, path, threads=settings.threads)


def _accuracies(
    workload: Workload, name: str, opened: Opened, batch: int, tell: Callable[[str], None]
) -> Iterator[Accuracy]:
    """All metrics of the workload, its own metric first."""
    for variant in VARIANTS if can_measure(workload) else ():
        tell(f"evaluating {name}, {variant}")
        values = opened.sessions[variant, batch].accuracy(workload)
        count = int(values["n"]) if "n" in values else None
        for metric in sorted(values.keys() - {"n"}, key=lambda key: (key != workload.metric, list(values).index(key))):
            lower = workload.less_is_better(metric)
            yield Accuracy(where=variant, metric=metric, value=values[metric], samples=count, lower_is_better=lower)


def inputs_of(workload: Workload, samples: int | None) -> Iterable[Any]:
    """Inputs of the evaluation data, or of the calibration data if there is none."""
    if workload.evaluation is not None:
        return first((inputs for inputs, _ in pairs(workload)), samples)
    return first(batches(workload.calibration), samples)


def batch_of(workload: Workload, size: int) -> Any:
    """One batch of real samples."""
    return next(rebatched(regrouped(inputs_of(workload, size), size), size))


log = logging.getLogger("bitwright")


@strict
def benchmark(
    workload: Workload,
    runtimes: Iterable[str] | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    threads: Count | None = None,
    runs: Count = 100,
    warmup: Amount = 5,
    samples: Count | None = None,
    evaluate: bool = True,
    time: bool = True,
    saved: SavedModel | str | Path | None = None,
    instances: Count | None = None,
    cores: Count | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Quantize the workload's model for each runtime with that runtime's backend, and measure all of them in turns.

    `saved` is an output folder of `Quantized.save` or `bitwright quantize`: its model is measured instead, by default
    on the runtime of its plan. `instances` processes run at the same time, each on its own `cores` cores. The result
    then has `together` instead of timings.

    Runtimes that are not available are in the result's `skipped` with the reason. `samples` limits calibration and
    check, but not the evaluation. ``evaluate=False`` omits accuracies, ``time=False`` omits latencies. The workload's
    model is float again afterwards.

    >>> import torch
    >>> workload = Workload(
    ...     name="tiny",
    ...     model=torch.nn.Linear(8, 4),
    ...     inputs=(torch.zeros(1, 8),),
    ...     calibration=lambda: [torch.linspace(-1, 1, 32).reshape(4, 8)],
    ... )
    >>> comparison = benchmark(workload, ["onnxruntime"], evaluate=False, runs=5)
    >>> comparison.runtimes[0].executed
    {'int8': 1, 'float': 0}
    """
    tell = phases(progress)
    several = instances is not None or cores is not None
    _refuse(workload, threads=threads, several=several, evaluate=evaluate, time=time)
    places = arrange(instances, cores) if several else []
    saved = SavedModel.read(saved) if isinstance(saved, str | Path) else saved
    if saved is not None and runtimes is None:
        runtimes = [find_backend(saved.plan.backend or DEFAULT_BACKEND).runtime or DEFAULT_RUNTIME]
    threads = len(places[0]) if places else threads or 1
    settings = Settings(
        batch_sizes=batch_sizes, threads=threads, samples=samples, evaluate=evaluate, saved=saved, tell=tell
    )
    skipped: list[Skipped] = []
    opened: dict[str, Opened] = {}
    rows: dict[str, OnRuntime] = {}
    with scratch_folder() as folder:
        for name in _wanted(runtimes, skipped, decoder=is_decoder(workload.model)):
            tell(f"preparing {name}")
            place = folder / name
            place.mkdir()
            try:
                opened[name], rows[name] = open_artefacts(workload, name, place, settings)
            except DiskError:
                raise  # unrelated to the runtime
            except BitwrightError as error:
                skipped.append(Skipped(runtime=name, why=str(error)))
        generation: list[GenerationRow] = []
        if time and is_decoder(workload.model):
            generation = _generate(workload, opened, batch_sizes[0], threads, tell)
        timings: list[LatencyRow] = []
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
        generation=tuple(generation),
    )


def _refuse(workload: Workload, *, threads: int | None, several: bool, evaluate: bool, time: bool) -> None:
    """Reject contradicting arguments before any work."""
    if not time and not evaluate:
        raise BitwrightError(
            "there is nothing to measure", fix="use evaluate, time, or both", code="nothing-to-measure"
        )
    if not time and not can_measure(workload):
        raise BitwrightError(
            "the workload has no evaluation",
            where=f"workload {workload.name!r}",
            fix="pass Workload(evaluation=...) or Workload(evaluate=...)",
            code="no-evaluation",
        )
    if several and threads is not None:
        raise BitwrightError(
            "threads can't be combined with instances, which use one thread per core",
            where="threads",
            value=threads,
            fix="use only --cores",
            code="contradicting-arguments",
        )
    if several and time and not can_pin():
        log.warning("this system can't bind processes to cores: instances share all cores")


def _wanted(runtimes: Iterable[str] | None, skipped: list[Skipped], *, decoder: bool) -> list[str]:
    found = available_runtimes()
    usual = [name for name in found if decoder or found[name] is not None or not RUNTIMES.get(name).decoders_only]
    names = usual if runtimes is None else list(runtimes)
    for name in names:
        if name not in found:
            raise BitwrightError("unknown runtime", value=name, fix=did_you_mean(name, found), code="unknown-name")
        if found[name] is not None:
            skipped.append(Skipped(runtime=name, why=str(found[name])))
    return [name for name in names if found[name] is None]


def _sessions(name: str, found: Opened, batch: int) -> Iterator[tuple[ModelVariant, Runtime]]:
    """The sessions that accept this batch size."""
    for variant in VARIANTS:
        session = found.sessions[variant, batch]
        if session.batch in (None, batch):
            yield variant, session
        else:
            log.warning("%s isn't timed with batch %d: the model only accepts %d", name, batch, session.batch)


def _time(
    workload: Workload,
    opened: dict[str, Opened],
    batch: int,
    threads: int,
    runs: int,
    warmup: int,
    tell: Callable[[str], None],
) -> list[LatencyRow]:
    """All runtimes, float and quantized, in turns on the same samples."""
    args, kwargs = as_call(batch_of(workload, batch))
    calls: dict[tuple[str, ModelVariant], Callable[[], Any]] = {
        (name, variant): partial(session.run, session.feed(*args, **kwargs))
        for name, found in opened.items()
        for variant, session in _sessions(name, found, batch)
    }
    measured = measure_latency(
        calls,
        runs=runs,
        warmup=warmup,
        progress=lambda done, total, _: tell(f"timing batch {batch}: {done} of {total}"),
    )
    return [
        timing(name, variant, batch, threads, latency, yardstick=measured[name, "float"])
        for (name, variant), latency in measured.items()
    ]


def _generate(
    workload: Workload, opened: dict[str, Opened], batch: int, threads: int, tell: Callable[[str], None]
) -> list[GenerationRow]:
    """Prompts and generated tokens of all decoders in turns, and the memory of each in a process of its own."""
    args, kwargs = as_call(batch_of(workload, 1))
    ids = next(tensor for _, tensor in tensors_in((args, kwargs)))
    sessions = {
        (name, variant): found.sessions[variant, batch] for name, found in opened.items() for variant in VARIANTS
    }
    speeds = measure_generation(
        sessions, as_array(ids), progress=lambda done, total, _: tell(f"generating tokens: {done} of {total}")
    )
    rows = []
    for (name, variant), speed in speeds.items():
        tell(f"measuring the memory of {name}, {variant}")
        feed = sessions[name, variant].feed(*args, **kwargs)
        memory = peak_memory(name, opened[name].files[variant, batch], feed, threads=threads)
        row = GenerationRow(
            runtime=name,
            variant=variant,
            prompt=speed.prompt,
            threads=threads,
            prefill=speed.prefill,
            decode=speed.decode,
            spread=speed.spread,
            memory=memory,
        )
        rows.append(row)
    return rows


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
        name,
        jobs,
        places,
        runs=runs,
        warmup=warmup,
        progress=lambda done, total, _: tell(f"timing {name}: {done} of {total}"),
    )


def _fastest(
    results: Iterable[OnRuntime], timings: Iterable[LatencyRow], together: Iterable[Together]
) -> Iterator[Fastest]:
    """A quantized artefact that differs from its simulation is never recommended, however fast it is."""
    sound = {row.runtime for row in results if row.parity.passed}
    measured: list[LatencyRow | Together] = [*timings, *together]
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


def _cost(row: LatencyRow | Together) -> float:
    """The cost to minimize: milliseconds of one process, or seconds per sample of several."""
    return row.median_ms if isinstance(row, LatencyRow) else 1 / row.throughput
