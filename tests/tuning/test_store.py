from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import raises_problem
from store_workers import IDENTITY, candidate, claim_and_wait, opened, outcome, race

from bitwright import BitwrightError
from bitwright.tuning import TrialOutcome
from bitwright.tuning.goal import failure
from bitwright.tuning.search import open_study


def test_what_was_finished_is_known_to_the_next_process(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for number in (1, 2):
        claim = study.claim(candidate(number))
        assert claim is not None
        with study.heartbeats(claim):
            study.finish(claim, outcome(number))
    again = opened(tmp_path)
    assert again.known(candidate(2)) == outcome(2)
    assert again.known(candidate(3)) is None
    assert again.claim(candidate(1)) is None
    assert again.known(candidate(1)) == outcome(1)


@settings(max_examples=20)
@given(st.floats(allow_nan=False), st.booleans(), st.one_of(st.none(), st.text()))
def test_outcomes_come_back_as_they_were(margin: float, passed: bool, failed: str | None) -> None:
    study = open_study(None, "study", IDENTITY, resume=False)
    claim = study.claim(candidate(0))
    assert claim is not None
    kept = TrialOutcome(passed=passed, accurate=passed, margin=margin, failed=failed, metrics={"a": 1.5})
    study.finish(claim, kept)
    assert study.known(candidate(0)) == kept


def test_a_claim_is_one_workers_alone_until_it_is_given_back(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    claim = one.claim(candidate(0))
    assert claim is not None
    assert other.claim(candidate(0)) is None
    one.release(claim)
    assert other.claim(candidate(0)) is not None


def test_a_dead_workers_trial_is_free_at_once(tmp_path: Path) -> None:
    opened(tmp_path)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=claim_and_wait, args=(tmp_path, ready))
    process.start()
    assert ready.wait(60)
    study = opened(tmp_path)
    assert study.claim(candidate(0)) is None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=60)
    assert process.exitcode is not None
    assert study.claim(candidate(0)) is not None


def test_what_kills_its_process_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwright.core.task_store._RETRIES", 2)
    study = opened(tmp_path)
    for _ in range(3):
        claim = study.claim(candidate(0))
        assert claim is not None
        study._fail(claim.id)  # as a later process does with a dead one's
    assert study.claim(candidate(0)) is None
    assert study.known(candidate(0)) == failure("the process that evaluated it died 3 times")


def test_what_went_wrong_is_free_again_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwright.core.task_store._RETRIES", 1)
    study = opened(tmp_path)
    for number in range(3):  # more often than processes may die: nobody died here
        claim = study.claim(candidate(0))
        assert claim is not None
        study.fail(claim, failure(f"number {number}"))
        assert study.known(candidate(0)) is None
    assert [one.failed for one in opened(tmp_path).failures(candidate(0))] == ["number 0", "number 1", "number 2"]
    assert study.failures(candidate(1)) == []


def test_who_was_taken_for_dead_leaves_its_task_to_others(tmp_path: Path) -> None:
    slow, other = opened(tmp_path), opened(tmp_path)
    claim = slow.claim(candidate(0))
    assert claim is not None
    other._fail(claim.id)  # as after a long silence
    again = other.claim(candidate(0))
    assert again is not None
    slow.finish(claim, outcome(1))
    assert slow.known(candidate(0)) is None
    other.finish(again, outcome(2))
    assert slow.known(candidate(0)) == outcome(2)


@pytest.mark.slow
def test_two_processes_never_have_the_same_trial(tmp_path: Path) -> None:
    opened(tmp_path)
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=race, args=(tmp_path, begin, results)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    done = sorted(results.get() for _ in range(results.qsize()))
    assert len(done) == len(set(done))
    study = opened(tmp_path)
    for number in range(12):  # what both passed over because the other was just at it
        claim = study.claim(candidate(number))
        if claim is not None:
            study.finish(claim, outcome(number))
    assert all(study.known(candidate(number)) is not None for number in range(12))


def test_another_model_goal_or_space_is_refused_with_the_difference(tmp_path: Path) -> None:
    study = opened(tmp_path)
    claim = study.claim(candidate(0))
    assert claim is not None
    study.finish(claim, outcome(1))
    with raises_problem("study-changed", where="goal.drop", mentions="0.02"):
        open_study(tmp_path / "study.db", "study", {"model": "abc", "goal": {"drop": 0.02}}, resume=True)
    with pytest.raises(BitwrightError) as raised:
        open_study(tmp_path / "study.db", "study", IDENTITY, resume=False)
    assert raised.value.codes == ["study-exists"]
    open_study(tmp_path / "study.db", "another", IDENTITY, resume=False)


def test_the_first_of_several_rankings_counts(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.keep("ranking", {"a": 1.0}) == {"a": 1.0}
    assert other.keep("ranking", {"a": 2.0}) == {"a": 1.0}


def test_time_is_counted_once_however_many_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("bitwright.core.task_store.time.time", lambda: now[0])
    one, other = opened(tmp_path), opened(tmp_path)
    now[0] = 1010.0
    assert one.spent() == pytest.approx(10)
    assert other.spent() == pytest.approx(10)
    now[0] = 2000.0
    late = opened(tmp_path)
    now[0] = 2005.0
    assert late.spent() == pytest.approx(15)


def test_a_store_that_cannot_be_opened_is_one_clear_error_without_the_password() -> None:
    with pytest.raises(BitwrightError) as caught:
        open_study("postgresql://me:secret@127.0.0.1:1/none", "study", IDENTITY, resume=False)
    assert "can't be opened" in str(caught.value)
    assert "secret" not in str(caught.value)
