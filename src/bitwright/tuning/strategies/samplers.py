"""Strategies that take candidates from the whole space: exhaustive, random, and Optuna's samplers (bayesian, tpe)."""

from __future__ import annotations

import warnings
from itertools import islice
from random import Random

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import Trial

from bitwright.tuning.candidate import Base, Candidate, TrialOutcome
from bitwright.tuning.search import CandidateGenerator, Search

_WAVE = 8  # candidates that may be evaluated in parallel
_MISSES = 1000  # consecutive repeats after which nearly all candidates have been seen
# Optuna's samplers learn from each wave, so theirs are smaller.
_SAMPLED_WAVE = 4
_SAMPLED_MISSES = 50  # consecutive repeats after which the sampler has no new candidates
_START = 10  # random candidates at the start


def exhaustive(search: Search) -> CandidateGenerator:
    """Generate all candidates, those with the fewest changes first, until the budget ends."""
    everything = search.space.everything()
    while wave := list(islice(everything, _WAVE)):
        yield wave


def random(search: Search) -> CandidateGenerator:
    """Try each candidate at most once, starting with the default."""
    generator, seen = Random(search.seed), set[str]()
    wave: list[Candidate] = [search.space.start()]
    while wave:
        seen |= {candidate.key for candidate in wave}
        yield wave
        wave, misses = [], 0
        while len(wave) < _WAVE and misses < _MISSES:
            candidate = search.space.random(generator)
            if candidate.key in seen or any(candidate.key == other.key for other in wave):
                misses += 1
            else:
                wave.append(candidate)


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
    while misses < _SAMPLED_MISSES:
        asked: list[tuple[Trial, Candidate]] = []
        while len(asked) < _SAMPLED_WAVE and misses < _SAMPLED_MISSES:
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
