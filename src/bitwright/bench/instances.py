"""Measure several simultaneous instances of a model: processes that are bound to different cores and start together."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from bitwright.bench.comparison import Instance, Together
from bitwright.core.display import Progress
from bitwright.core.errors import BitwrightError
from bitwright.core.files import scratch_folder
from bitwright.deployment import Latency, open_runtime


def _channel() -> TextIO:
    """A channel to the parent process. Output of a runtime goes to stderr instead."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _main() -> None:
    channel = _channel()

    def tell(answer: dict[str, Any]) -> None:
        channel.write(json.dumps(answer) + "\n")
        channel.flush()

    try:
        _serve(sys.stdin, tell)
    except BitwrightError as error:
        tell({"error": str(error)})


def _serve(lines: TextIO, tell: Callable[[dict[str, Any]], None]) -> None:
    order = json.loads(lines.readline())
    calls = []
    for job in order["jobs"]:
        session = open_runtime(order["runtime"], Path(job["artefact"]), threads=order["threads"])
        with np.load(job["feed"], allow_pickle=False) as arrays:
            feed = {name: arrays[f"arr_{index}"] for index, name in enumerate(job["inputs"])}
        calls.append((session, feed))
        for _ in range(order["warmup"]):
            session.run(feed)
    pinned = hasattr(os, "sched_getaffinity")
    tell({"cores": sorted(os.sched_getaffinity(0)) if pinned else []})
    for line in lines:
        asked = json.loads(line)
        session, feed = calls[asked["job"]]
        times = []
        while (end := time.perf_counter()) < asked["start"]:  # all processes have the same clock
            pass
        for _ in range(asked["runs"]):
            start = time.perf_counter()
            session.run(feed)
            end = time.perf_counter()
            times.append((end - start) * 1e3)
        tell({"times": times, "end": end})


if __name__ == "__main__":
    _main()


ModelVariant = Literal["float", "quantized"]
_ROUNDS = 10  # variants take turns this often
_NOTICE = 0.002  # seconds for each instance to read when a round starts
# A process is bound before it imports anything, because thread pools read their cores only once.
_BIND = "import os, runpy, sys; os.sched_setaffinity(0, map(int, sys.argv.pop(1).split(',')));"
_RUN = "import runpy; runpy.run_module('bitwright.bench.instances', run_name='__main__')"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One artefact with its inputs."""

    variant: ModelVariant
    batch: int
    artefact: Path
    feed: dict[str, NDArray[Any]]


def can_pin() -> bool:
    """Whether this system can bind processes to cores."""
    return hasattr(os, "sched_setaffinity")


def arrange(instances: int | None, cores: int | None) -> list[tuple[int, ...]]:
    """Assign different cores to each instance. Without a number, all cores of this process are used."""
    free = sorted(os.sched_getaffinity(0)) if can_pin() else list(range(os.cpu_count() or 1))
    if instances is None:
        instances = max(1, len(free) // (cores or 1))
    if cores is None:
        cores = max(1, len(free) // instances)
    if instances * cores > len(free):
        raise BitwrightError(
            "there are too few cores",
            where="instances × cores",
            value=f"{instances} × {cores}",
            fix=f"this process may use {len(free)}: lower --instances or --cores"
            + (", or allow more cores (taskset, cgroups)" if len(free) < (os.cpu_count() or 1) else ""),
            code="too-few-cores",
        )
    return [tuple(free[i * cores : (i + 1) * cores]) for i in range(instances)]


def run_together(
    runtime: str,
    jobs: Sequence[Job],
    places: Sequence[tuple[int, ...]],
    *,
    runs: int,
    warmup: int,
    progress: Progress | None = None,
) -> list[Together]:
    """Run each job `runs` times in one process per place. Jobs take turns; all processes run the same job at a time."""
    with scratch_folder() as folder, _started(places) as processes:
        order = {"runtime": runtime, "threads": len(places[0]), "warmup": warmup}
        described = [_described(job, folder / f"{index}.npz") for index, job in enumerate(jobs)]
        for process in processes:
            process.tell({**order, "jobs": described})
        cores = [process.hear()["cores"] for process in processes]
        times: list[list[list[float]]] = [[[] for _ in places] for _ in jobs]  # indexed by job and instance
        spans = [0.0] * len(jobs)
        turns, shuffler = list(range(len(jobs))), random.Random(0)
        done = 0
        for share in _shares(runs):
            shuffler.shuffle(turns)
            for turn in turns:
                start = time.perf_counter() + _NOTICE * len(processes)
                for process in processes:
                    process.tell({"job": turn, "runs": share, "start": start})
                heard = [process.hear() for process in processes]
                for kept, new in zip(times[turn], heard, strict=True):
                    kept += new["times"]
                spans[turn] += max(new["end"] for new in heard) - start
            done += share
            if progress is not None:
                progress(done, runs, "timing")
    bound = [tuple(found) or place for found, place in zip(cores, places, strict=True)]
    measured = zip(jobs, times, spans, strict=True)
    rows = [_row(runtime, job, runs, bound, own, span) for job, own, span in measured]
    speeds = {row.batch: row.throughput for row in rows if row.variant == "float"}
    return [row.model_copy(update={"ratio": row.throughput / speeds.get(row.batch, row.throughput)}) for row in rows]


def _shares(runs: int) -> list[int]:
    """Divide the runs into rounds of nearly equal size."""
    rounds = min(runs, _ROUNDS)
    return [runs // rounds + (index < runs % rounds) for index in range(rounds)]


def _row(
    runtime: str, job: Job, runs: int, places: Sequence[tuple[int, ...]], times: list[list[float]], span: float
) -> Together:
    def facts(values: list[float], seconds: float) -> dict[str, Any]:
        latency = Latency.of(values)
        return {
            "median_ms": latency.median_ms,
            "p90_ms": latency.p90_ms,
            "p99_ms": latency.p99_ms,
            "throughput": len(values) * job.batch / seconds,
        }

    each = [Instance(cores=place, **facts(own, sum(own) / 1e3)) for place, own in zip(places, times, strict=True)]
    whole = [value for own in times for value in own]
    return Together(
        runtime=runtime,
        variant=job.variant,
        batch=job.batch,
        pinned=can_pin(),
        runs=runs,
        ratio=1.0,
        instances=tuple(each),
        **facts(whole, span),
    )


def _described(job: Job, path: Path) -> dict[str, Any]:
    np.savez(path, *job.feed.values())  # by position, because names of inputs may be invalid as names of files
    return {"artefact": str(job.artefact), "feed": str(path), "inputs": list(job.feed)}


class _Process:
    """An instance, and the pipes to it."""

    def __init__(self, cores: tuple[int, ...]) -> None:
        bound = [_BIND + _RUN, ",".join(map(str, cores))] if can_pin() else [_RUN]
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed in end()
        self.process = subprocess.Popen(
            [sys.executable, "-c", *bound],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
        )

    def tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BitwrightError(f"an instance failed: {answer['error']}", code="instance-failed")
        return answer

    def _died(self) -> BitwrightError:
        code = self.process.wait()
        self.log.seek(0)
        said = self.log.read().strip().splitlines() or ["nothing"]
        return BitwrightError(
            f"an instance ended with exit code {code}",
            value=said[-1][:200],
            fix="use fewer instances if memory is short; without --instances the model runs in this process",
            code="instance-failed",
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


@contextmanager
def _started(places: Sequence[tuple[int, ...]]) -> Iterator[list[_Process]]:
    processes: list[_Process] = []
    try:
        for place in places:
            processes.append(_Process(place))
        yield processes
    finally:
        for process in processes:
            process.end()
