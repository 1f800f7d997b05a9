"""Evaluate the float model and candidates: quantize the model, compute metrics, measure the artefact on the runtime."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from bitwright.backends import BackendTable, Choices
from bitwright.core.errors import (
    BitwrightError,
    DiskError,
    TrainError,
    WorkloadError,
    did_you_mean,
    first_line,
    line_of,
)
from bitwright.core.files import fingerprint, sample_fingerprints
from bitwright.core.registry import RUNTIMES
from bitwright.core.tensor_tree import as_call, batch_size, eval_mode, tensors_in
from bitwright.deployment import Runtime, available_runtimes, measure_latency, open_runtime, peak_memory
from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
from bitwright.graph import Graph
from bitwright.plan import Plan
from bitwright.ptq.quantize import Quantized, put_back, quantize
from bitwright.quantizers import find_attachment, strip
from bitwright.training.qat import Qat
from bitwright.tuning.goal import Goal, TrialOutcome, cannot_pass, failure, required_hits
from bitwright.tuning.space import Candidate
from bitwright.workload import Workload, batches, evaluate, hits_of, pairs
from bitwright.workload.data import first, joined, rebatched, regrouped, take

_PART, _LEAST = 512, 256  # samples in the part, and the minimum size of the data for using a part


@dataclass(frozen=True, kw_only=True)
class EvaluationSubset:
    """A random part of the evaluation data, drawn without replacement."""

    inputs: Any
    target: Tensor
    float_hits: int
    samples: int

    def hits(self, predict: Callable[..., Any]) -> int:
        """The number of samples that a model classifies correctly."""
        with torch.no_grad(), eval_mode(predict):
            return sum(int(right.sum()) for right, _ in hits_of([(self.inputs, self.target)], predict))


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The results of the float model on the evaluation data."""

    metrics: dict[str, float]
    data: str
    """A fingerprint of the evaluation data, or of the metrics if the workload has its own evaluation."""
    right: Tensor | None = None
    """Whether each sample is classified correctly; None if samples aren't accessible or have no classes."""
    majority: float | None = None
    """The accuracy of always predicting the most frequent class, in percent."""
    part: EvaluationSubset | None = None
    overlap: int | None = None
    """The number of calibration samples that are also evaluation samples; None if unknown."""

    @property
    def hit_rate(self) -> float:
        """The percentage of correctly classified samples."""
        return 0.0 if self.right is None else 100.0 * int(self.right.sum()) / len(self.right)

    @property
    def samples(self) -> int | None:
        """The number of samples, if known."""
        return None if self.right is None else len(self.right)


def measure_float(workload: Workload, metrics: Iterable[str], calibration: Iterable[Any], *, seed: int) -> Baseline:
    """Evaluate the float model, and collect facts about the data in the same pass."""
    seen = None if workload.evaluation is None else _look(workload, lenient=workload.evaluate is not None)
    if seen is None:
        known = _complete(evaluate(workload, workload.model), metrics, workload)
        return Baseline(metrics=known, data=fingerprint(repr(sorted(known.items()))))
    built_in = workload.evaluate is None
    values = {"top1": 100.0 * int(seen.right.sum()) / len(seen.right), "n": float(len(seen.right))}
    values = _complete(values if built_in else evaluate(workload, workload.model), metrics, workload)
    used = [
        p for batch in calibration for p in sample_fingerprints((t for _, t in tensors_in(batch)), batch_size(batch))
    ]
    return Baseline(
        metrics=values,
        data=fingerprint(*seen.prints, *([] if built_in else [repr(sorted(values.items()))])),
        right=seen.right,
        majority=100.0 * Counter(seen.targets.tolist()).most_common(1)[0][1] / len(seen.right),
        part=_part(workload, seen.right, seed) if built_in and tuple(metrics) == ("top1",) else None,
        overlap=sum(p in seen.samples for p in used),
    )


@dataclass(frozen=True, kw_only=True)
class _DataFacts:
    right: Tensor
    targets: Tensor
    samples: set[str]
    prints: list[str]


def _look(workload: Workload, *, lenient: bool) -> _DataFacts | None:
    """The hits of the float model. With `lenient`, returns None if the data isn't for classification."""
    right: list[Tensor] = []
    targets: list[Tensor] = []
    samples: set[str] = set()
    prints: list[str] = []

    def watched() -> Iterable[tuple[Any, Tensor]]:
        assert workload.evaluation is not None
        for inputs, target in pairs(workload):
            own = sample_fingerprints((t for _, t in tensors_in(inputs)), len(target))
            samples.update(own)
            prints.extend((*own, fingerprint(target)))
            yield inputs, target

    try:
        with torch.no_grad(), eval_mode(workload.model):
            for hits, target in hits_of(watched(), workload.model, where=f"workload {workload.name!r}"):
                right.append(hits.cpu())
                targets.append(target.cpu())
    except WorkloadError:
        if lenient:
            return None
        raise
    return _DataFacts(right=torch.cat(right), targets=torch.cat(targets), samples=samples, prints=prints)


def _complete(values: dict[str, float], metrics: Iterable[str], workload: Workload) -> dict[str, float]:
    for metric in metrics:
        if metric not in values:
            raise WorkloadError(
                "the goal uses a metric that wasn't measured",
                where=f"workload {workload.name!r}",
                value=metric,
                fix=did_you_mean(metric, values),
                code="metric-not-measured",
            )
    return values


def _part(workload: Workload, right: Tensor, seed: int) -> EvaluationSubset | None:
    """Random samples, collected in a second pass over the data so that only they are kept in memory."""
    whole = len(right)
    if whole < _LEAST:
        return None
    chosen = sorted(random.Random(seed).sample(range(whole), min(_PART, whole // 4)))
    assert workload.evaluation is not None
    inputs, targets, start = [], [], 0
    for batch, target in pairs(workload):
        inside = [index - start for index in chosen if start <= index < start + len(target)]
        if inside:
            inputs.append(take(batch, inside))
            targets.append(target[torch.tensor(inside)])
        start += len(target)
    return EvaluationSubset(
        inputs=joined(inputs),
        target=torch.cat(targets),
        float_hits=int(right[torch.tensor(chosen)].sum()),
        samples=len(chosen),
    )


Tell = Callable[[str], None]
Train = Callable[[nn.Module], object]
"""Trains the prepared model of a candidate in place."""


class Measuring(BaseModel):
    """Settings of latency measurements, which alternate with the float artefact and report medians."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    batch: int = Field(default=1, gt=0, le=10**6)
    threads: int = Field(default=1, gt=0, le=10_000)
    runs: int = Field(default=50, gt=0, le=10**7)


class Evaluator:
    """Measures candidates of one workload; the model is restored to float after each."""

    def __init__(
        self,
        workload: Workload,
        table: BackendTable,
        graph: Graph,
        goal: Goal,
        *,
        backend: str,
        choices: Choices,
        calibration: list[Any],
        measuring: Measuring,
        seed: int,
        folder: Path,
        state: Path,
        early: bool,
        train: Train | None = None,
    ) -> None:
        self.workload, self.table, self.graph, self.goal = workload, table, graph, goal
        self.backend, self.choices, self.seed, self.early = backend, choices, seed, early
        self.calibration, self.measuring, self.folder, self.state = calibration, measuring, folder, state
        self.train = train
        self.runtime = usable_runtime(table)
        self.done = False
        self._before: dict[str, Tensor] = {}

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate."""
        return candidate.plan(self.graph, self.backend, model=self.workload.name, choices=self.choices)

    def forget(self, candidate: Candidate | None = None) -> None:
        """Remove the saved PTQ state of a candidate, or of all."""
        folder = self.state if candidate is None else self.state / candidate.key
        shutil.rmtree(folder, ignore_errors=True)

    def trained_file(self, candidate: Candidate) -> Path:
        """Where the trained state of a candidate is kept during the search."""
        return self.folder / f"trained-{candidate.key}.safetensors"

    def keep_trained(self, candidates: Collection[Candidate]) -> None:
        """Remove the trained states of all other candidates."""
        kept = {self.trained_file(candidate) for candidate in candidates}
        for file in set(self.folder.glob("trained-*.safetensors")) - kept:
            file.unlink()

    def restore_float(self) -> None:
        """Restore the original float model, unless the search succeeded."""
        if not self.done and find_attachment(self.workload.model) is not None:
            strip(self.workload.model)
            put_back(self.workload.model, self._before)

    @contextmanager
    def quantized(
        self, candidate: Candidate, *, plan: Plan | None = None, tell: Tell | None = None
    ) -> Iterator[Quantized]:
        """Quantize the model with this candidate inside the context."""
        made = quantize_candidate(self, candidate, self.plan(candidate) if plan is None else plan, tell)
        before, result = made
        try:
            yield result
        finally:
            strip(self.workload.model)
            put_back(self.workload.model, before)

    def __call__(self, candidate: Candidate, baseline: Baseline, tell: Tell) -> TrialOutcome:
        """The outcome of a candidate; a failure to measure it is also an outcome."""
        begin = time.perf_counter()
        try:
            plan = self.plan(candidate)
            if not any(True for _ in plan.quantized):
                outcome = self._float(baseline)
            else:
                with self.quantized(candidate, plan=plan, tell=tell) as quantized:
                    outcome = self._measure(quantized, baseline, tell)
        except (DiskError, TrainError):
            raise  # unrelated to the candidate
        except BitwrightError as error:
            outcome = failure(str(error))
        return outcome.model_copy(update={"seconds": time.perf_counter() - begin})

    def _measure(self, quantized: Quantized, baseline: Baseline, tell: Tell) -> TrialOutcome:
        tell("evaluating")
        rejected = self._reject_early(quantized, baseline) if self.early else None
        if rejected is not None:
            return rejected
        metrics = evaluate(self.workload, quantized.model)
        margin = self.goal.worst_margin(self.workload.metric, baseline.metrics, metrics)
        samples = int(metrics["n"]) if "n" in metrics else None
        outcome = TrialOutcome(passed=False, accurate=margin >= 0, metrics=metrics, margin=margin, samples=samples)
        if not outcome.accurate:
            return outcome
        return self._on_runtime(quantized, outcome, tell)

    def _reject_early(self, quantized: Quantized, baseline: Baseline) -> TrialOutcome | None:
        """Evaluate a random part of the data first, and stop if the candidate can't pass."""
        part, samples = baseline.part, baseline.samples
        if part is None or samples is None:
            return None
        hits = part.hits(quantized.model)
        required = required_hits(self.goal.required("top1", baseline.metrics["top1"]), samples)
        if not cannot_pass(hits, part.samples, samples, required):
            return None
        # compare both models on the same samples, which cancels most of the sampling error
        estimate = baseline.metrics["top1"] + 100.0 * (hits - part.float_hits) / part.samples
        metrics = {"top1": estimate, "n": float(part.samples)}
        margin = min(self.goal.worst_margin("top1", baseline.metrics, metrics), -1e-9)
        return TrialOutcome(
            passed=False, accurate=False, metrics=metrics, margin=margin, stopped=True, samples=part.samples
        )

    def _on_runtime(self, quantized: Quantized, outcome: TrialOutcome, tell: Tell) -> TrialOutcome:
        if self.runtime is None:
            floats = sum(op.macs for op in self.graph.ops if op.name in quantized.plan.float)
            share = floats / self.graph.macs if self.graph.macs else 0.0
            return outcome.model_copy(update={"passed": True, "objective": share})
        tell(f"exporting for {self.runtime}")
        path = self.write(quantized, "candidate")
        outcome = outcome.model_copy(update=self.measured({"candidate": path}, tell)["candidate"])
        return self.apply_goal(outcome)

    def write(self, quantized: Quantized, name: str) -> Path:
        """Write the artefact for the runtime."""
        assert self.runtime is not None
        kind: type[Runtime] = RUNTIMES.get(self.runtime)
        path = self.folder / f"{name}{kind.suffix}"
        kind.write(quantized.model, path, self.example)
        return path

    def measured(self, artefacts: dict[str, Path], tell: Tell) -> dict[str, dict[str, Any]]:
        """Latency, size and memory of artefacts, measured in alternation with the float artefact."""
        assert self.runtime is not None
        plain = self.float_artefact
        tell(f"timing on {self.runtime}")
        threads = self.measuring.threads
        sessions = {name: open_runtime(self.runtime, path, threads=threads) for name, path in artefacts.items()}
        sessions["float"] = open_runtime(self.runtime, plain, threads=threads)
        args, kwargs = as_call(self.sample)
        latency = measure_latency(
            {name: partial(session.run, session.feed(*args, **kwargs)) for name, session in sessions.items()},
            runs=self.measuring.runs,
        )
        result = {}
        for name, path in artefacts.items():
            found: dict[str, Any] = {
                "latency_ms": latency[name].median_ms,
                "float_latency_ms": latency["float"].median_ms,
                "size": sessions[name].size(path),
                "float_size": sessions["float"].size(plain),
            }
            if self.goal.needs_memory:
                tell("measuring memory")
                feed = sessions[name].feed(*args, **kwargs)
                found["memory"] = peak_memory(self.runtime, path, feed, threads=threads)
                found["float_memory"] = peak_memory(self.runtime, plain, feed, threads=threads)
            result[name] = found
        return result

    def apply_goal(self, outcome: TrialOutcome) -> TrialOutcome:
        """Check the limits and compute the objective."""
        goal = self.goal
        ratios = {"latency": outcome.latency_ratio, "size": _ratio(outcome.size, outcome.float_size)}
        ratios["memory"] = _ratio(outcome.memory, outcome.float_memory)
        limits = {
            "latency_ms": (outcome.latency_ms, goal.latency_ms),
            "latency_ratio": (outcome.latency_ratio, goal.latency_ratio),
            "size": (outcome.size, goal.size),
            "memory": (outcome.memory, goal.memory),
        }
        exceeded = tuple(
            f"{name} {value:.4g} > {limit:.4g}"
            for name, (value, limit) in limits.items()
            if value is not None and limit is not None and value > limit
        )
        weights = goal.weights
        objective = sum(weights[name] * (ratios[name] or 0.0) for name in weights) / sum(weights.values())
        return outcome.model_copy(
            update={"objective": objective, "exceeded": exceeded, "passed": outcome.accurate and not exceeded}
        )

    def _float(self, baseline: Baseline) -> TrialOutcome:
        """The outcome of the float model, for a candidate without quantized sites."""
        margin = self.goal.worst_margin(self.workload.metric, baseline.metrics, baseline.metrics)
        outcome = TrialOutcome(
            passed=False, accurate=True, metrics=baseline.metrics, margin=margin, samples=baseline.samples
        )
        if self.runtime is None:
            return outcome.model_copy(update={"passed": True, "objective": 1.0})
        found = self.measured({"float copy": self.float_artefact}, lambda text: None)["float copy"]
        return self.apply_goal(outcome.model_copy(update=found))

    @cached_property
    def float_artefact(self) -> Path:
        """The artefact of the float model; it must be created while the model is float."""
        assert self.runtime is not None
        kind: type[Runtime] = RUNTIMES.get(self.runtime)
        path = self.folder / f"float{kind.suffix}"
        kind.write_float(self.workload.model, path, self.example)
        return path

    @cached_property
    def sample(self) -> Any:
        """The inputs for latency measurements."""
        size = self.measuring.batch
        return next(rebatched(regrouped(self.calibration, size), size))

    @property
    def example(self) -> Any:
        """The example call for the export."""
        assert self.runtime is not None
        return self.workload.inputs if RUNTIMES.get(self.runtime).any_batch else self.sample


def quantize_candidate(
    evaluator: Evaluator, candidate: Candidate, plan: Plan, tell: Tell | None
) -> tuple[dict[str, Tensor], Quantized]:
    """Quantize the workload's model in place; also returns its original weights if PTQ steps change them."""
    workload, base = evaluator.workload, candidate.base
    model = workload.model
    changes = base.steps or evaluator.train is not None
    before = {n: t.detach().clone() for n, t in model.state_dict().items()} if changes else {}
    evaluator._before = before
    data = list(first(evaluator.calibration, base.samples))
    state = evaluator.state / candidate.key
    result = quantize(
        model,
        data,
        backend=evaluator.backend,
        plan=plan,
        graph=evaluator.graph,
        example=workload.inputs,
        name=workload.name,
        artefact=True,
        steps=base.steps,
        seed=evaluator.seed,
        folder=state,
        keep_state=True,  # until the outcome is in the study
        progress=None if tell is None else lambda done, total, text: tell(text),
        measure=False,  # the search measures accuracy, and tries bad candidates on purpose
    )
    if evaluator.train is not None:
        try:
            _train(evaluator, evaluator.trained_file(candidate), result, evaluator.train, tell)
        except BaseException:
            strip(model)
            put_back(model, before)
            raise
    return before, result


def _train(evaluator: Evaluator, file: Path, quantized: Quantized, train: Train, tell: Tell | None) -> None:
    """Quantization-aware training of a candidate, or its result from an earlier call."""
    if file.exists():
        load_checkpoint(quantized.model, file)
        return
    if tell is not None:
        tell("training")
    qat = Qat.of(quantized, fuse=False)
    hook = register_optimizer_step_post_hook(lambda *_: qat.after_step())
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(evaluator.seed)
            train(quantized.model)
    except BitwrightError as error:
        raise TrainError(error.problems) from error
    except Exception as error:
        what = f"the training raised {type(error).__name__}: {first_line(error)}{line_of(error)}"
        raise TrainError.single(
            what, fix="run the training on the float model first", code="training-failed"
        ) from error
    finally:
        hook.remove()
    qat.finish()
    quantized.model.eval()
    save_checkpoint(quantized.model, file)


def usable_runtime(table: BackendTable) -> str | None:
    """The runtime that can measure the backend's artefacts on this machine, or None."""
    if table.runtime is None:
        return None
    return table.runtime if available_runtimes().get(table.runtime, "it isn't registered") is None else None


def load_calibration(workload: Workload, samples: int | None, memory: int) -> list[Any]:
    """The calibration batches as a list of at most `memory` MiB, because every candidate reads them."""
    kept: list[Any] = []
    held = 0
    for batch in first(batches(workload.calibration, name=workload.name), samples):
        held += sum(t.numel() * t.element_size() for _, t in tensors_in(batch))
        if kept and held > memory * 2**20:
            raise BitwrightError(
                f"the calibration data is larger than {memory} MiB",
                value=f"{sum(batch_size(one) for one in kept)} samples fit",
                fix="use fewer samples (--samples), or more memory (--memory)",
                code="calibration-too-large",
            )
        kept.append(batch)
    return kept


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference
