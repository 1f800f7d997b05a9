"""Let a strategy run over a study: look up what is known, evaluate what isn't, within the budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger

from bitwright.disk import disk_error
from bitwright.interrupts import current_stop, safe_point
from bitwright.tuning.candidate import Candidate
from bitwright.tuning.goal import Budget
from bitwright.tuning.outcome import Outcome, failure
from bitwright.tuning.search import Search, Strategy
from bitwright.tuning.store import Study

progress_log = getLogger("bitwright.progress")
_WAIT = 0.1  # seconds between looks at what another worker does
Evaluate = Callable[[Candidate], Outcome]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One candidate of the sequence, with what became of it."""

    number: int
    candidate: Candidate
    outcome: Outcome
    fresh: bool
    """Evaluated now, and here."""


class Explorer:
    """One run of a strategy."""

    def __init__(self, study: Study, budget: Budget, evaluate: Evaluate, watch: Callable[[Asked], None]) -> None:
        self.study, self.budget, self.evaluate, self.watch = study, budget, evaluate, watch
        self.asked: dict[str, Asked] = {}
        self.why = "the strategy has nothing more to try"

    def run(self, strategy: Strategy, search: Search) -> None:
        """Until the strategy ends, or the budget, or the goal holds and the first such model is enough."""
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
        """Whether to go on."""
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
                asked = Asked(number=numbers[candidate.key], candidate=candidate, outcome=outcome, fresh=fresh)
                self.asked[candidate.key] = asked
                self.watch(asked)
                if outcome.passed and self.budget.stop == "first":
                    self.why = "the goal holds, and the first such model is enough"
                    return False
            if waiting and len(waiting) == len(todo):
                time.sleep(_WAIT)
            todo = waiting
        if cut:
            self.why = f"the budget of {trials} trials is spent"
        return not cut

    def _outcome(self, candidate: Candidate) -> tuple[Outcome, bool] | None:
        """What is known, or what is found now; None: another worker is at it, or there is no time."""
        known = self.study.known(candidate)
        if known is not None:
            return known, False
        if self._out_of_time():
            return None
        claim = self.study.claim(candidate)
        if claim is None:
            return None
        try:
            with self.study.beating(claim):
                outcome = self._evaluated(candidate)
        except BaseException:
            self.study.give_back(claim)
            raise
        self.study.finish(claim, outcome)
        progress_log.debug("trial finished: %s", candidate.key)
        return outcome, True

    def _evaluated(self, candidate: Candidate) -> Outcome:
        begin = time.perf_counter()
        try:
            return self.evaluate(candidate)
        except Exception as error:  # one candidate that breaks the model, the exporter or the metric must not end all
            if current_stop().received:
                raise  # a signal broke it
            if (refused := disk_error(error)) is not None:
                raise refused from error  # it says nothing about the candidate
            return failure(f"{type(error).__name__}: {error}", time.perf_counter() - begin)

    def _out_of_time(self) -> bool:
        minutes = self.budget.minutes
        over = minutes is not None and self.study.spent() >= 60 * minutes
        if over:
            self.why = f"the budget of {minutes:g} minutes is spent"
        return over
