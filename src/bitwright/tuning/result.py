"""The result of a search: the best model, its comparison with float, and all trials."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitwright.core import display, formatting
from bitwright.core.arguments import strict
from bitwright.core.errors import BitwrightError
from bitwright.core.files import write_text
from bitwright.core.output_folder import staged_output
from bitwright.deployment.checkpoint import save_checkpoint
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized
from bitwright.tuning.evaluation import Baseline
from bitwright.tuning.goal import Budget, Goal, Paired, TrialOutcome
from bitwright.tuning.search import TrialRecord
from bitwright.tuning.space import Candidate

TUNING = "tuning.json"
TUNING_VERSION = 1


@strict
@dataclass(frozen=True, kw_only=True)
class Tuned(display.Summarized):
    """The result of `tune`.

    >>> import torch
    >>> from bitwright.tuning import tune
    >>> from bitwright.workload import Workload
    >>> inputs = torch.randn(16, 4)
    >>> workload = Workload(
    ...     name="tiny", model=torch.nn.Linear(4, 2), inputs=(inputs,), calibration=lambda: [inputs]
    ... )
    >>> tuned = tune(workload)  # without an evaluation, the model is quantized once
    >>> tuned
    <Tuned tiny: no goal was checked, 0 trials>
    >>> tuned.plan
    <Plan tiny for onnxruntime: 3 quantized sites>
    """

    workload: str
    metric: str
    """The workload's metric."""
    met_goal: bool | None
    """Whether the best model meets the goal; None if the workload has no evaluation."""
    quantized: Quantized | None
    """The best model, prepared and calibrated; None if it is the float model."""
    candidate: Candidate
    outcome: TrialOutcome
    on_runtime: dict[str, float] | None
    """The metrics of the artefact on the real runtime; None if it can't run here."""
    baseline: Baseline | None
    goal: Goal
    budget: Budget
    strategy: str
    seed: int
    history: Sequence[TrialRecord]
    stopped_because: str
    notes: Sequence[str]
    paired: Paired | None

    @property
    def plan(self) -> Plan | None:
        """The best plan; None if the result is the float model."""
        return None if self.quantized is None else self.quantized.plan

    @property
    def full_evaluations(self) -> int:
        """The number of candidates with a full evaluation."""
        return sum(asked.outcome.full for asked in self.history)

    @property
    def _metrics(self) -> list[str]:
        return [name for name in self.outcome.metrics if name != "n"]

    @property
    def slower_than_float(self) -> bool:
        """Whether the best quantized model takes at least as long as the float model."""
        ratio = self.outcome.latency_ratio
        return self.quantized is not None and ratio is not None and ratio >= 1.0

    @property
    def _verdict(self) -> str:
        verdict = {True: "goal met", False: "goal missed", None: "no goal was checked"}[self.met_goal]
        return f"{verdict}, but float is faster" if self.slower_than_float else verdict

    def __repr__(self) -> str:
        best = [f"{name} {formatting.metric_value(name, self.outcome.metrics[name])}" for name in self._metrics]
        if self.outcome.latency_ratio is not None:
            best.append(f"{self.outcome.latency_ratio:.2f}× latency")
        trials = formatting.counted(len(self.history), "trial")
        return f"<Tuned {self.workload}: {', '.join([self._verdict, *best, trials])}>"

    def summary(self) -> Iterator[display.Table | str]:
        """The best trials, the comparison with float and the verdict."""
        names = self._metrics
        front = {asked.number for asked in self.pareto}
        rows = [
            (
                asked.number + 1,
                "failed" if asked.outcome.failed else "passes" if asked.outcome.passed else "fails",
                *(formatting.metric_value(name, found[name]) if name in found else None for name in names),
                None if (ratio := asked.outcome.latency_ratio) is None else f"{ratio:.2f}×",
                None if asked.outcome.size is None else formatting.size(asked.outcome.size),
                "yes" if asked.number in front else None,
                str(asked.candidate) + (" (best)" if asked.candidate == self.candidate else ""),
            )
            for asked in sorted(self.history, key=lambda asked: asked.outcome.rank())
            for found in (asked.outcome.metrics,)
        ]
        heads = ["#trial", "goal", *(f"#{name}" for name in names), "#latency", "#size", "Pareto", "candidate"]
        yield display.Table(heads, rows, title=f"{self.workload}: {self._verdict}, {self.stopped_because}", most=12)
        if self.baseline is not None and self.baseline.majority is not None:
            yield f"accuracy of always predicting the most frequent class: {self.baseline.majority:.2f} %"
        if self.paired is not None:
            alone = f"only float is right on {self.paired.only_float} samples"
            yield (
                f"{alone}, only the quantized model on {self.paired.only_quantized}: "
                f"p = {self.paired.p_value:.2g} (McNemar)"
            )
        if self.quantized is None and self.met_goal:
            yield "the float model is the best candidate; no artefact was written"
        yield f"{self._verdict}: {self.outcome.text}; {self.candidate}"
        trials = formatting.counted(len(self.history), "trial")
        yield f"{trials}, {formatting.counted(self.full_evaluations, 'whole evaluation')}"

    def failures(self) -> list[str]:
        """By how much the goal was missed."""
        return [f"the goal was missed by {self._missed_by()}"] if self.met_goal is False else []

    def _missed_by(self) -> str:
        if self.outcome.exceeded:
            return "; ".join(self.outcome.exceeded)
        found = self.outcome.metrics
        if self.baseline is None or self.metric not in found:
            return self.outcome.failed or "all"
        before = self.baseline.metrics
        gaps = {name: self.goal.margin(name, before[name], found[name]) for name in self.goal.metrics(self.metric)}
        return ", ".join(f"{-gap:.4g} {name}" for name, gap in gaps.items() if gap < 0)

    def plot(self) -> display.Chart:
        """The first metric of each trial; filled points are on the Pareto front."""
        name = next(iter(self._metrics), "")
        front = {asked.number for asked in self.pareto}
        dots = [
            display.Dot(
                x=asked.number + 1,
                y=asked.outcome.metrics[name],
                name=f"trial {asked.number + 1}",
                text=str(asked.candidate),
                kind="trial best" if asked.number in front else "trial",
            )
            for asked in self.history
            if name in asked.outcome.metrics
        ]
        if not dots:
            raise BitwrightError("no trial has a metric", code="nothing-to-plot")
        return display.Chart(display.scatter(dots, x_name="trial", y_name=name, label="Trials", counted=True))

    @property
    def pareto(self) -> list[TrialRecord]:
        """The candidates on the Pareto front of metric, latency and size."""
        measured = [asked for asked in self.history if asked.outcome.latency_ms is not None]
        points = {asked.number: _point(asked.outcome) for asked in measured}
        return [a for a in measured if not any(_beats(points[b.number], points[a.number]) for b in measured)]

    def to_dict(self) -> dict[str, Any]:
        """Everything except the model as plain data."""
        front = {asked.number for asked in self.pareto}
        return {
            "bitwright-tuning": TUNING_VERSION,
            "workload": self.workload,
            "met_goal": self.met_goal,
            "margin": self.outcome.margin,
            "best": {"candidate": self.candidate.to_json(), "outcome": self.outcome.model_dump(mode="json")},
            "on_runtime": self.on_runtime,
            "float": None if self.baseline is None else self.baseline.metrics,
            "majority": None if self.baseline is None else self.baseline.majority,
            "overlap": None if self.baseline is None else self.baseline.overlap,
            "paired": None if self.paired is None else asdict(self.paired),
            "goal": self.goal.model_dump(mode="json"),
            "budget": self.budget.model_dump(mode="json"),
            "strategy": self.strategy,
            "seed": self.seed,
            "stopped_because": self.stopped_because,
            "full_evaluations": self.full_evaluations,
            "notes": list(self.notes),
            "history": [
                {
                    "number": asked.number,
                    "candidate": asked.candidate.to_json(),
                    "description": str(asked.candidate),
                    "pareto": asked.number in front,
                    **asked.outcome.model_dump(mode="json"),
                }
                for asked in self.history
            ],
        }

    def save(self, folder: str | Path) -> Path:
        """Save the plan, checkpoint, artefact and `tuning.json`, even if the goal was missed."""
        with staged_output(folder) as staged:
            if self.quantized is not None:
                self.quantized.plan.save(staged / "plan.yaml")
                save_checkpoint(self.quantized.model, staged / "checkpoint.safetensors")
                self.quantized.export(staged / "model.onnx")
            text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
            write_text(staged / TUNING, text + "\n")
        return Path(folder)


def _point(outcome: TrialOutcome) -> tuple[float, float, float]:
    return (-outcome.margin, outcome.latency_ratio or 0.0, float(outcome.size or 0))


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other
