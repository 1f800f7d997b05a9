"""A prediction as a Chrome trace: to look at in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitwright.arguments import strict
from bitwright.files import write_text
from bitwright.predict.local import Local
from bitwright.predict.prediction import Prediction
from bitwright.predict.replay import LaneReplay

_COMPUTE, _COMMUNICATE = 1, 2


def trace_events(prediction: Prediction) -> list[dict[str, Any]]:
    """Each kind of device is a process with two lanes; times in microseconds from the step's start."""
    zero = prediction.replay.start
    found: list[dict[str, Any]] = []
    for number, run in enumerate(prediction.replay.lanes, 1):
        name = run.lane.name
        local = prediction.locals[run.lane.kind]
        shown = f"{name} ×{run.lane.count}" if run.lane.count > 1 else name
        found.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": shown}})
        for lane, word in ((_COMPUTE, "compute"), (_COMMUNICATE, "communicate")):
            found.append({"ph": "M", "pid": number, "tid": lane, "name": "thread_name", "args": {"name": word}})
        found += [_event(number, _COMPUTE, *piece, zero) for piece in _compute(local, run)]
        first = zero + prediction.replay.first
        if first > zero:
            found.append(_event(number, _COMMUNICATE, "broadcast of buffers", "collective", zero, first, {}, zero))
        for sent in prediction.replay.sent:
            words = {"bytes": prediction.buckets[sent.bucket], "waited_for": sent.waited_for or "the one before"}
            name = f"all_reduce bucket {sent.bucket}"
            found.append(_event(number, _COMMUNICATE, name, "collective", sent.start, sent.end, words, zero))
    return found


def _compute(local: Local, run: LaneReplay) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
    """One batch (the last of an accumulated step), operator by operator.

    Recorded operators fill the lane's own forward and backward: its batch may be another, and DDP adds its part.
    """
    lane = run.lane
    forward, backward = local.forward_seconds + local.loss.forward, local.backward_seconds
    there = (lane.turned - lane.begun) / forward if forward else 0.0
    back = (lane.computing - lane.turned) / backward if backward else 0.0
    gap = local.gap / max(len(local.blocks), 1)
    work = lane.begun
    for block in local.blocks:
        start, work = work, work + (block.forward + gap) * there
        words = {"format": block.way.format, "casts": [placed.cast.kind for placed in block.casts]}
        yield block.op.name, "forward", run.time_at(start), run.time_at(work), words
    for block, end in zip(reversed(local.blocks), local.backward_offsets, strict=True):
        at = lane.turned + end * back
        if block.backward > 0:
            yield block.op.name, "backward", run.time_at(at - block.backward * back), run.time_at(at), {}
    yield "clip and optimizer", "tail", run.finished - lane.tail, run.finished, {}


def _event(
    pid: int, tid: int, name: str, category: str, start: float, end: float, words: dict[str, Any], zero: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": round(1e6 * (start - zero), 3),
        "dur": round(1e6 * max(0.0, end - start), 3),
        "args": words,
    }


@strict
def write_trace(prediction: Prediction, path: str | Path) -> Path:
    """Write the file, whole or not at all."""
    return write_text(Path(path), json.dumps({"traceEvents": trace_events(prediction), "displayTimeUnit": "ms"}))
