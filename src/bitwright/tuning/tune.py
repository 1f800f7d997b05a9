"""`tune(workload)`: the fastest model that meets the goal, or the best one that was seen."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import torch

from bitwright.attach import find_attachment
from bitwright.backends import Choices
from bitwright.backends import backend as find_backend
from bitwright.deploy import Runtime
from bitwright.errors import BitwrightError
from bitwright.fingerprint import fingerprint
from bitwright.graph import Graph, capture_paths
from bitwright.graph.tree import tensors_in
from bitwright.modes import evaluating
from bitwright.planners import make_plan
from bitwright.ptq import MEMORY
from bitwright.registry import RUNTIMES, STRATEGIES
from bitwright.tuning.baseline import Baseline, measure_float
from bitwright.tuning.candidate import Candidate
from bitwright.tuning.evaluate import Evaluator, Measuring, kept_calibration, quantize_candidate
from bitwright.tuning.explore import Asked, Explorer
from bitwright.tuning.goal import Budget, Goal
from bitwright.tuning.outcome import Outcome
from bitwright.tuning.result import Tuned
from bitwright.tuning.search import Search, Strategy
from bitwright.tuning.space import SearchSpace, Space, make_space
from bitwright.tuning.statistics import ERROR, Paired, mcnemar
from bitwright.tuning.store import Study, open_study
from bitwright.workload import Workload, can_measure, hits_of

log = logging.getLogger("bitwright")
_RECORDED = 16
_HEAT = 3  # finalists that are timed once more, in turns
_CLOSE = 1.1  # as near to the best as that


def tune(
    workload: Workload,
    goal: Goal | None = None,
    budget: Budget | None = None,
    strategy: str = "bisect",
    store: str | Path | None = None,
    *,
    space: Space | None = None,
    backend: str = "onnxruntime",
    name: str | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    samples: int | None = None,
    measuring: Measuring | None = None,
    early: bool = True,
    memory: int = MEMORY,
    progress: Callable[[str], None] | None = None,
    watch: Callable[[Asked, Baseline], None] | None = None,
    **choices: Unpack[Choices],
) -> Tuned:
    """Search until the budget is spent for the fastest quantized model with which the goal holds.

    The workload's model is left as the best one, prepared and calibrated (`strip` makes it float again). If no
    candidate meets the goal, the best one that was seen is the result, with `met_goal=False`. With `output` everything
    is saved there. `store` is where trials are kept: a file or postgresql://…; by default a file in `output`, else
    nothing is kept. With `resume` a study that is there already is gone on with, by one process or by many. `early`
    gives a candidate up on a random part of the evaluation data if it can't pass any more.

    A workload that doesn't say how good a model is gets quantized once.
    """
    goal, budget, measuring = goal or Goal(), budget or Budget(), measuring or Measuring()
    space = space or Space()
    if find_attachment(workload.model) is not None:
        raise BitwrightError("this model is quantized already", fix="strip(model) first")
    search_by: Strategy = STRATEGIES.get(strategy)
    table = find_backend(backend)
    tell = progress or (lambda text: None)
    place = None if output is None else Path(output)
    tell("recording the model")
    calibration = kept_calibration(workload, max([*space.samples, 0]) or samples, memory)
    if space.samples == () and samples is not None:
        space = space.model_copy(update={"samples": (samples,)})
    graph = capture_paths(workload.model, chain([workload.inputs], calibration), most=_RECORDED)
    plan = make_plan(graph, backend, model=workload.name, **choices)
    candidates = make_space(space, graph, table, plan, choices)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        work = Path(scratch) if place is None else place / ".tuning"
        work.mkdir(parents=True, exist_ok=True)
        evaluator = Evaluator(
            workload,
            table,
            graph,
            goal,
            backend=backend,
            choices=choices,
            calibration=calibration,
            measuring=measuring,
            seed=seed,
            folder=work,
            early=early,
        )
        if not can_measure(workload):
            result = _once(workload, evaluator, candidates, goal, budget, strategy, seed, tell)
        else:
            tell("evaluating the float model")
            metrics = goal.metrics(workload.metric)
            baseline = measure_float(workload, metrics, calibration, seed=seed)
            identity = _identity(
                workload, graph, baseline, goal, space, strategy, seed, backend, measuring, early, choices
            )
            where = store if store is not None or place is None else place / "study.db"
            study = open_study(where, name or workload.name, identity, resume=resume)
            if evaluator.runtime is not None:
                tell("exporting the float model")
                _ = evaluator.float_artefact  # now, while the model is float
            run = _Run(workload, evaluator, candidates, baseline, study, budget, tell, watch)
            result = run(search_by, strategy, seed)
        if place is not None:
            tell("saving")
            result.save(place)
            for left in work.iterdir():
                if left.is_file():
                    left.unlink()
    return result


class _Run:
    """One process's part of a study, and its end."""

    def __init__(
        self,
        workload: Workload,
        evaluator: Evaluator,
        space: SearchSpace,
        baseline: Baseline,
        study: Study,
        budget: Budget,
        tell: Callable[[str], None],
        watch: Callable[[Asked, Baseline], None] | None,
    ) -> None:
        self.workload, self.evaluator, self.space, self.baseline = workload, evaluator, space, baseline
        self.study, self.budget, self.tell = study, budget, tell
        self.watch = watch or (lambda asked, baseline: None)

    def __call__(self, strategy: Strategy, name: str, seed: int) -> Tuned:
        goal = self.evaluator.goal
        search = Search(self.workload, self.space, goal, self.evaluator, self.study, self.tell, seed=seed)
        explorer = Explorer(
            self.study,
            self.budget,
            lambda candidate: self.evaluator(candidate, self.baseline, self.tell),
            lambda asked: self.watch(asked, self.baseline),
        )
        explorer.run(strategy, search)
        history = sorted(explorer.asked.values(), key=lambda asked: asked.number)
        if not history:
            raise BitwrightError(
                "the budget ended before the first trial", value=self.budget.minutes, fix="give more minutes"
            )
        best, outcome = self._final(history)
        quantized = None
        if any(True for _ in self.evaluator.plan(best).quantized):
            self.tell("making the best model again")
            _, quantized = quantize_candidate(self.evaluator, best, self.evaluator.plan(best), self.tell)
        return Tuned(
            workload=self.workload.name,
            met_goal=outcome.passed,
            quantized=quantized,
            candidate=best,
            outcome=outcome,
            baseline=self.baseline,
            goal=goal,
            budget=self.budget,
            strategy=name,
            seed=seed,
            history=history,
            stopped_because=explorer.why,
            notes=_notes(self.baseline, self.evaluator, outcome, self.workload),
            paired=self._paired(quantized is None),
        )

    def _final(self, history: list[Asked]) -> tuple[Candidate, Outcome]:
        """The best; where several are near to it, after they were timed once more, in turns."""
        ranked = sorted(history, key=lambda asked: asked.outcome.rank())
        best = ranked[0]
        near = [
            asked
            for asked in ranked[:_HEAT]
            if asked.outcome.passed
            and asked.outcome.latency_ms is not None
            and (asked.outcome.objective or 0.0) <= _CLOSE * (best.outcome.objective or 0.0)
        ]
        if len(near) < 2 or self.evaluator.runtime is None:
            return best.candidate, best.outcome
        kind: type[Runtime] = RUNTIMES.get(self.evaluator.runtime)
        files: dict[str, Path] = {}
        for asked in near:
            self.tell("preparing the finalists")
            path = self.evaluator.folder / f"finalist-{asked.number}{kind.suffix}"
            if not any(True for _ in self.evaluator.plan(asked.candidate).quantized):
                continue
            with self.evaluator.quantized(asked.candidate) as quantized:
                kind.write(quantized.model, path, self.evaluator.example)
            files[asked.candidate.key] = path
        if len(files) < 2:
            return best.candidate, best.outcome
        found = self.evaluator.measured(files, self.tell)
        judged = {
            asked.candidate.key: (
                asked.candidate,
                self.evaluator.judged(asked.outcome.model_copy(update=found[asked.candidate.key])),
            )
            for asked in near
            if asked.candidate.key in found
        }
        return min(judged.values(), key=lambda pair: pair[1].rank())

    def _paired(self, is_float: bool) -> Paired | None:
        """Sample by sample against float, where samples can be counted."""
        before = self.baseline.right
        if before is None or is_float:
            return None
        self.tell("comparing with float, sample by sample")
        assert self.workload.evaluation is not None
        with torch.no_grad(), evaluating(self.workload.model):
            after = torch.cat([hits.cpu() for hits, _ in hits_of(self.workload.evaluation(), self.workload.model)])
        return mcnemar(int((before & ~after).sum()), int((~before & after).sum()))


def _once(
    workload: Workload,
    evaluator: Evaluator,
    space: SearchSpace,
    goal: Goal,
    budget: Budget,
    strategy: str,
    seed: int,
    tell: Callable[[str], None],
) -> Tuned:
    """Nobody says how good a model is: quantize it in the preferred way."""
    log.info(
        "workload %r has neither evaluation= nor evaluate=: it is quantized once, no goal is checked", workload.name
    )
    candidate = space.start()
    _, quantized = quantize_candidate(evaluator, candidate, evaluator.plan(candidate), tell)
    outcome = Outcome(passed=False, accurate=False, margin=float("nan"))
    return Tuned(
        workload=workload.name,
        met_goal=None,
        quantized=quantized,
        candidate=candidate,
        outcome=outcome,
        baseline=None,
        goal=goal,
        budget=budget,
        strategy=strategy,
        seed=seed,
        history=(),
        stopped_because="the workload doesn't say how good a model is",
        notes=("no goal was checked: the workload has neither evaluation= nor evaluate=",),
        paired=None,
    )


def _identity(
    workload: Workload,
    graph: Graph,
    baseline: Baseline,
    goal: Goal,
    space: Space,
    strategy: str,
    seed: int,
    backend: str,
    measuring: Measuring,
    early: bool,
    choices: Choices,
) -> dict[str, Any]:
    """What must be the same for a study to go on."""
    weights = [t for _, t in sorted(workload.model.state_dict().items())]
    operators = [f"{op.name} {op.kind} {[port.shape[1:] for port in op.ports]}" for op in graph.ops]
    batches = workload.calibration() if workload.calibration is not None else ()
    return {
        "model": fingerprint(*weights, *operators),
        "calibration data": fingerprint(*(t for batch in batches for _, t in tensors_in(batch))),
        "evaluation data": baseline.data,
        "metric": workload.metric,
        "goal": goal.model_dump(mode="json"),
        "space": space.model_dump(mode="json"),
        "strategy": strategy,
        "seed": seed,
        "backend": backend,
        "measuring": measuring.model_dump(mode="json"),
        "early stopping": early,
        "choices": {key: list(value) if key == "keep_float" else value for key, value in choices.items()},  # type: ignore[call-overload]
    }


def _notes(baseline: Baseline, evaluator: Evaluator, outcome: Outcome, workload: Workload) -> tuple[str, ...]:
    """What a reader of the result must know; said in the log, too."""
    notes = []
    if baseline.overlap:
        notes.append(
            f"{baseline.overlap} calibration samples are evaluation samples, too: the measured accuracy may be too good"
        )
    if baseline.overlap is None:
        notes.append("whether calibration and evaluation data overlap can't be seen: the workload evaluates by itself")
    if baseline.majority is not None and baseline.metrics["top1"] <= baseline.majority:
        notes.append(
            f"the float model ({baseline.metrics['top1']:.2f} %) is no better than always saying the most frequent "
            f"class ({baseline.majority:.2f} %): keeping its accuracy proves nothing"
        )
    if evaluator.runtime is None:
        notes.append(
            f"no runtime of {evaluator.table.name} runs here: the share of multiplications in float stood for latency"
        )
    if baseline.part is not None and evaluator.early:
        notes.append(
            f"hopeless candidates were given up on a random part of {baseline.part.samples} samples; one that would "
            f"have passed was with a probability of at most {ERROR:g} each (exact hypergeometric bound)"
        )
    if outcome.latency_ratio is not None and outcome.latency_ratio >= 1.0:
        notes.append(
            f"the float model is faster on {evaluator.runtime} here: {outcome.latency_ratio:.2f} times its latency"
        )
    for note in notes:
        log.info("%s", note)
    return tuple(notes)
