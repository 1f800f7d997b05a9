"""`tune_workload(config, output)`: a search that writes the best model with its report."""

from __future__ import annotations

from pathlib import Path

from bitwright.core.arguments import strict
from bitwright.core.interrupts import resumable
from bitwright.core.progress import Progress
from bitwright.reports import Accuracy, Size, new_record, write_report
from bitwright.reports.sections import tuning_record
from bitwright.tuning import TuneConfig, Tuned
from bitwright.workflows.deployment import finish, usable_runtimes
from bitwright.workload import Workload

__all__ = ["tune_workload"]


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
    found = config.make_workload(workload)
    runtimes = usable_runtimes(config.backend)
    float_size = sum(t.numel() * t.element_size() for t in found.model.state_dict().values())

    def write(tuned: Tuned, folder: Path) -> None:
        part = tuning_record(tuned, found.metric)
        if tuned.quantized is None:  # the float model is the best
            write_report(new_record(found.name, seed=config.seed, tuning=part), folder)
            return
        finish(
            found,
            tuned.quantized,
            folder,
            runtimes=runtimes,
            accuracies=_float_accuracy(found, tuned),
            float_size=Size(name="float weights", bytes=float_size),
            seed=config.seed,
            tuning=part,
            progress=progress,
        )

    kept = "all trials that were finished are kept; rerun the command to resume"
    resume = resume or config.resume
    if config.store is not None and not resume:
        kept = f"{kept}, with --resume"  # others may use that store
    with resumable(kept):
        return config.tune(found, output=output, resume=resume or "auto", progress=progress, on_result=write)


def _float_accuracy(workload: Workload, tuned: Tuned) -> list[Accuracy]:
    if tuned.baseline is None:
        return []
    metric, samples = workload.metric, tuned.baseline.samples
    lower = not tuned.goal.higher_is_better(metric)
    value = tuned.baseline.metrics[metric]
    return [Accuracy(where="float", metric=metric, value=value, samples=samples, lower_is_better=lower)]
