"""Search strategies: generators that yield candidates and receive their outcomes.

`bisect` (default) finds the fewest sensitive operators that must stay in float. `auto` tries the default candidate,
then `conservative` and `basic`. `mse`, `mse_v2` and `hawq_v2` move operators to float in the order of a ranking.
`exhaustive`, `random` and Optuna's samplers (`bayesian`, `tpe`) take candidates from the whole space.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from itertools import islice
from random import Random

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import Trial

from bitwright.tuning.goal import TrialOutcome
from bitwright.tuning.search import CandidateBatch, CandidateGenerator, Search, accumulate, evaluate_one, worst_first
from bitwright.tuning.space import Base, Candidate


def bisect(search: Search) -> CandidateGenerator:
    """Keep the 1, 2, 4, … most sensitive operators in float until the goal is met, then bisect.

    Then quantize again every operator that doesn't need to be in float, most expensive first. The rest of the budget
    is spent on other settings of the whole model (formats, observers, PTQ steps), which may meet the goal with fewer
    operators in float.
    """
    space = search.space
    start = yield from evaluate_one([space.start()])
    if start.passed:
        yield from _faster(search)
        return
    order = search.by_output()
    kept = yield from _fewest(search, None, order)
    if kept is not None:
        kept = yield from _minimal(search, None, kept)
    yield from _recover(search, order if kept is None else kept)


def _fewest(
    search: Search, base: Base | None, order: Sequence[str]
) -> Generator[CandidateBatch, list[TrialOutcome], list[str] | None]:
    """The shortest prefix of `order` that must be float; an empty prefix is known to be insufficient."""
    low, high, count = 0, None, 1
    while high is None and low < len(order):
        count = min(count, len(order))
        outcome = yield from evaluate_one([search.space.floated(base, order[:count])])
        if outcome.passed:
            high = count
        else:
            low, count = count, 2 * count
    if high is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        outcome = yield from evaluate_one([search.space.floated(base, order[:middle])])
        low, high = (low, middle) if outcome.passed else (middle, high)
    return list(order[:high])


def _minimal(
    search: Search, base: Base | None, kept: list[str]
) -> Generator[CandidateBatch, list[TrialOutcome], list[str]]:
    """Quantize unnecessary float operators again: half of them at once, then quarters, … then single ones."""
    macs = {op.name: op.macs for op in search.space.operators}
    size = len(kept) // 2
    while size >= 1 and len(kept) > 1:
        costly = sorted(kept, key=lambda name: -macs[name])
        groups = [costly[i : i + size] for i in range(0, len(costly), size)]
        smaller = False
        for group in groups:
            rest = [name for name in kept if name not in group]
            outcome = yield from evaluate_one([search.space.floated(base, rest)])
            if outcome.passed:
                kept, smaller = rest, True
        if size > 1:
            size = min(size // 2, max(1, len(kept) // 2))
        elif not smaller:
            break
    return kept


def _faster(search: Search) -> CandidateGenerator:
    """Everything is quantized: other formats may be even faster."""
    start, formats = search.space.start(), ("weights", "activations")
    others = [base for base in search.space.bases() if base != start.base]
    quick = [b for b in others if all(getattr(b, n) == getattr(start.base, n) for n in vars(b) if n not in formats)]
    if quick:
        yield [search.space.start(base) for base in quick]


def _recover(search: Search, kept: Sequence[str]) -> CandidateGenerator:
    """Try other settings of the whole model, most similar first, and find how few of `kept` they need."""
    default, *others = search.space.bases()
    if not others:
        return
    others.sort(key=lambda base: (base.weights, base.activations) != (default.weights, default.activations))
    outcomes = yield [search.space.start(base) for base in others]
    short = [(base, outcome) for base, outcome in zip(others, outcomes, strict=True) if not outcome.passed]
    for base, _ in sorted(short, key=lambda pair: -pair[1].margin):
        if len(kept) > 1:
            found = yield from _fewest(search, base, kept[:-1])
            if found is not None:
                kept = found


_ORDER = ("conv", "matmul", "linear")


def conservative(search: Search) -> CandidateGenerator:
    """Quantize convolutions, matrix products, linear operators and the rest; keep each kind that meets the goal."""
    free = search.space.free
    kinds = sorted({op.kind for op in free}, key=lambda kind: (_place(kind), kind))
    quantized: set[str] = set()
    for kind in kinds:
        floats = [op.name for op in free if op.kind not in (*quantized, kind)]
        outcome = yield from evaluate_one([search.space.floated(None, floats)])
        if outcome.passed:
            quantized.add(kind)


def _place(kind: str) -> int:
    return next((place for place, start in enumerate(_ORDER) if kind.startswith(start)), len(_ORDER))


def basic(search: Search) -> CandidateGenerator:
    """Start with the settings closest to the default, then move operators to float, from the last to the first.

    Then combine the operators that helped, most helpful first: only those that improve the result and, if that isn't
    enough, all of them.
    """
    space = search.space
    bases = list(space.bases())
    outcomes = yield [space.start(base) for base in bases]
    if any(outcome.passed for outcome in outcomes):
        return
    best, base = max(zip(outcomes, bases, strict=True), key=lambda pair: pair[0].margin)
    names = [op.name for op in reversed(space.free)]
    singles = yield [space.floated(base, [name]) for name in names]
    if any(outcome.passed for outcome in singles):
        return
    order = sorted(zip(names, singles, strict=True), key=lambda pair: -pair[1].margin)
    kept: list[str] = []
    margin = best.margin
    for name, _ in order:
        outcome = yield from evaluate_one([space.floated(base, [*kept, name])])
        if outcome.passed:
            return
        if outcome.margin > margin:
            kept.append(name)
            margin = outcome.margin
    yield from accumulate(search, [name for name, _ in order], base)


def auto(search: Search) -> CandidateGenerator:
    """Try cheap candidates first."""
    outcome = yield from evaluate_one([search.space.start()])
    if outcome.passed:
        return
    yield from conservative(search)
    yield from basic(search)


def mse(search: Search) -> CandidateGenerator:
    """Operators by the mean squared error between float and quantized activations, worst first."""
    yield from worst_first(search, search.by_mse())


def mse_v2(search: Search) -> CandidateGenerator:
    """While the goal is missed, move the operator to float that improves the outputs most.

    Operators are ranked in every round. Once the goal is met, quantize the least helpful ones again until it is missed.
    """
    space, kept = search.space, list[str]()
    outcome = yield from evaluate_one([space.start()])
    names = [op.name for op in space.free]
    while not outcome.passed and len(kept) < len(names):
        kept.append(search.by_outputs_of({name: [*kept, name] for name in names if name not in kept})[0])
        outcome = yield from evaluate_one([space.floated(None, kept)])
    while outcome.passed and len(kept) > 1:
        least = search.by_outputs_of({name: [other for other in kept if other != name] for name in kept})[0]
        outcome = yield from evaluate_one([space.floated(None, [name for name in kept if name != least])])
        if outcome.passed:
            kept.remove(least)


def hawq_v2(search: Search) -> CandidateGenerator:
    """Accumulate operators by trace(H)·‖ΔW‖², largest first, with Hutchinson's estimate on the user's loss."""
    search.need_loss("hawq_v2")
    start = yield from evaluate_one([search.space.start()])
    if not start.passed:
        yield from accumulate(search, search.by_hessian())


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
