"""`score_workload` and `score_workload_operators`: sensitivity scores of a workload's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from logging import getLogger
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from bitwright.backends import DEFAULT_BACKEND, Choices
from bitwright.core import formatting
from bitwright.core.arguments import Count, strict
from bitwright.core.display import Progress, Summarized, Table
from bitwright.core.errors import BitwrightError, WorkloadError
from bitwright.graph import Graph
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized, quantize
from bitwright.sensitivity import OperatorScores, Scores, Suggestion, score, score_operators, suggest
from bitwright.training.data import TrainingData
from bitwright.training.distributed import Ranks
from bitwright.workload import Workload, can_measure, evaluate, loss_of, pairs
from bitwright.workload.data import calibration, first, probes, split

__all__ = ["WorkloadScores", "score_workload", "score_workload_operators"]

log = getLogger("bitwright")
_BATCH = 32  # the activations of one batch are kept in memory


@dataclass(frozen=True, kw_only=True)
class WorkloadScores(Summarized):
    """The scores of a quantized workload, and a better plan."""

    scores: Scores
    plan: Plan
    graph: Graph
    metric: str
    suggestion: Suggestion | None
    """None if the workload has no metric."""

    def summary(self) -> Iterator[Table | str]:
        """The scores, and the metric with the worst operators in float."""
        yield from self.scores.summary()
        found, metric = self.suggestion, self.metric
        if found is None:
            yield "no suggestion: the workload has no metric"
            return
        rows: list[Sequence[object]] = [("none", formatting.metric_value(metric, found.before), None)]
        for trial in found.trials:
            change = formatting.metric_change(metric, trial.metric - found.before)
            rows.append((f"+ {trial.operators[-1]}", formatting.metric_value(metric, trial.metric), change))
        yield Table(["operators in float", f"#{metric}", "#change"], rows)
        if not found.operators:
            yield "keeping operators in float does not improve the metric"
            return
        gain = formatting.metric_change(metric, found.gain)
        yield f"keep {len(found.operators)} in float: {gain} {metric} ({', '.join(found.operators)})"
        yield from (f"  {change}" for change in self.plan.diff(found.plan))

    def to_dict(self) -> dict[str, Any]:
        """The scores and the suggestion as plain data."""
        found, suggestion = self.suggestion, None
        if found is not None:
            suggestion = {
                "operators": found.operators,
                "before": found.before,
                "after": found.after,
                "trials": [asdict(trial) for trial in found.trials],
                "metric": self.metric,
                "changes": [str(change) for change in self.plan.diff(found.plan)],
            }
        return {**self.scores.to_dict(), "suggestion": suggestion}


@strict
def score_workload(
    workload: Workload,
    *,
    backend: str | None = None,
    plan: Plan | None = None,
    samples: Count = 128,
    most: Count = 5,
    output: str | Path | None = None,
    report: str | Path | None = None,
    progress: Progress | None = None,
    **choices: Unpack[Choices],
) -> WorkloadScores:
    """Quantize a workload's model, score its sites, and find the operators that should stay in float.

    The scores use the evaluation data if the workload has a loss, else its inputs alone. The suggestion keeps at most
    `most` operators in float, and is measured with the workload's metric. `output` is a file for the suggested plan.
    The results are added to the report in the folder `report`.

    >>> import torch
    >>> from bitwright import Workload, score_workload
    >>> x = torch.randn(16, 4)
    >>> workload = Workload(
    ...     name="tiny", model=torch.nn.Sequential(torch.nn.Linear(4, 2)), inputs=(x,), calibration=lambda: [x]
    ... )
    >>> sorted(site.site for site in score_workload(workload, samples=8).scores.sites)
    ['0:input', '0:weight']
    """
    from bitwright.reports import add_to_report, network, report_of, sensitivity

    if report is not None:
        report_of(Path(report), workload.name)  # reject the report of another workload before any work
    if output is not None and Path(output).suffix == ".json":
        raise BitwrightError(
            "the output is the suggested plan, a YAML file",
            where=str(output),
            fix="write better.yaml; the scores of kernels (--indicator gradient-variance) are JSON",
            code="wrong-suffix",
        )
    if output is not None and not can_measure(workload):
        raise WorkloadError(
            "no suggestion can be measured",
            where=f"workload {workload.name!r}",
            fix="give the Workload evaluation= or evaluate=, or don't ask for the suggested plan (--output)",
            code="no-evaluation-data",
        )
    quantized = quantize(
        workload.model,
        calibration(workload),
        backend=backend or (plan.backend if plan is not None else None) or DEFAULT_BACKEND,
        plan=plan,
        example=workload.inputs,
        name=workload.name,
        steps=(),  # the model stays as it is
        progress=progress,
        **choices,
    )
    loss = None if workload.loss is None or workload.evaluation is None else loss_of(workload)
    data = probes(workload, samples) if loss is None else labelled(workload, samples)
    scores = score(quantized.model, split(data, _BATCH), loss=loss, progress=progress)
    suggestion = _suggestion(workload, quantized, scores, most, progress) if can_measure(workload) else None
    if suggestion is not None and output is not None:
        suggestion.plan.save(output)
    if report is not None:
        part = sensitivity(scores, suggestion, workload.metric)
        add_to_report(Path(report), workload.name, sensitivity=part, graph=network(quantized.graph))
    return WorkloadScores(
        scores=scores, plan=quantized.plan, graph=quantized.graph, metric=workload.metric, suggestion=suggestion
    )


def _suggestion(
    workload: Workload, quantized: Quantized, scores: Scores, most: int, progress: Progress | None
) -> Suggestion:
    def metric(model: nn.Module) -> float:
        return evaluate(workload, model)[workload.metric]

    doubt = workload.direction_note()
    if doubt is not None:
        log.info("%s", doubt)
    lower = workload.less_is_better()
    return suggest(quantized.model, quantized.plan, scores, metric, most=most, lower_is_better=lower, progress=progress)


@strict
def score_workload_operators(
    workload: Workload, indicator: str, formats: Sequence[str] = ("int8",), *, samples: Count = 128
) -> OperatorScores:
    """Score the training kernels of a workload with an indicator, on its evaluation data, else its training data."""
    where = f"workload {workload.name!r}"
    if workload.loss is None:
        raise WorkloadError("an indicator needs a loss", where=where, fix="give Workload(loss=…)", code="no-loss")
    if workload.evaluation is None and workload.training is None:
        what, fix = "an indicator needs inputs with targets", "give the Workload evaluation= or training="
        raise WorkloadError(what, where=where, fix=fix, code="no-evaluation-data")
    if workload.evaluation is None:
        log.info("the workload has no evaluation data, so the indicator uses training data")
    data = split(labelled(workload, samples), _BATCH)
    return score_operators(workload.model, data, loss_of(workload), indicator=indicator, formats=list(formats))


def labelled(workload: Workload, samples: int | None = None) -> Iterator[Any]:
    """Batches of (inputs, target) of the evaluation data, else of the training data."""
    if workload.evaluation is not None:
        return first(pairs(workload), samples)
    alone = Ranks(rank=0, world=1, local=0)
    return first(TrainingData(workload, batch=None, seed=0, ranks=alone, workers=0).epoch(0), samples)
