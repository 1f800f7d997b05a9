"""One runtime's artefacts of a workload, float and quantized: written, opened, checked and evaluated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bitwright.attach import strip
from bitwright.backends import backend as find_backend
from bitwright.batching import first, rebatched, regrouped
from bitwright.bench.made import Made, load_prepared
from bitwright.deploy import Runtime, open_runtime
from bitwright.recipe import Quantized, quantize
from bitwright.registry import BACKENDS, RUNTIMES
from bitwright.report import Accuracy, Size, parity
from bitwright.report.comparison import OnRuntime
from bitwright.workload import Workload, batches, can_measure, pairs

Variant = Literal["float", "quantized"]
VARIANTS: tuple[Variant, ...] = ("float", "quantized")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, and how; the same for all runtimes."""

    batch_sizes: Sequence[int]
    threads: int
    samples: int | None
    evaluate: bool
    made: Made | None
    tell: Callable[[str], None]


@dataclass
class Opened:
    """One runtime with its artefacts of each batch size."""

    backend: str
    sessions: dict[tuple[Variant, int], Runtime] = field(default_factory=dict)
    files: dict[tuple[Variant, int], Path] = field(default_factory=dict)
    sizes: dict[Variant, int] = field(default_factory=dict)


def open_artefacts(workload: Workload, name: str, folder: Path, settings: Settings) -> tuple[Opened, OnRuntime]:
    """Quantize (or load what was made), export, check and evaluate on one runtime; its sessions stay open."""
    made = settings.made
    opened = Opened(_backend_for(name) if made is None else made.plan.backend or "onnxruntime")
    batch = settings.batch_sizes[0]
    # Float comes first: what was made may have other weights than the float model (QAT, AdaRound).
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
    """The table that is made for this runtime; that of ONNX Runtime where there is none."""
    named = [name for name in BACKENDS.names() if find_backend(name).runtime == runtime]
    return runtime if runtime in named else named[0] if named else "onnxruntime"


@contextmanager
def _quantized(workload: Workload, backend: str, settings: Settings) -> Iterator[Quantized]:
    """The quantized model; the workload's own is float again in the end."""
    made = settings.made
    if made is not None:
        yield load_prepared(replace(workload, model=copy.deepcopy(workload.model)), made.plan, made.checkpoint)
        return
    try:
        yield quantize(
            workload.model,
            first(batches(workload.calibration), settings.samples),
            backend=backend,
            example=workload.inputs,
            name=workload.name,
            artefact=True,
            measure=False,  # the check does
        )
    finally:
        strip(workload.model)


def _write(
    workload: Workload, model: Any, variant: Variant, name: str, opened: Opened, folder: Path, settings: Settings
) -> None:
    kind: type[Runtime] = RUNTIMES.get(name)
    given = settings.made.artefact if settings.made is not None and variant == "quantized" else None
    for batch in settings.batch_sizes:
        if given is not None and given.suffix == kind.suffix:
            path = given  # the very file that will be served
        else:
            path = folder / (f"{variant}{kind.suffix}" if kind.any_batch else f"{variant}-{batch}{kind.suffix}")
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
    """All that the workload measures, its metric first."""
    for variant in VARIANTS if can_measure(workload) else ():
        tell(f"evaluating {name}, {variant}")
        values = opened.sessions[variant, batch].accuracy(workload)
        count = int(values["n"]) if "n" in values else None
        for metric in sorted(values.keys() - {"n"}, key=lambda key: (key != workload.metric, list(values).index(key))):
            lower = workload.less_is_better(metric)
            yield Accuracy(where=variant, metric=metric, value=values[metric], samples=count, lower_is_better=lower)


def inputs_of(workload: Workload, samples: int | None) -> Iterable[Any]:
    """Inputs of the evaluation, else of the calibration."""
    if workload.evaluation is not None:
        return first((inputs for inputs, _ in pairs(workload)), samples)
    return first(batches(workload.calibration), samples)


def batch_of(workload: Workload, size: int) -> Any:
    """One batch of real samples."""
    return next(rebatched(regrouped(inputs_of(workload, size), size), size))
