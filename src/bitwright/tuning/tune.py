"""`tune(workload)`: find the fastest model that meets the goal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn

from bitwright.backends import DEFAULT_BACKEND, Choices, make_plan
from bitwright.backends import backend as find_backend
from bitwright.core.arguments import Amount, Count, Seed, strict
from bitwright.core.display import Progress, phases
from bitwright.core.errors import BitwrightError, PlanError, Problem
from bitwright.core.files import disk_error, fingerprint, scratch_folder
from bitwright.core.output_folder import locked, recover, staged_output
from bitwright.core.registry import STRATEGIES, TUNING_REPORTERS
from bitwright.core.tensor_tree import eval_mode
from bitwright.deployment import open_runtime
from bitwright.graph import capture_paths
from bitwright.ptq import MEMORY
from bitwright.ptq.quantize import Quantized, put_back
from bitwright.quantizers import find_attachment, strip
from bitwright.tuning.evaluation import (
    Baseline,
    Evaluator,
    Measuring,
    load_calibration,
    measure_float,
    quantize_candidate,
)
from bitwright.tuning.goal import ERROR, Budget, Goal, Paired, TrialOutcome, mcnemar
from bitwright.tuning.result import Tuned
from bitwright.tuning.search import (
    Search,
    Strategy,
    StrategyRunner,
    TrialRecord,
    TuningStudy,
    open_study,
    study_identity,
)
from bitwright.tuning.space import Candidate, SearchSpace, Space, check_space, make_space
from bitwright.workload import Workload, can_measure, hits_of, pairs

log = logging.getLogger("bitwright")
STUDY = "study.db"  # in the output folder, unless a store is given
_RECORDED = 16
_HEAT = 3  # finalists that are timed again, in alternation
_CLOSE = 1.1  # maximum objective of finalists, relative to the best
_OVERRUN = 1.1  # a smaller overrun of the budget, relative to it, isn't mentioned
_NOISE = 1.03


@strict
def tune(
    workload: Workload,
    goal: Goal | None = None,
    budget: Budget | None = None,
    strategy: str = "bisect",
    store: str | Path | None = None,
    *,
    space: Space | None = None,
    backend: str = DEFAULT_BACKEND,
    name: str | None = None,
    output: str | Path | None = None,
    resume: bool | Literal["auto"] = False,
    seed: Seed = 0,
    samples: Count | None = None,
    measuring: Measuring | None = None,
    early: bool = True,
    memory: Amount = MEMORY,
    train: Callable[[nn.Module], object] | None = None,
    progress: Progress | None = None,
    on_result: Callable[[Tuned, Path], None] | None = None,
    **choices: Unpack[Choices],
) -> Tuned:
    """Search for the fastest quantized model that meets the goal, until the budget is spent.

    Afterwards the workload's model is the best one, prepared and calibrated (`strip` restores float). If no candidate
    meets the goal, the result is the best one found, with `met_goal=False`. `output` is a folder in which everything is
    saved, with the artefact and a report. `store` keeps the trials: a file or postgresql://…; by default a file in
    `output`, if there is one. With `resume`, one or many processes continue an existing study; "auto" continues only a
    study in `output`. Trials that are already in the study count against `Budget(trials=…)`.

    Each process needs its own `output`, even if they share a store. `on_result` may add files to the folder that
    becomes `output`, so that all files appear together. With `early`, the evaluation of a candidate stops after a
    random part of the data if the candidate can't pass. If the search fails, the model is restored to float.

    `train` makes it quantization-aware training: it gets the prepared model of each candidate and trains it in place,
    with its own optimizer. Every candidate starts from the float weights.

    A workload without an evaluation is quantized once, without a search.

    >>> inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> model = torch.nn.Linear(8, 2).eval()
    >>> workload = Workload(
    ...     name="tiny",
    ...     model=model,
    ...     inputs=(inputs[:1],),
    ...     calibration=lambda: [inputs],
    ...     evaluation=lambda: [(inputs, model(inputs).argmax(1))],
    ... )
    >>> tuned = tune(workload, Goal(drop="50%"), Budget(stop="first"))
    >>> tuned.met_goal, tuned.stopped_because
    (True, 'the first model met the goal')
    >>> _ = strip(model)
    """
    goal = (goal or Goal()).directed(workload)
    budget, measuring = budget or Budget(), measuring or Measuring()
    space = space or Space()
    if find_attachment(workload.model) is not None:
        raise BitwrightError("this model is already quantized", fix="strip(model) first", code="already-quantized")
    search_by: Strategy = STRATEGIES.get(strategy)
    table = find_backend(backend)
    tell = phases(progress)
    begun = time.perf_counter()
    place = None if output is None else Path(output)
    writers: list[Callable[[Tuned, Path], None]] = []
    with ExitStack() as stack:
        if place is not None:
            stack.enter_context(locked(place))
            recover(place)
            if resume == "auto" and store is not None:  # others may use it
                resume = False
            reporters = [TUNING_REPORTERS.get(one) for one in TUNING_REPORTERS.names()]
            writers = [make_writer(workload, backend, seed=seed, progress=progress) for make_writer in reporters]
            writers += [] if on_result is None else [on_result]
        tell("recording the model")
        calibration = load_calibration(workload, max([*space.samples, 0]) or samples, memory)
        if space.samples == () and samples is not None:
            space = space.model_copy(update={"samples": (samples,)})
        graph = capture_paths(workload.model, chain([workload.inputs], calibration), most=_RECORDED)
        check_space(space, graph, table)
        preferred: Choices = {"activations": space.activations[0], **choices} if space.activations else choices
        plan = make_plan(graph, backend, model=workload.name, **preferred)
        candidates = make_space(space, graph, table, plan, choices)
        with scratch_folder() as scratch:
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
                folder=scratch,
                state=scratch / "steps" if place is None else place / ".steps",
                early=early,
                train=train,
            )
            stack.callback(evaluator.restore_float)
            if not can_measure(workload):
                result = _once(workload, evaluator, candidates, goal, budget, strategy, seed, tell)
            else:
                doubt = None if "lower_is_better" in goal.model_fields_set else workload.direction_note()
                if doubt is not None:
                    log.info("%s", doubt)
                tell("evaluating the float model")
                metrics = goal.metrics(workload.metric)
                baseline = measure_float(workload, metrics, calibration, seed=seed)
                identity = study_identity(
                    workload, graph, baseline, goal, space, strategy, seed, backend, measuring, early, choices, train
                )
                where = store if store is not None or place is None else place / STUDY
                study = open_study(where, name or workload.name, identity, resume=resume)
                with closing(study):
                    if evaluator.runtime is not None:
                        tell("exporting the float model")
                        _ = evaluator.float_artefact  # write it while the model is float
                    run = _StudyRun(workload, evaluator, candidates, baseline, study, budget, tell, begun=begun)
                    result = run(search_by, strategy, seed)
            if place is not None:
                tell("saving")
                with staged_output(place) as staged:
                    result.save(staged)
                    for write in writers:
                        write(result, staged)
                evaluator.forget()
            evaluator.done = True
        return result


class _StudyRun:
    """The part of a study that this process runs, and the choice of the result."""

    def __init__(
        self,
        workload: Workload,
        evaluator: Evaluator,
        space: SearchSpace,
        baseline: Baseline,
        study: TuningStudy,
        budget: Budget,
        tell: Callable[[str], None],
        *,
        begun: float,
    ) -> None:
        self.begun = begun
        self.workload, self.evaluator, self.space, self.baseline = workload, evaluator, space, baseline
        self.study, self.budget, self.tell = study, budget, tell
        self.notes: list[str] = []
        self.outcomes: list[tuple[Candidate, TrialOutcome]] = []

    def __call__(self, strategy: Strategy, name: str, seed: int) -> Tuned:
        goal = self.evaluator.goal
        search = Search(self.workload, self.space, goal, self.evaluator, self.study, self.tell, seed=seed)
        explorer = StrategyRunner(
            self.study,
            self.budget,
            lambda candidate: self.evaluator(candidate, self.baseline, self.tell),
            self._finished,
        )
        explorer.run(strategy, search)
        history = sorted(explorer.asked.values(), key=lambda asked: asked.number)
        if not history:
            raise BitwrightError(
                "the budget ended before the first trial",
                value=self.budget.minutes,
                fix="increase minutes",
                code="budget-too-small",
            )
        best, outcome, quantized, on_runtime = self._choose_result(history)
        paired = self._paired(quantized is None)
        self._note_overrun()
        return Tuned(
            workload=self.workload.name,
            metric=self.workload.metric,
            met_goal=outcome.passed,
            quantized=quantized,
            candidate=best,
            outcome=outcome,
            on_runtime=on_runtime,
            baseline=self.baseline,
            goal=goal,
            budget=self.budget,
            strategy=name,
            seed=seed,
            history=history,
            stopped_because=explorer.why,
            notes=(*self.notes, *_notes(self.baseline, self.evaluator, outcome)),
            paired=paired,
        )

    def _note_overrun(self) -> None:
        """Say by how much the whole search exceeded its budget."""
        minutes, took = self.budget.minutes, (time.perf_counter() - self.begun) / 60
        if minutes is not None and took > _OVERRUN * minutes:
            self._note(
                f"the search took {took:.2g} minutes with a budget of {minutes:g}: the budget ends the search between "
                "trials, and excludes the float model's evaluation and the rebuilding of the best model"
            )

    def _finished(self, asked: TrialRecord) -> None:
        """Remove the PTQ state of a candidate, because the study now contains its outcome."""
        self.evaluator.forget(asked.candidate)
        self.outcomes.append((asked.candidate, asked.outcome))
        self.outcomes.sort(key=lambda pair: pair[1].rank())
        self.evaluator.keep_trained([candidate for candidate, _ in self.outcomes[:_HEAT]])
        log.info("%s", asked)

    def _choose_result(
        self, history: list[TrialRecord]
    ) -> tuple[Candidate, TrialOutcome, Quantized | None, dict[str, float] | None]:
        """The best candidate that also passes on the real runtime; the model stays quantized with it."""
        ranked = self._ranked(history)
        best = ranked[0]
        if best[1].failed is not None:
            raise PlanError(
                [
                    Problem(what=asked.outcome.failed or "", where=str(asked.candidate), code="candidate-failed")
                    for asked in history[:10]
                ],
                title="no candidate could be measured",
            )
        for candidate, outcome in [pair for pair in ranked if pair[1].passed][:_HEAT] or ranked[:1]:
            plan = self.evaluator.plan(candidate)
            if not any(True for _ in plan.quantized):
                return candidate, outcome, None, None
            self.tell("rebuilding the best model")
            before, quantized = quantize_candidate(self.evaluator, candidate, plan, self.tell)
            found = self._on_runtime(quantized)
            if not outcome.passed or found is None or self._holds(found):
                return candidate, outcome, quantized, found
            self._note(f"a candidate passes in simulation, but not on {self.evaluator.runtime}: {found}; {candidate}")
            failed = (candidate, outcome.model_copy(update={"passed": False, "accurate": False}), quantized, found)
            strip(self.workload.model)
            put_back(self.workload.model, before)
        candidate, outcome, _, found = failed
        _, quantized = quantize_candidate(self.evaluator, candidate, self.evaluator.plan(candidate), self.tell)
        return candidate, outcome, quantized, found

    def _holds(self, metrics: dict[str, float]) -> bool:
        return self.evaluator.goal.worst_margin(self.workload.metric, self.baseline.metrics, metrics) >= 0

    def _on_runtime(self, quantized: Quantized) -> dict[str, float] | None:
        """The metrics of the artefact on the runtime."""
        runtime = self.evaluator.runtime
        if runtime is None:
            return None
        self.tell(f"evaluating on {runtime}")
        try:
            return open_runtime(runtime, self.evaluator.write(quantized, "best")).accuracy(self.workload)
        except Exception as error:  # a user's metric may require an nn.Module
            if (refused := disk_error(error)) is not None:
                raise refused from error
            self._note(f"can't measure the accuracy of the artefact on {runtime}: {type(error).__name__}: {error}")
            return None

    def _note(self, text: str) -> None:
        log.info("%s", text)
        self.notes.append(text)

    def _ranked(self, history: list[TrialRecord]) -> list[tuple[Candidate, TrialOutcome]]:
        """Candidates, best first; those close to the best are timed again, in alternation."""
        asked = sorted(history, key=lambda asked: asked.outcome.rank())
        ranked = [(one.candidate, one.outcome) for one in asked]
        limit = _CLOSE * (ranked[0][1].objective or 0.0)
        near = [
            (candidate, outcome)
            for candidate, outcome in ranked[:_HEAT]
            if outcome.passed and outcome.latency_ms is not None and (outcome.objective or 0.0) <= limit
        ]
        near = [pair for pair in near if any(True for _ in self.evaluator.plan(pair[0]).quantized)]
        if len(near) < 2:
            return ranked
        heat = f"finalists {fingerprint(*sorted(candidate.key for candidate, _ in near))}"
        found = self.study.recall(heat) or self.study.keep(
            heat, self._time_finalists([candidate for candidate, _ in near])
        )
        again = [(c, self.evaluator.apply_goal(o.model_copy(update=found[c.key]))) for c, o in near]
        fastest = min((outcome.objective or 0.0 for _, outcome in again if outcome.passed), default=0.0)
        # within the noise of timings, the more accurate candidate is better
        again.sort(
            key=lambda pair: (not pair[1].passed, (pair[1].objective or 0.0) > _NOISE * fastest, -pair[1].margin)
        )
        return again + [pair for pair in ranked if pair[0] not in [candidate for candidate, _ in near]]

    def _time_finalists(self, finalists: list[Candidate]) -> dict[str, dict[str, Any]]:
        files = {}
        for candidate in finalists:
            self.tell("preparing the finalists")
            with self.evaluator.quantized(candidate) as quantized:
                files[candidate.key] = self.evaluator.write(quantized, candidate.key)
        return self.evaluator.measured(files, self.tell)

    def _paired(self, is_float: bool) -> Paired | None:
        """Compare with float sample by sample, if samples are accessible."""
        before = self.baseline.right
        if before is None or is_float:
            return None
        self.tell("comparing with float, sample by sample")
        assert self.workload.evaluation is not None
        with torch.no_grad(), eval_mode(self.workload.model):
            after = torch.cat([hits.cpu() for hits, _ in hits_of(pairs(self.workload), self.workload.model)])
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
    """Quantize with the preferred settings, because the workload has no evaluation."""
    log.info(
        "workload %r has neither evaluation= nor evaluate=: it is quantized once without checking a goal", workload.name
    )
    candidate = space.start()
    _, quantized = quantize_candidate(evaluator, candidate, evaluator.plan(candidate), tell)
    outcome = TrialOutcome(passed=False, accurate=False, margin=float("nan"))
    return Tuned(
        workload=workload.name,
        metric=workload.metric,
        met_goal=None,
        quantized=quantized,
        candidate=candidate,
        outcome=outcome,
        on_runtime=None,
        baseline=None,
        goal=goal,
        budget=budget,
        strategy=strategy,
        seed=seed,
        history=(),
        stopped_because="the workload has no evaluation",
        notes=("no goal was checked, because the workload has neither evaluation= nor evaluate=",),
        paired=None,
    )


def _notes(baseline: Baseline, evaluator: Evaluator, outcome: TrialOutcome) -> tuple[str, ...]:
    """Notes for readers of the result, which are also logged."""
    notes = []
    if baseline.overlap:
        notes.append(
            f"{baseline.overlap} calibration samples are also evaluation samples: the measured accuracy may be too high"
        )
    if baseline.overlap is None:
        notes.append("can't check whether calibration and evaluation data overlap: the workload has its own evaluation")
    if baseline.majority is not None and baseline.right is not None and baseline.hit_rate <= baseline.majority:
        notes.append(
            f"the float model ({baseline.hit_rate:.2f} %) is no better than always predicting the most frequent "
            f"class ({baseline.majority:.2f} %), so keeping its accuracy proves nothing"
        )
    if evaluator.runtime is None:
        notes.append(
            f"no runtime of {evaluator.table.name} is available: the share of float multiplications replaced latency"
        )
    if baseline.part is not None and evaluator.early:
        notes.append(
            f"candidates that can't pass were rejected on a random part of {baseline.part.samples} samples; the "
            f"probability of rejecting one that would pass is at most {ERROR:g} each (exact hypergeometric bound)"
        )
    if outcome.latency_ratio is not None and outcome.latency_ratio >= 1.0:
        notes.append(
            f"the float model is faster on {evaluator.runtime}: this takes {outcome.latency_ratio:.2f} times as long"
        )
    for note in notes:
        log.info("%s", note)
    return tuple(notes)
