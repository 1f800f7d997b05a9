from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from problems import raises_problem
from step_cases import net, timed_sample

from bitwright.core.output_folder import locked
from bitwright.profiling import SampleStore, Variant
from bitwright.profiling.profiler import measure
from bitwright.profiling.step_timer import Sample


def filled(path: Path) -> SampleStore:
    model, batch, loss = net()
    store = SampleStore(path, circumstances={"device": "this one"})
    measure([Variant(model=model)], batch, loss, store, clock="wall", rounds=3)
    return store


def test_a_store_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    store = filled(path)
    again = SampleStore(path, circumstances={"device": "this one"})
    assert again.samples == store.samples
    assert again.saved == store.saved
    assert again.costs() == store.costs()
    assert all(len(rows) == 3 for rows in again.samples.values())


@pytest.mark.parametrize("quota", [None, 0.5])
def test_timer_overhead_is_estimated_despite_pauses(
    quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half of a core, whether a step has a pause in it is chance, or the turn that it had."""
    monkeypatch.setattr("bitwright.profiling.profiler.cpu_quota", lambda: quota)
    assert bool(filled(tmp_path / "samples.jsonl").overhead) == (quota is None)


def test_known_operators_are_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    filled(path)
    lines = path.read_text().count("\n")
    filled(path)
    assert path.read_text().count("\n") == lines


def test_an_incomplete_line_is_dropped_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    store = filled(path)
    text = path.read_text()
    path.write_text(text[:-20])
    cut = SampleStore(path, circumstances={"device": "this one"})
    assert min(map(len, cut.samples.values())) == 2
    model, batch, loss = net()
    measure([Variant(model=model)], batch, loss, cut, clock="wall", rounds=3)
    assert {key: len(rows) for key, rows in cut.samples.items()} == {k: len(r) for k, r in store.samples.items()}
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_file_with_an_incomplete_header_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for text in ("", '{"bitwright_sam'):
        path.write_text(text)
        SampleStore(path, circumstances={"device": "this one"}).add({"facts": {"host": {}}})
        again = SampleStore(path, circumstances={"device": "this one"})
        assert again.facts == {"host": {}}


def test_damaged_samples_are_reported_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    filled(path)
    head, *lines = path.read_text().splitlines()
    for wrong in ("", "[]", '{"round": 3}', '{"round": [["add"]]}', '{"saved": [[1]]}', "\x00\xff", '{"facts": 3}'):
        path.write_text("\n".join([head, lines[0], wrong, *lines[1:]]) + "\n")
        with raises_problem("damaged-samples", where=f"{path}, line 3"):
            SampleStore(path, circumstances={"device": "this one"})
    for wrong in ("[]", "words", "3"):
        path.write_text(wrong + "\n")
        with raises_problem("damaged-samples", where=f"{path}, line 1"):
            SampleStore(path, circumstances={"device": "this one"})


def test_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    filled(path)
    with raises_problem("samples-differ", mentions="(device)"):
        SampleStore(path, circumstances={"device": "that one"})


def test_a_killed_process_leaves_whole_rounds(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    code = (
        f"import sys; from pathlib import Path; from bitwright.profiling import SampleStore\n"
        f"store = SampleStore(Path({str(path)!r}))\n"
        "for n in range(10**9):\n"
        "    store.add({'round': [[f'add({n % 7})', 'float32', 1.0, 2.0]] * 50})\n"
        "    if n == 5: print('going', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    store = SampleStore(path)
    assert all(len(rows) % 50 == 0 for rows in store.samples.values())
    assert sum(map(len, store.samples.values())) >= 250


def test_rounds_are_the_mean_of_a_steps_calls() -> None:
    model, batch, loss = net()
    sample = timed_sample(Variant(model=model), batch, loss)
    key = next(key for key in sample.calls if key[0].startswith("relu("))
    assert sample.calls[key] == 2
    store = SampleStore()
    store.add_round(sample, wanted=1)
    assert store.samples[key] == [(sample.forward[key] / 2, sample.backward[key] / 2, 0)]


def rounds_of(values: list[float], other: list[float]) -> SampleStore:
    store = SampleStore()
    for seconds, more in zip(values, other, strict=True):
        sample = Sample()
        for name, taken in (("conv2d(a)", seconds), ("relu(b)", more)):
            key = (name, "float32")
            sample.calls[key] = 1
            sample.forward[key] = taken
        store.add_round(sample, wanted=len(values))
    return store


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_confidence_intervals_have_their_nominal_coverage(other: float) -> None:
    """Whether an operator is the whole step, so that its own slow rounds are left out, or a part of it."""
    chance = random.Random(1)
    hits = 0
    for _ in range(300):
        values = [chance.gauss(1, 0.1) for _ in range(30)]
        store = rounds_of(values, [other * abs(chance.gauss(1, 0.1)) for _ in values])
        timing = store.costs()[("conv2d(a)", "float32")].forward
        assert timing.low is not None
        assert timing.high is not None
        hits += timing.low <= 1 <= timing.high
    assert 0.90 <= hits / 300 <= 0.99


def test_rounds_next_to_other_models_have_an_interval() -> None:
    """Each round has other operators beside this one: none is like another."""
    store = SampleStore()
    for number, seconds in enumerate((1.0, 2.0, 3.0)):
        store.add({"round": [["add(x)", "float32", seconds, 0.0], [f"relu({number})", "float32", 1.0, 0.0]]})
    timing = store.costs()[("add(x)", "float32")].forward
    assert timing.high is not None
    assert timing.high > 3.0


def test_one_round_has_no_interval() -> None:
    timing = rounds_of([2.0], [1.0]).costs()[("conv2d(a)", "float32")].forward
    assert (timing.seconds, timing.low, timing.high, timing.repetitions) == (2.0, 2.0, 2.0, 1)


def test_a_pause_that_hits_another_operator_in_each_step_is_in_the_sum() -> None:
    """A device with a part of a core stands still now and then; no operator's median would show it."""
    store = SampleStore()
    for number in range(40):
        sample = Sample()
        for index in range(4):
            key = (f"relu({index})", "float32")
            sample.calls[key] = 1
            sample.forward[key] = 1.0 + (10.0 if index == number % 4 else 0.0) + (500.0 if number in (7, 11) else 0.0)
        store.add_round(sample, wanted=100)
    assert sum(cost.forward.seconds for cost in store.costs().values()) == pytest.approx(14.0)


def _write_slowly(path: Path, begun: Any) -> None:
    """Write a line in two parts, as a process does that the system interrupts."""
    with locked(path.parent, name=path.name), path.open("a") as file:
        file.write('{"yardstick": 1')
        file.flush()
        begun.set()
        time.sleep(0.5)
        file.write(".5}\n")


def test_a_line_that_another_process_is_writing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    SampleStore(path)
    context = get_context("fork")
    begun = context.Event()
    process = context.Process(target=_write_slowly, args=(path, begun))
    process.start()
    assert begun.wait(30)
    found = SampleStore(path)
    found.add({"yardstick": 2.0})
    process.join(30)
    assert process.exitcode == 0
    assert SampleStore(path).yardsticks == [1.5, 2.0]
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]
