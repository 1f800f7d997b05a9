"""Interrupt real runs of `quantize`, `tune`, `train` and grids at random moments, and compare with unbroken runs.

    python tests/support/interruptions.py --kills 20 --terms 10 --ints 10 --markdown benchmarks/results/interruptions.md

Every run is a process of its own that executes the command line; it is forked from this one, so that torch is imported
once. After each interruption the same command is given again until it ends; then the next round begins in a new folder.
Moments are drawn uniformly over the length of an unbroken run, from a seed. Counted is what the runs themselves log
(logger `bitwright.progress`): no unit, trial or row may be finished twice, and no training step that a checkpoint has.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import platform
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
_SLOWEST = 120.0  # seconds for a run to end after a signal, and for a whole run


@dataclass(frozen=True)
class Subject:
    """A command, what it counts, and what must be the same whether or not it was interrupted."""

    name: str
    arguments: Callable[[Path], list[str]]
    result: Callable[[Path], Any]
    unit: str
    """A regular expression: lines of the log that say that a unit of work is finished."""


def _tensors(file: Path) -> dict[str, str]:
    from safetensors.torch import load_file

    state = load_file(file)
    return {name: sha256(state[name].numpy().tobytes()).hexdigest()[:16] for name in sorted(state)}


def _quantized(folder: Path) -> Any:
    out = folder / "out"
    report = json.loads((out / "report.json").read_text())
    return {
        "files": sorted(file.name for file in out.iterdir()),
        "weights": _tensors(out / "checkpoint.safetensors"),
        "plan": (out / "plan.yaml").read_text(),
        "model": sha256((out / "model.onnx").read_bytes()).hexdigest(),
        "accuracy": [(one["where"], one["value"]) for one in report["accuracies"]],
    }


def _tuned(folder: Path) -> Any:
    out = folder / "out"
    found = json.loads((out / "tuning.json").read_text())
    return {
        "files": sorted(file.name for file in out.iterdir()),
        "trials": [[one["description"], one["metrics"], one["passed"]] for one in found["history"]],
        "best": found["best"]["candidate"],
        "weights": _tensors(out / "checkpoint.safetensors"),
    }


def _trained(folder: Path) -> Any:
    out = folder / "out"
    return {
        "files": sorted(file.name for file in out.iterdir()),
        "weights": _tensors(out / "checkpoint.safetensors"),
        "history": (out / "history.jsonl").read_text(),
        "metrics": json.loads((out / "result.json").read_text())["metrics"],
    }


def _board(folder: Path) -> Any:
    board = json.loads((folder / "board.json").read_text())
    rows = [[row["id"], row["status"], row["accuracy"], row["attempts"]] for row in board["rows"]]
    return {"rows": rows, "floats": board["floats"]}


def _quantize(folder: Path) -> list[str]:
    steps = ["--step", "equalize", "--step", "adaround:iterations=60", "--step", "bias-correction"]
    return ["quantize", f"{HERE / 'interrupted.py'}:images", "--weights", "int4/channel/sym", *steps, "-o", "out"]


def _tune(folder: Path) -> list[str]:
    budget = ["--trials", "12", "--drop", "10%", "--strategy", "random", "--backend", "tensorrt"]
    return ["tune", f"{HERE / 'interrupted.py'}:planted", *budget, "-o", "out"]


def _train(folder: Path) -> list[str]:
    settings = ["--epochs", "3", "--batch", "16", "--lr", "0.05", "--save-steps", "5", "--log-steps", "1"]
    settings += ["--precision", "int8", "--no-tensorboard"]
    return ["train", f"{HERE / 'interrupted.py'}:images", *settings, "-o", "out"]


def _grid(folder: Path) -> list[str]:
    from ruamel.yaml import YAML

    sys.path.insert(0, str(HERE))
    from grid_workloads import algorithm, grid

    file = folder / "grid.yaml"
    if not file.exists():
        wanted = {"algorithms": [algorithm("lsq"), algorithm("dsq")], "backends": ["academic", "tvm"], "bits": [8, 4]}
        with file.open("w") as stream:
            YAML().dump(grid(folder, **wanted, store="grid.db"), stream)
    return ["grid", "run", "grid.yaml", "-o", "board.json"]


SUBJECTS = {
    one.name: one
    for one in (
        Subject("quantize", _quantize, _quantized, r"unit (\d+) of \d+ finished"),
        Subject("tune", _tune, _tuned, r"trial finished: (\w+)"),
        Subject("train", _train, _trained, r"step (\d+) finished"),
        Subject("grid", _grid, _board, r"row finished: (\w+)"),
    )
}


@dataclass
class Ended:
    """One process, and how it ended."""

    code: int
    sent: str | None
    seconds: float
    after: float
    """Seconds between the signal and the end."""
    said: str
    orphans: bool
    pid: int


@dataclass
class Tally:
    """What was seen of one subject."""

    subject: str
    sent: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    processes: int = 0
    units: int = 0
    repeated: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unbroken: float = 0.0
    slowest: float = 0.0


def fork_command(arguments: Sequence[str], folder: Path) -> int:
    """Run the command line in a forked process with a session of its own; gives its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        for handle, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), handle)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        _log_progress(folder / "progress.log")
        sys.argv = ["bitwright", *arguments]
        from bitwright.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _log_progress(file: Path) -> None:
    log = logging.getLogger("bitwright.progress")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    handler = logging.FileHandler(file)  # appends
    handler.setFormatter(logging.Formatter("%(process)d %(message)s"))
    log.addHandler(handler)


def run(subject: Subject, folder: Path, *, at: float | None = None, send: str | None = None) -> Ended:
    """One process; after `at` seconds it gets the signal, if it still runs."""
    begin = time.monotonic()
    pid = fork_command(subject.arguments(folder), folder)
    sent, when = None, 0.0
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        now = time.monotonic()
        if at is not None and send is not None and sent is None and now - begin >= at:
            os.kill(pid, SIGNALS[send])
            sent, when = send, now
        if now - begin > _SLOWEST + (at or 0.0):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended(-999, sent, now - begin, now - when, (folder / "stderr").read_text(), False, pid)
        time.sleep(0.002)
    end = time.monotonic()
    code = os.waitstatus_to_exitcode(status)
    return Ended(
        code, sent, end - begin, end - when if sent else 0.0, (folder / "stderr").read_text(), _alive(pid), pid
    )


def _alive(group: int) -> bool:
    """Whether processes of that session are left a while later: torch's compiler processes look for their parent."""
    for _ in range(750):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    os.killpg(group, signal.SIGKILL)
    return True


def _new(folder: Path) -> Path:
    (folder / "tmp").mkdir(parents=True)
    return folder


def _leftovers(folder: Path) -> list[str]:
    ours = (".bitwright", ".step", ".tmp")
    found = [path for path in folder.rglob("*") if path.name.startswith(ours) or path.suffix == ".tmp"]
    return [str(path.relative_to(folder)) for path in found]


def interrupt(
    subject: Subject, place: Path, wanted: dict[str, int], seed: int, say: Callable[[str], None] = lambda text: None
) -> Tally:
    """Interrupt runs until every signal has arrived as often as wanted; the last round runs to its end."""
    tally = Tally(subject.name)
    whole = _new(place / "unbroken")
    ended = run(subject, whole)
    if ended.code not in (0, 1):
        raise RuntimeError(f"the unbroken run failed: {ended.code} {ended.said}")
    ended = run(subject, again := _new(place / "unbroken2"))  # the first one warms up caches
    expected, tally.unbroken = subject.result(whole), ended.seconds
    if subject.result(again) != expected:
        raise RuntimeError("two unbroken runs differ: nothing could be compared")
    generator = random.Random(f"{seed} {subject.name}")
    todo = [name for name, count in wanted.items() for _ in range(count)]
    generator.shuffle(todo)
    while todo:
        folder = _new(place / f"round-{tally.rounds}")
        signals: list[str] = []
        while True:
            send = todo[-1] if todo else None
            at = generator.uniform(0.02, tally.unbroken) if send is not None else None
            ended = run(subject, folder, at=at, send=send)
            tally.processes += 1
            if ended.sent is not None and ended.code in _expected(ended.sent):
                todo.pop()
                tally.sent[ended.sent] += 1
                tally.slowest = max(tally.slowest, ended.after)
                signals.append(ended.sent)
                _look_at(tally, ended, folder)
                say(f"{subject.name}: {ended.sent} after {at:.2f} s, {len(todo)} left")
                continue
            if ended.code not in (0, 1):
                tally.problems.append(f"round {tally.rounds}: exit code {ended.code}: {ended.said.strip()[-300:]}")
            break
        _compare(tally, subject, folder, expected)
        tally.rounds += 1
        shutil.rmtree(folder)
    return tally


def _expected(sent: str) -> tuple[int, ...]:
    return {"SIGKILL": (-9,), "SIGTERM": (143,), "SIGINT": (130,)}[sent]


def _look_at(tally: Tally, ended: Ended, folder: Path) -> None:
    if ended.orphans:
        tally.problems.append(f"round {tally.rounds}: {ended.sent} left processes behind")
    if ended.sent == "SIGKILL":
        return
    if f"interrupted by {ended.sent}" not in ended.said or "Traceback" in ended.said:
        tally.problems.append(f"round {tally.rounds}: {ended.sent}: said {ended.said.strip()[-300:]!r}")
    left = [one for one in _leftovers(folder) if f"-{ended.pid}-" in one]
    lock = folder / "out" / ".bitwright.lock"
    if lock.is_file() and f'"pid": {ended.pid},' in lock.read_text():
        left.append(lock.name)
    if left:
        tally.problems.append(f"round {tally.rounds}: {ended.sent} left {left[:5]}")


def _compare(tally: Tally, subject: Subject, folder: Path, expected: Any) -> None:
    try:
        found = subject.result(folder)
    except (OSError, ValueError) as error:
        tally.problems.append(f"round {tally.rounds}: no result: {error}")
        return
    wrong = [key for key in expected if found.get(key) != expected[key]]
    if wrong:
        tally.problems.append(f"round {tally.rounds}: differs from the unbroken run in {', '.join(wrong)}")
    left = _leftovers(folder)
    left += [path.name for path in (folder / "tmp").iterdir() if "bitwright" in path.name]  # not torch's own
    if left:
        tally.problems.append(f"round {tally.rounds}: left {left[:5]} at the end")
    lines = (folder / "progress.log").read_text().splitlines()
    done, repeated = _count(subject, lines)
    tally.units += done
    tally.repeated += [f"round {tally.rounds}: {one}" for one in repeated]


def _count(subject: Subject, lines: Sequence[str]) -> tuple[int, list[str]]:
    """Units that were finished, and those that were finished again although a record of them was kept."""
    seen: dict[str, str] = {}
    repeated: list[str] = []
    saved = 0
    for line in lines:
        pid, _, text = line.partition(" ")
        if found := re.match(r"checkpoint at step (\d+)", text):
            saved = int(found[1])
        found = re.match(subject.unit, text)
        if found is None:
            continue
        unit = found[1]
        again = int(unit) <= saved if subject.name == "train" else unit in seen
        if again:
            repeated.append(f"{text} (process {pid})")
        seen[unit] = pid
    return len(seen), repeated


def table(tallies: Sequence[Tally], seed: int, seconds: float) -> str:
    """The results as Markdown."""
    import optuna
    import torch

    rows = [
        f"| {t.subject} | {t.sent['SIGKILL']} | {t.sent['SIGTERM']} | {t.sent['SIGINT']} | {t.rounds} | "
        f"{t.processes} | {t.units} | {len(t.repeated)} | {len(t.problems)} | {t.unbroken:.1f} s | {t.slowest:.1f} s |"
        for t in tallies
    ]
    notes = [f"- {t.subject}: {text}" for t in tallies for text in (*t.repeated, *t.problems)]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Optuna {optuna.__version__}"
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    lines = [
        "# Interruptions",
        "",
        "Written by `python tests/support/interruptions.py`. Real processes of the command line are interrupted at "
        "random moments, uniformly over the length of an unbroken run, and the same command is given again until it "
        "ends. Each round is then compared with an unbroken run: files, weights, plan, metrics, trials, history and "
        "rows must be identical. A unit is repeated if it is finished again although a record was kept (training: "
        "a step that a checkpoint has). Problems are differences from the unbroken run, wrong exit codes (130 "
        "for SIGINT, 143 for SIGTERM), missing messages, leftover files and orphaned processes.",
        "",
        "| command | SIGKILL | SIGTERM | SIGINT | rounds | processes | units finished | repeated | problems | "
        "unbroken run | slowest end after a signal |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *(notes or ["No unit was lost or repeated, and every round ended as the unbroken run did."]),
        "",
        f"Seed {seed}; {versions}; {platform.machine()}, {os.cpu_count()} cores, shared with other work; at most "
        f"{memory} MiB per process; {seconds / 60:.0f} minutes in all; {datetime.now(UTC).date()}.",
        "",
    ]
    return "\n".join(lines)


def prepare() -> None:
    """Import what the commands need, before any process is forked."""
    sys.path.insert(0, str(HERE))
    for name in ("quantize", "tune", "train", "grid"):
        import_module(f"bitwright.cli.{name}")
    for name in ("bench", "deployment", "training.trainer", "tuning", "workflows"):
        import_module(f"bitwright.{name}")
    import_module("bitwright.zoo.workloads")
    import_module("onnxruntime")
    if find_spec("openvino"):
        import_module("openvino")
    from interrupted import images

    from bitwright import quantize

    with tempfile.TemporaryDirectory() as folder:  # the first export imports and builds what later ones share
        subject = images()
        made = quantize(subject.model, list(subject.calibration()), example=subject.inputs)  # type: ignore[misc]
        made.export(Path(folder) / "model.onnx")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _side_by_side(names: Sequence[str], folder: Path, wanted: dict[str, int], seed: int) -> list[Tally]:
    """Each command in a process of its own, at the same time."""
    children = {}
    for name in names:
        (place := folder / name).mkdir()
        children[name] = os.fork()
        if not children[name]:
            code = 1
            try:
                tally = interrupt(SUBJECTS[name], place, wanted, seed, _say)
                (folder / f"{name}.pickle").write_bytes(pickle.dumps(tally))
                code = 0
            except Exception as error:
                sys.stderr.write(f"{name}: {error}\n")
            finally:
                sys.stderr.flush()
                os._exit(code)
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in children.items()}
    if any(codes.values()):
        raise RuntimeError(f"could not run: {codes}")
    return [pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--terms", type=int, default=1)
    parser.add_argument("--ints", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(SUBJECTS))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    prepare()
    begin = time.monotonic()
    wanted = {"SIGKILL": given.kills, "SIGTERM": given.terms, "SIGINT": given.ints}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        tallies = _side_by_side(given.commands.split(","), Path(folder), wanted, given.seed)
    for tally in tallies:
        for problem in (*tally.repeated, *tally.problems):
            sys.stderr.write(f"{tally.subject}: {problem}\n")
    text = table(tallies, given.seed, time.monotonic() - begin)
    if given.markdown is not None:
        given.markdown.write_text(text)
    if given.json:
        facts = [
            {"command": t.subject, "sent": t.sent, "repeated": t.repeated, "problems": t.problems} for t in tallies
        ]
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(text)
    return 1 if any(t.repeated or t.problems for t in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
