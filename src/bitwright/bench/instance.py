"""One instance of a benchmark: a process of its own, which obeys lines of JSON until its input ends.

It is bound to its cores already. It opens the artefacts that the first line names, warms them up, says that it is
ready, and then answers each `{"job": i, "runs": n, "start": t}` with the milliseconds of n runs that begin at t. All
instances are given the same t: that is their barrier.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bitwright.deploy import open_runtime
from bitwright.errors import BitwrightError


def _channel() -> TextIO:
    """The way to the parent. Whatever a runtime prints goes to stderr instead."""
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
        while (end := time.perf_counter()) < asked["start"]:  # the clock is the same for all processes
            pass
        for _ in range(asked["runs"]):
            start = time.perf_counter()
            session.run(feed)
            end = time.perf_counter()
            times.append((end - start) * 1e3)
        tell({"times": times, "end": end})


if __name__ == "__main__":
    _main()
