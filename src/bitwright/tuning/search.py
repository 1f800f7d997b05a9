"""Run a strategy, and provide it with the space, the goal, and rankings of operators that a study computes once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from bitwright.backends import Choices
from bitwright.core.errors import BitwrightError, TrainError
from bitwright.core.files import disk_error, fingerprint
from bitwright.core.formatting import counted
from bitwright.core.interrupts import current_stop, safe_point
from bitwright.core.task_store import Study
from bitwright.core.task_store import open_study as open_any
from bitwright.core.tensor_tree import tensors_in
from bitwright.graph import Graph, Source
from bitwright.plan import Plan
from bitwright.sensitivity import errors_without, hessian_traces, score
from bitwright.tuning.evaluation import Baseline, Evaluator, Measuring, Tell
from bitwright.tuning.goal import Budget, Goal, TrialOutcome, failure
from bitwright.tuning.space import Base, Candidate, SearchSpace, Space
from bitwright.workload import Workload, loss_of, pairs
from bitwright.workload.data import first, split

TuningStudy: TypeAlias = Study[Candidate, TrialOutcome]


def open_study(
    store: str | Path | None, name: str, identity: Mapping[str, Any], *, resume: bool | Literal["auto"]
) -> TuningStudy:
    """Create or resume a study; a study with a different model, data, goal or space is rejected.

    `store` is a file, a URL (postgresql://…), or None for an in-memory study. "auto" resumes a study that has trials,
    and starts over if an earlier search failed before its first trial.
    """
    if resume == "auto":
        try:
            return open_any(store, name, identity, resume=False, kind=TrialOutcome, gave_up=failure)
        except BitwrightError as error:
            if "study-exists" not in error.codes:
                raise
    return open_any(store, name, identity, resume=bool(resume), kind=TrialOutcome, gave_up=failure)


def study_identity(
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
    train: Callable[..., object] | None = None,
) -> dict[str, Any]:
    """The properties that must be equal to resume a study."""
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
        **(
            {}
            if train is None
            else {"training": getattr(train, "identity", None) or getattr(train, "__qualname__", "")}
        ),
    }


def quantized_sites(plan: Plan) -> set[str]:
    """Sites with their own quantizer."""
    return {site for site, spec in plan.quantized if spec.share is None}


def operator_penalties(
    values: Mapping[str, float], gone: Mapping[str, Collection[str]], graph: Graph
) -> dict[str, float]:
    """The penalty of each operator, computed from the penalties of sites.

    `gone` maps each operator to the sites that disappear when it stays in float. The penalty of a site that no single
    operator removes is divided equally among the operators that read its tensor.
    """
    sums = {name: sum(values.get(site, 0.0) for site in sites) for name, sites in gone.items()}
    alone = {site for sites in gone.values() for site in sites}
    for site, value in values.items():
        if site in alone:
            continue
        readers = _readers(site, graph, sums)
        for name in readers:
            sums[name] += value / len(readers)
    return sums


def _readers(site: str, graph: Graph, known: Mapping[str, float]) -> set[str]:
    """The operators that read the tensor of a site, including those after operators that are never quantized."""
    operator, _, port = site.rpartition(":")
    if operator not in graph.by_name:
        return set()
    if port != "output":
        return {operator} & set(known)
    found: set[str] = set()
    queue, seen = [Source("op", operator)], set[Source]()
    while queue:
        source = queue.pop()
        if source in seen:
            continue
        seen.add(source)
        for reader, _ in graph.consumers.get(source, ()):
            if reader.name in known:
                found.add(reader.name)
            else:
                queue.append(Source("op", reader.name))
    return found


CandidateBatch = Sequence[Candidate]
CandidateGenerator = Generator[CandidateBatch, list[TrialOutcome], None]
"""A strategy yields candidates that may be evaluated in parallel, and receives their outcomes in the same order."""
Strategy = Callable[["Search"], CandidateGenerator]
_SAMPLES, _BATCH = 64, 32  # samples and batch size for a ranking
_LABELLED = 256  # samples for Hessian traces


class Search:
    """The interface between a strategy and the search."""

    def __init__(
        self,
        workload: Workload,
        space: SearchSpace,
        goal: Goal,
        evaluator: Evaluator,
        study: TuningStudy,
        tell: Tell,
        *,
        seed: int,
    ) -> None:
        self.workload, self.space, self.goal, self.seed = workload, space, goal, seed
        self._evaluator, self._study, self._tell = evaluator, study, tell

    def need_loss(self, strategy: str) -> None:
        """Raise an error early if the workload lacks what a ranking needs."""
        if self.workload.loss is None or self.workload.evaluation is None:
            raise BitwrightError(
                f"{strategy} requires a loss and data with targets",
                where=f"workload {self.workload.name!r}",
                fix="pass Workload(loss=..., evaluation=...), or use another strategy",
                code="loss-required",
            )

    def by_output(self) -> list[str]:
        """Operators by the output error of quantizing each alone, worst first."""
        return self._ranking("output", lambda: self._scored(lambda one: one.output_error))

    def by_mse(self) -> list[str]:
        """Operators by the mean squared error of their inputs, worst first."""
        return self._ranking("mse", lambda: self._scored(lambda one: one.mse or 0.0, weights=False))

    def by_hessian(self) -> list[str]:
        """Operators by trace(H)·‖ΔW‖², worst first."""
        return self._ranking("hessian", self._hessian_scores)

    def by_outputs_of(self, floats: Mapping[str, Iterable[str]]) -> list[str]:
        """Names sorted by the output error with the given operators in float, smallest first."""
        sets = {name: sorted(kept) for name, kept in floats.items()}

        def compute() -> dict[str, float]:
            self._tell("ranking operators")
            start = self.space.start()
            off = {name: self._removed_sites(start, kept) for name, kept in sets.items()}
            with self._evaluator.quantized(start) as quantized:
                batches = list(split(first(self._evaluator.calibration, _SAMPLES), _BATCH))
                return errors_without(quantized.model, batches, off)

        known = self._cached(f"outputs {fingerprint(repr(sorted(sets.items())))}", compute)
        return sorted(sets, key=lambda name: known[name])

    def _removed_sites(self, start: Candidate, floats: Iterable[str]) -> set[str]:
        """The sites that disappear from the plan if these operators stay in float too."""
        every = quantized_sites(self._evaluator.plan(start))
        return every - quantized_sites(self._evaluator.plan(start.with_float({*start.float, *floats})))

    def _cached(self, name: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Store the values with the study, so that all workers and later runs use the same ones."""
        known = self._study.recall(name)
        values: dict[str, float] = self._study.keep(name, compute()) if known is None else known
        return values

    def _ranking(self, name: str, compute: Callable[[], dict[str, float]]) -> list[str]:
        values = self._cached(name, compute)
        free = [op.name for op in self.space.free]
        return sorted(free, key=lambda op: -values.get(op, float("-inf")))

    def _scored(self, value: Callable[..., float], *, weights: bool = True) -> dict[str, float]:
        self._tell("ranking operators")
        with self._evaluator.quantized(self.space.start()) as quantized:
            scores = score(quantized.model, split(first(self._evaluator.calibration, _SAMPLES), _BATCH))
        values = {one.site: value(one) for one in scores.sites if weights or not one.site.endswith(":weight")}
        start = self.space.start()
        gone = {op.name: self._removed_sites(start, [op.name]) for op in self.space.free}
        return operator_penalties(values, gone, self._evaluator.graph)

    def _hessian_scores(self) -> dict[str, float]:
        self._tell("estimating Hessian traces")
        assert self.workload.loss is not None and self.workload.evaluation is not None
        model, graph = self.workload.model, self._evaluator.graph
        parameters = {
            op.name: port.sources[0].name
            for op in graph.ops
            if (port := op.port("weight")) is not None and len(port.sources) == 1 and port.sources[0].kind == "param"
        }
        free = {op.name for op in self.space.free}
        parameters = {op: name for op, name in parameters.items() if op in free}
        data = first(pairs(self.workload), _LABELLED)
        traces = hessian_traces(model, data, loss_of(self.workload), sorted(set(parameters.values())), seed=self.seed)
        errors = self._weight_errors()
        return {op: max(traces[name], 0.0) * errors.get(op, 0.0) for op, name in parameters.items()}

    @torch.no_grad()
    def _weight_errors(self) -> dict[str, float]:
        """‖ΔW‖² of each operator's quantized weight, including folded norms."""
        errors: dict[str, float] = {}
        with self._evaluator.quantized(self.space.start()) as quantized:
            scores = score(quantized.model, split(first(self._evaluator.calibration, 1), 1))
            numbers = {
                op.site("weight"): torch.Size(port.shape).numel()
                for op in quantized.graph.ops
                if (port := op.port("weight")) is not None
            }
        for site in scores.sites:
            if site.site in numbers:
                errors[site.operator] = (site.mse or 0.0) * numbers[site.site]
        return errors


progress_log = getLogger("bitwright.progress")
_WAIT = 0.1  # seconds between checks of another worker's progress
EvaluateCandidate = Callable[[Candidate], TrialOutcome]


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A candidate with its outcome."""

    number: int
    candidate: Candidate
    outcome: TrialOutcome
    fresh: bool
    """Whether it was evaluated by this process."""

    def __str__(self) -> str:
        verdict = "" if self.outcome.failed else "passes: " if self.outcome.passed else "fails: "
        known = "" if self.fresh else " (known)"
        return f"trial {self.number + 1}: {verdict}{self.outcome.text}; {self.candidate}{known}"


class StrategyRunner:
    """Runs a strategy."""

    def __init__(
        self, study: TuningStudy, budget: Budget, evaluate: EvaluateCandidate, watch: Callable[[TrialRecord], None]
    ) -> None:
        self.study, self.budget, self.evaluate, self.watch = study, budget, evaluate, watch
        self.asked: dict[str, TrialRecord] = {}
        self.why = "the strategy has no more candidates"

    def run(self, strategy: Strategy, search: Search) -> None:
        """Run until the strategy or the budget ends, or until the first success if that is enough."""
        asking = strategy(search)
        try:
            wave = list(next(asking))
            while self._wave(wave):
                wave = list(asking.send([self.asked[candidate.key].outcome for candidate in wave]))
        except StopIteration:
            pass
        finally:
            asking.close()

    def _wave(self, wave: list[Candidate]) -> bool:
        """Evaluate the candidates and return whether to continue."""
        todo = [candidate for candidate in wave if candidate.key not in self.asked]
        numbers = {candidate.key: len(self.asked) + place for place, candidate in enumerate(todo)}
        trials = self.budget.trials
        cut = trials is not None and len(self.asked) + len(todo) > trials
        if cut and trials is not None:
            todo = todo[: trials - len(self.asked)]
        while todo:
            waiting = []
            for candidate in todo:
                safe_point()
                got = self._outcome(candidate)
                if got is None:
                    if self._out_of_time():
                        return False
                    waiting.append(candidate)
                    continue
                outcome, fresh = got
                asked = TrialRecord(number=numbers[candidate.key], candidate=candidate, outcome=outcome, fresh=fresh)
                self.asked[candidate.key] = asked
                self.watch(asked)
                if outcome.passed and self.budget.stop == "first":
                    self.why = "the first model met the goal"
                    return False
            if waiting and len(waiting) == len(todo):
                time.sleep(_WAIT)
            todo = waiting
        if cut:
            self.why = f"the budget of {counted(trials or 0, 'trial')} is spent"
        return not cut

    def _outcome(self, candidate: Candidate) -> tuple[TrialOutcome, bool] | None:
        """The known or new outcome; None if another worker evaluates the candidate or the time is over."""
        known = self.study.known(candidate)
        if known is not None:
            return known, False
        if self._out_of_time():
            return None
        claim = self.study.claim(candidate)
        if claim is None:
            return None
        try:
            with self.study.heartbeats(claim):
                outcome = self._evaluated(candidate)
        except BaseException:
            self.study.release(claim)
            raise
        self.study.finish(claim, outcome)
        progress_log.debug("trial finished: %s", candidate.key)
        return outcome, True

    def _evaluated(self, candidate: Candidate) -> TrialOutcome:
        begin = time.perf_counter()
        try:
            return self.evaluate(candidate)
        except TrainError:
            raise  # the other candidates are trained in the same way
        except (
            Exception
        ) as error:  # a candidate that breaks the model, the exporter or the metric must not end the search
            if current_stop().received:
                raise  # caused by a signal
            if (refused := disk_error(error)) is not None:
                raise refused from error  # unrelated to the candidate
            return failure(f"{type(error).__name__}: {error}", time.perf_counter() - begin)

    def _out_of_time(self) -> bool:
        minutes = self.budget.minutes
        over = minutes is not None and self.study.spent() >= 60 * minutes
        if over and minutes is not None:
            self.why = f"the budget of {counted(minutes, 'minute')} is spent"
        return over


def evaluate_one(wave_of_one: CandidateBatch) -> Generator[CandidateBatch, list[TrialOutcome], TrialOutcome]:
    """Request a single candidate."""
    [outcome] = yield wave_of_one
    return outcome


def accumulate(
    search: Search, order: Sequence[str], base: Base | None = None
) -> Generator[CandidateBatch, list[TrialOutcome], bool]:
    """Move operators to float one by one, cumulatively, until the goal is met."""
    for count in range(1, len(order) + 1):
        outcome = yield from evaluate_one([search.space.floated(base, order[:count])])
        if outcome.passed:
            return True
    return False


def worst_first(search: Search, order: Sequence[str]) -> CandidateGenerator:
    """Quantize everything, then try single operators in float, worst first, then accumulate them.

    The accumulation starts with the operators that help most on their own.
    """
    start = yield from evaluate_one([search.space.start()])
    if start.passed:
        return
    singles = yield [search.space.floated(None, [name]) for name in order]
    if any(outcome.passed for outcome in singles):
        return
    gains = {name: outcome.margin for name, outcome in zip(order, singles, strict=True)}
    yield from accumulate(search, sorted(order, key=lambda name: -gains[name]))
