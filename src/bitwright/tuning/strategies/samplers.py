"""bayesian and tpe: strategies based on Optuna's samplers."""

from __future__ import annotations

import warnings

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import Trial

from bitwright.tuning.candidate import Base, Candidate, TrialOutcome
from bitwright.tuning.search import CandidateGenerator, Search

_WAVE = 4  # candidates that may be evaluated in parallel
_START = 10  # random candidates at the start
_MISSES = 50  # consecutive repeats after which the sampler has no new candidates


def tpe(search: Search) -> CandidateGenerator:
    """Use a tree-structured Parzen estimator."""
    sampler = TPESampler(seed=search.seed, n_startup_trials=_START, multivariate=True, constant_liar=True)
    yield from _sampled(search, sampler)


def bayesian(search: Search) -> CandidateGenerator:
    """Use a Gaussian process."""
    yield from _sampled(search, GPSampler(seed=search.seed, n_startup_trials=_START))


def _sampled(search: Search, sampler: BaseSampler) -> CandidateGenerator:
    """Use an in-memory study for the sampler, which is rebuilt deterministically from the seed and known outcomes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=sampler)
    [start] = yield [search.space.start()]
    seen: dict[str, TrialOutcome] = {search.space.start().key: start}
    misses = 0
    while misses < _MISSES:
        asked: list[tuple[Trial, Candidate]] = []
        while len(asked) < _WAVE and misses < _MISSES:
            trial = study.ask(_space(search))
            candidate = _candidate(search, trial)
            if candidate.key in seen:
                study.tell(trial, _loss(seen[candidate.key]))
                misses += 1
            elif any(candidate.key == other.key for _, other in asked):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                misses += 1
            else:
                asked.append((trial, candidate))
                misses = 0
        if not asked:
            return
        outcomes = yield [candidate for _, candidate in asked]
        for (trial, candidate), outcome in zip(asked, outcomes, strict=True):
            seen[candidate.key] = outcome
            study.tell(trial, _loss(outcome))


def _space(search: Search) -> dict[str, BaseDistribution]:
    axes = {f"base:{name}": len(values) for name, values in search.space.axes.items()}
    operators = {f"op:{op.name}": len(op.options) for op in search.space.operators}
    return {name: CategoricalDistribution(range(size)) for name, size in (axes | operators).items() if size > 1}


def _candidate(search: Search, trial: Trial) -> Candidate:
    def place(name: str) -> int:
        return int(trial.params.get(name, 0))

    space = search.space
    base = Base(**{name: values[place(f"base:{name}")] for name, values in space.axes.items()})
    return space.choose(base, {op.name: op.options[place(f"op:{op.name}")] for op in space.operators})


def _loss(outcome: TrialOutcome) -> float:
    """The objective if the candidate passes, otherwise a larger value that depends on what is missing."""
    if outcome.passed:
        return outcome.objective or 0.0
    return 3.0 + min(-outcome.margin, 1.0) if not outcome.accurate else 2.5
