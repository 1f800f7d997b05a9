"""`bitwright.profile`: measure this device with the training steps of a workload.

The function is in this package because it predicts the memory of a step, to find out how much of the measured memory
belongs to the process itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from bitwright.cluster.predictor import predict_step
from bitwright.core.arguments import strict
from bitwright.core.errors import PlanError, Problem
from bitwright.core.interrupts import Interrupted
from bitwright.core.progress import Progress
from bitwright.plan import Plan
from bitwright.profiling.device_profile import DeviceProfile
from bitwright.profiling.machine import of_rank, samples_file
from bitwright.profiling.profiler import check_device, halves, open_store, profile_variants, training_peak
from bitwright.profiling.published import published as published_profile
from bitwright.profiling.sample_store import SampleStore
from bitwright.profiling.step import CLOCKS, Clock, StepSettings
from bitwright.profiling.step_graph import StepGraph, record_step
from bitwright.profiling.workload_step import first_half, kernel_plan, make_variant, resolve_plan, training_batch
from bitwright.workload import Workload

__all__ = ["profile"]

AmpName = Literal["bf16", "fp16"]


@strict
def profile(
    workload: Workload,
    *,
    plans: Sequence[Plan | str | Path] = (),
    kernels: Sequence[str] = (),
    amp: Sequence[AmpName] = (),
    batch: int | None = None,
    half_batch: bool = False,
    channels_last: bool = False,
    rounds: int = 30,
    clock: Clock = "wall",
    fit_casts: bool = True,
    cache: str | Path | None = None,
    published: str | None = None,
    progress: Progress | None = None,
) -> DeviceProfile:
    """Measure operators, casts, optimizers and the host within real training steps of a workload.

    The float model is always measured. `plans` adds quantized training: precision names such as `int8`, plan files or
    `Plan` objects. `kernels` adds low-precision kernels such as `int8` or `int8/stochastic/weight`. `amp` measures all
    of them under autocast as well. `half_batch` also measures half of the batch, which planners need to choose batch
    sizes.

    Measurements are stored in `cache` (default: a file of this device in the user's cache folder) and reused, also for
    other models. After an interruption, call the function again to resume. In a process group, all ranks call this
    function; it then measures collectives as well.

    `published` derives the times from the data sheet of a device (`nvidia-t4`, …) instead of measuring.

    >>> import torch
    >>> from bitwright import Workload, profile
    >>> x = torch.randn(16, 4)
    >>> workload = Workload(
    ...     name="tiny",
    ...     model=torch.nn.Linear(4, 2),
    ...     inputs=(x[:1],),
    ...     training=lambda: torch.utils.data.TensorDataset(x, x[:, :2]),
    ...     loss=torch.nn.functional.mse_loss,
    ... )
    >>> profile(workload, published="nvidia-t4", batch=8)
    DeviceProfile('NVIDIA T4 (published, not measured)', published, 4 operators)
    """
    _check_names(clock, amp)
    pair, loss = training_batch(workload, batch, channels_last=channels_last)
    peak = 0
    if published is None:
        check_device(workload.model)
        peak = training_peak(workload.model, pair, loss)  # first: later measurements leave memory behind
    recorded = record_step(workload.model, pair, loss, name=workload.name)
    found: list[Plan | None] = [None, *(resolve_plan(workload, plan) for plan in plans)]
    found += [kernel_plan(workload, format) for format in kernels]
    found += [half for plan in found if plan is not None for half in halves(plan)]
    types: list[AmpName | None] = [None, *amp]
    variants = [make_variant(workload, plan, pair, StepSettings(amp=kind)) for plan in found for kind in types]
    batches = [first_half(pair), pair] if half_batch else [pair]  # the profile describes the last one
    if published is not None:
        return published_profile(published, variants, batches, loss)
    file = Path(cache) if cache is not None else samples_file(clock)
    store = open_store(of_rank(file, _rank()), clock)
    with _report_saved_rounds(store):
        for own in batches:
            made = profile_variants(
                variants,
                own,
                loss,
                store=store,
                clock=clock,
                rounds=rounds,
                fit_casts=fit_casts,
                progress=None if progress is None else lambda words, done, total: progress(done, total, words),
            )
    return _with_process_memory(made, recorded, peak)


def _check_names(clock: str, amp: Sequence[str]) -> None:
    problems = []
    if clock not in CLOCKS:
        fix = "use wall or cpu"
        problems.append(Problem(what="unknown clock", where="clock", value=clock, fix=fix, code="unknown-clock"))
    problems += [
        Problem(what="unknown autocast type", where="amp", value=name, fix="use bf16 or fp16", code="unknown-amp-type")
        for name in amp
        if name not in ("bf16", "fp16")
    ]
    if problems:
        raise PlanError(problems, title="unknown options")


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def _report_saved_rounds(store: SampleStore) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        saved = f"no profile was written; {len(store.totals)} rounds are saved in {store.path}"
        raise Interrupted(str(error) or "interrupted", f"{saved}; rerun the command to resume") from None


def _with_process_memory(profile: DeviceProfile, recorded: StepGraph, peak: int) -> DeviceProfile:
    """Set the memory of a training process that its tensors do not explain: the peak minus the predicted tensors."""
    memory = predict_step(recorded, Plan(), profile).devices[0].memory
    if not peak or memory is None:
        return profile
    facts = profile.memory.model_copy(update={"process": max(0, peak - memory.peak)})
    return profile.model_copy(update={"memory": facts})
