from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.cluster.data_parallel import Lane, replay


def test_all_devices_wait_for_the_slowest() -> None:
    fast = Lane("fast", ready=(4.0, 5.0), computing=5.0, tail=1.0)
    slow = Lane("slow", ready=(8.0, 10.0), computing=10.0, tail=1.0)
    step = replay([fast, slow], [1.0, 2.0])
    # bucket 0: 8 → 9, beside slow's computing; bucket 1: 10 → 12; the optimizer: 13
    assert step.period == pytest.approx(13.0)
    assert [sent.waited_for for sent in step.sent] == ["slow", "slow"]


def test_collectives_queue_behind_each_other() -> None:
    lane = Lane("a", ready=(1.0, 2.0, 3.0), computing=3.0, tail=0.0)
    step = replay([lane], [5.0, 5.0, 5.0])
    assert step.period == pytest.approx(1 + 15)
    assert [sent.waited_for for sent in step.sent] == ["a", "", ""]


def test_without_overlap_they_come_after_backward() -> None:
    lane = Lane("a", ready=(1.0, 4.0), computing=4.0, tail=0.0)
    assert replay([lane], [1.0, 1.0]).period == pytest.approx(5.0)
    assert replay([lane], [1.0, 1.0], overlap=False).period == pytest.approx(6.0)


def test_contention_slows_computing_while_messages_are_under_way() -> None:
    lane = Lane("a", ready=(2.0, 10.0), computing=10.0, tail=0.0, contention=0.5)
    # 2 s, then 4 s of a collective in which 2 s of work are done, then 6 s, then the last collective
    assert replay([lane], [4.0, 1.0]).period == pytest.approx(2 + 4 + 6 + 1)
    assert replay([replace(lane, contention=0.0)], [4.0, 1.0]).period == pytest.approx(11.0)


def test_a_collective_takes_longer_beside_computing() -> None:
    lane = Lane("a", ready=(2.0,), computing=10.0, tail=0.0, stretch=2.0)
    assert replay([lane], [3.0]).period == pytest.approx(10.0)  # 2 → 8, within computing
    assert replay([lane], [5.0]).period == pytest.approx(2 + 8 + 1)  # 4 of 5 s while computing, 1 s after
    both = [lane, replace(lane, name="b", computing=4.0, stretch=4.0)]
    # 2 → 4 at a quarter of the pace (0.5 s), 4 → 10 at half of it (3 s), then the rest
    assert replay(both, [5.0]).period == pytest.approx(10 + 1.5)


def test_a_long_tail_elsewhere_delays_only_once_per_step() -> None:
    """One device computes longer, the other has the longer tail: the period is that of the steady state."""
    a = Lane("a", ready=(10.0,), computing=10.0, tail=1.0)
    b = Lane("b", ready=(4.0,), computing=4.0, tail=6.0)
    assert replay([a, b], [1.0]).period == pytest.approx(12.0)


def test_what_all_do_first_is_in_the_step() -> None:
    lane = Lane("a", ready=(3.0,), computing=3.0, tail=1.0)
    assert replay([lane], [1.0], first=2.0).period == pytest.approx(7.0)


def test_times_of_work() -> None:
    lane = Lane("a", ready=(2.0, 10.0), computing=10.0, tail=0.0, contention=0.5)
    (run,) = replay([lane], [4.0, 1.0]).lanes
    start = run.knots[0][0]
    assert [run.time_at(work) - start for work in (1.0, 2.0, 3.0, 4.0, 10.0)] == pytest.approx([1, 2, 4, 6, 12])


seconds = st.floats(0.01, 10.0)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Lane], list[float]]:
    buckets = draw(st.integers(1, 4))
    lanes = []
    for number in range(draw(st.integers(1, 4))):
        gaps = draw(st.lists(seconds, min_size=buckets + 1, max_size=buckets + 1))
        ready = tuple(sum(gaps[: i + 1]) for i in range(buckets))
        contention = draw(st.floats(0.0, 0.8))
        count = draw(st.integers(1, 5))
        stretch = draw(st.floats(1.0, 3.0))
        lanes.append(Lane(f"lane{number}", ready, sum(gaps), draw(seconds), contention, count, stretch))
    return lanes, draw(st.lists(seconds, min_size=buckets, max_size=buckets))


@given(clusters())
def test_folding_changes_nothing(cluster: tuple[list[Lane], list[float]]) -> None:
    lanes, collectives = cluster
    every = [replace(lane, name=f"{lane.name}-{i}", count=1) for lane in lanes for i in range(lane.count)]
    assert replay(every, collectives).period == pytest.approx(replay(lanes, collectives).period)


@given(clusters())
def test_a_step_is_never_shorter_than_its_parts(cluster: tuple[list[Lane], list[float]]) -> None:
    lanes, collectives = cluster
    period = replay(lanes, collectives).period
    assert period >= max(lane.computing + lane.tail for lane in lanes) - 1e-9
    assert period >= sum(collectives) - 1e-9
    free = [replace(lane, contention=0.0, stretch=1.0) for lane in lanes]
    assert replay(free, collectives).period <= replay(free, collectives, overlap=False).period + 1e-9
