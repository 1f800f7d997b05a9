"""`plan_workload`, `quantize_workload`, `tune_workload` and the quickstart: what `bitwright` does with a workload.

They plan a workload, or quantize it into a folder with a report.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from bitwright.backends import DEFAULT_BACKEND, Choices, make_plan, plan_warnings, resolve_for_backend
from bitwright.backends import backend as find_backend
from bitwright.core.arguments import strict
from bitwright.core.display import Progress, phases
from bitwright.core.errors import BitwrightError, log_warnings
from bitwright.core.files import write_text
from bitwright.core.interrupts import resumable
from bitwright.core.output_folder import staged_output
from bitwright.core.registry import WORKLOADS
from bitwright.deployment import (
    export_float,
    readers,
)
from bitwright.graph import capture
from bitwright.importers.qsync import load_mapper, plan_of_mapper, summarize_mapper
from bitwright.plan import Plan
from bitwright.ptq import MEMORY, Step, read_steps
from bitwright.ptq.quantize import Quantized, quantize
from bitwright.quantizers import in_mode
from bitwright.reports import (
    Accuracy,
    Size,
    new_record,
    read_json,
    write_report,
)
from bitwright.reports.sections import tuning_record
from bitwright.sensitivity.weight_costs import CANDIDATES, weight_costs
from bitwright.tuning import TuneConfig, Tuned
from bitwright.workflows.deployment import Deployment, accuracy, finish, usable_runtimes
from bitwright.workload import Workload, open_workload
from bitwright.workload.data import calibration, first

__all__ = ["WorkloadPlan", "plan_workload", "quantize_workload", "run_quickstart", "tune_workload"]

log = getLogger("bitwright")
_STATE = ".steps"  # where PTQ steps keep their state while they run
_SAMPLES = 32  # calibration samples; each needs a gradient


@strict
def quantize_workload(
    workload: Workload | str,
    output: str | Path,
    *,
    backend: str | None = None,
    plan: Plan | None = None,
    precision: str | None = None,
    samples: int | None = None,
    steps: Sequence[str | Step] | None = None,
    seed: int = 0,
    memory: int = MEMORY,
    histograms: bool = True,
    progress: Progress | None = None,
    **choices: Unpack[Choices],
) -> Deployment:
    """Quantize a workload's model into a folder: plan, checkpoint, artefact and report.

    Accuracy is measured before and after, simulated and on the real runtime, if the workload has a metric. An
    interrupted run of `steps` resumes when the function is called again with the same arguments.

    >>> import tempfile, torch, bitwright
    >>> x, folder = torch.randn(16, 8), tempfile.mkdtemp()
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> workload = bitwright.Workload(name="small", model=model, inputs=(x,), calibration=lambda: [x])
    >>> deployed = bitwright.quantize_workload(workload, folder + "/out", precision="int8")
    >>> deployed.passed, deployed.record.workload
    (True, 'small')
    """
    begin, output = phases(progress), Path(output)
    wanted = (
        None if steps is None else read_steps(steps)
    )  # unknown names and wrong settings fail before the model is loaded
    if precision is None:
        backend = backend or (plan.backend if plan is not None else None) or DEFAULT_BACKEND
    runtimes = None if backend is None else usable_runtimes(backend)
    state = output / _STATE
    with resumable(lambda: _resume_hint(state)), staged_output(output) as staged:
        found = open_workload(workload) if isinstance(workload, str) else workload
        _note_overwritten(output, found.name)
        float_size = sum(t.numel() * t.element_size() for t in found.model.state_dict().values())
        before: list[Accuracy] = []

        def measure_float(model: nn.Module) -> None:
            before.extend(accuracy(found, model, "float", begin))

        quantized = quantize(
            found.model,
            partial(calibration, found, samples),
            precision,
            backend=backend,
            plan=plan,
            example=found.inputs,
            name=found.name,
            artefact=True,
            steps=wanted,
            seed=seed,
            memory=memory,
            folder=state,
            keep_state=True,
            on_start=measure_float if wanted else None,  # steps change the float weights
            progress=progress,
            **choices,
        )
        if not wanted:
            # Later than with steps, because problems of the plan or the data should come before a long evaluation.
            with in_mode(quantized.model, "float"):
                measure_float(quantized.model)
        _write_steps(quantized, staged)
        record = finish(
            found,
            quantized,
            staged,
            runtimes=usable_runtimes(quantized.backend) if runtimes is None else runtimes,
            accuracies=before,
            float_size=Size(name="float weights", bytes=float_size),
            histograms=histograms,
            progress=progress,
        )
    shutil.rmtree(state, ignore_errors=True)  # not earlier: the results of the steps must be saved first
    return Deployment(folder=output, record=record, quantized=quantized)


def _resume_hint(state: Path) -> str | None:
    if not state.is_dir():
        return None
    return f"the finished units of the steps are kept in {state}; rerun the command to resume"


def _note_overwritten(output: Path, workload: str) -> None:
    """Log a note if the folder has the results of another workload."""
    with suppress(BitwrightError):  # no report, or a damaged one
        before = read_json(output / "report.json").workload
        if before != workload:
            log.info("%s has the results of %r: they are replaced", output, before)


def _write_steps(quantized: Quantized, folder: Path) -> None:
    if quantized.steps:
        ran = [asdict(one) for one in quantized.steps]
        write_text(folder / "steps.json", json.dumps(ran, indent=1, ensure_ascii=False) + "\n")
    for one in quantized.steps:
        if one.skipped:
            log.info("%s skipped %d operators; steps.json has the reasons", one.step, len(one.skipped))


def run_quickstart(output: str | Path, *, progress: Progress | None = None) -> Deployment:
    """Write the quantized digits model and its report into a folder."""
    begin = phases(progress)
    runtimes = readers(Path("model.onnx"))
    with staged_output(output) as folder:
        make_workload = WORKLOADS.get("digits")
        workload = make_workload(
            on_epoch=lambda done, total, _: progress and progress(done, total, "training on digits")
        )
        before = accuracy(workload, workload.model, "float", begin)
        begin("exporting the float model")
        float_file = export_float(workload.model, folder / "model-float.onnx", workload.inputs)
        quantized = quantize(
            workload.model,
            calibration(workload),
            backend=DEFAULT_BACKEND,
            example=workload.inputs,
            progress=progress,
            name=workload.name,
        )
        record = finish(
            workload,
            quantized,
            folder,
            runtimes=runtimes,
            accuracies=before,
            float_size=Size(name="model-float.onnx", bytes=float_file.stat().st_size),
            float_file=float_file,
            seed=0,
            progress=progress,
        )
    return Deployment(folder=Path(output), record=record, quantized=quantized)


@strict
def tune_workload(
    config: TuneConfig,
    output: str | Path,
    *,
    workload: Workload | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """Run the search of a configuration. Write the best model, its artefact and its report into a folder.

    `workload` replaces the one of the configuration. An interrupted search in `output` is resumed. `resume` is required
    for a search in another store.

    >>> import tempfile, torch
    >>> from bitwright import Workload, TuneConfig, tune_workload
    >>> x = torch.randn(16, 4)
    >>> workload = Workload(
    ...     name="tiny", model=torch.nn.Sequential(torch.nn.Linear(4, 2)), inputs=(x,), calibration=lambda: [x]
    ... )
    >>> tune_workload(TuneConfig(), tempfile.mkdtemp(), workload=workload)  # without a metric: quantized once
    <Tuned tiny: no goal was checked, 0 trials>
    """
    kept = "all trials that were finished are kept; rerun the command to resume"
    resume = resume or config.resume
    if config.store is not None and not resume:
        kept = f"{kept}, with --resume"  # others may use that store
    with resumable(kept):
        return config.tune(workload, output=output, resume=resume or "auto", progress=progress)


def tuning_reporter(
    workload: Workload, backend: str, *, seed: int, progress: Progress | None
) -> Callable[[Tuned, Path], None]:
    """The function that writes the artefact and the report of a search; registered as a tuning reporter."""
    runtimes = usable_runtimes(backend)
    float_size = sum(t.numel() * t.element_size() for t in workload.model.state_dict().values())

    def write(tuned: Tuned, folder: Path) -> None:
        part = tuning_record(tuned, workload.metric)
        if tuned.quantized is None:  # the float model is the best
            write_report(new_record(workload.name, seed=seed, tuning=part), folder)
            return
        finish(
            workload,
            tuned.quantized,
            folder,
            runtimes=runtimes,
            accuracies=_float_accuracy(workload, tuned),
            float_size=Size(name="float weights", bytes=float_size),
            seed=seed,
            tuning=part,
            progress=progress,
        )

    return write


def _float_accuracy(workload: Workload, tuned: Tuned) -> list[Accuracy]:
    if tuned.baseline is None:
        return []
    metric, samples = workload.metric, tuned.baseline.samples
    lower = not tuned.goal.higher_is_better(metric)
    value = tuned.baseline.metrics[metric]
    return [Accuracy(where="float", metric=metric, value=value, samples=samples, lower_is_better=lower)]


@dataclass(frozen=True, kw_only=True)
class WorkloadPlan:
    """The plan of a workload."""

    plan: Plan
    changes: Sequence[Any] | None = None
    """The changes from the plan that it was compared with."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return repr(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """The plan file, the operators in float and the changes, as plain data."""
        return {
            "quantized_sites": len(list(self.plan.quantized)),
            "float_operators": dict(self.plan.float),
            "changes": [vars(change) for change in self.changes or ()],
            "plan": self.plan.to_yaml(),
        }


@strict
def plan_workload(
    workload: Workload | str,
    backend: str | None = None,
    *,
    plan: Plan | None = None,
    precision: str | None = None,
    bits: float | None = None,
    size: str | None = None,
    candidates: Sequence[str] = (),
    samples: int | None = None,
    mapper: Path | None = None,
    against: Plan | None = None,
    **choices: Unpack[Choices],
) -> WorkloadPlan:
    """Choose the format of each site of a workload's model. Warnings are logged.

    `plan` is validated for the workload instead. `bits` or `size` is a budget for the weights, whose formats are
    chosen from `candidates` with gradients on `samples` calibration samples. `mapper` is a mapper file of QSync. The
    result has the changes since the plan `against`.

    >>> import torch
    >>> from bitwright import Workload, plan_workload
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> made = plan_workload(Workload(name="tiny", model=model, inputs=(torch.randn(1, 4),)))
    >>> str(made.plan.sites["0:weight"].format)
    'int8/channel/sym'
    """
    target = backend or (plan.backend if plan is not None else None) or DEFAULT_BACKEND
    table = find_backend(target)  # reject an unknown name before loading the workload
    found = open_workload(workload) if isinstance(workload, str) else workload
    graph = capture(found.model, found.inputs)
    notes: tuple[str, ...] = ()
    if mapper is not None:
        mapped = load_mapper(mapper)
        made = plan_of_mapper(mapped, graph, model=found.model, exclude=tuple(choices.get("keep_float", ())))
        made = replace(made, model=found.name)
        notes = (f"{mapper.name}: {summarize_mapper(mapped)}",)
    elif plan is not None:
        made = resolve_for_backend(plan, table, graph, name=found.name)
    else:
        costs = None
        if bits is not None or size is not None:
            data = first(calibration(found), samples or _SAMPLES)
            keep = choices.get("keep_float", ())
            formats = candidates or CANDIDATES
            costs = weight_costs(found.model, data, target, graph=graph, keep_float=keep, formats=formats)
        made = make_plan(
            graph, target, model=found.name, precision=precision, bits=bits, size=size, costs=costs, **choices
        )
    log_warnings(plan_warnings(graph, made))
    changes = None if against is None else against.resolve(graph).diff(made)
    return WorkloadPlan(plan=made, changes=changes, notes=notes)
