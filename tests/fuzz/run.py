"""The fuzzer: many mutations of files in every format that Bitwright reads. Only its own errors may come out.

    python tests/fuzz/run.py --cases 10000              # `make fuzz`; the result is in benchmarks/results/fuzz.md
    python tests/fuzz/run.py --only 4711                # one case again, with its traceback

Each case may take 2 s of CPU time and 500 MB of memory. It depends on --seed and its number only.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE.parents[1] / "benchmarks" / "results" / "fuzz.md"
_WALL = 60.0  # seconds after which a case that takes no CPU time is ended


def make_seeds(folder: Path) -> None:
    """Valid files of every format, each of which can be read."""
    sys.path.insert(0, str(HERE))
    from formats import FORMATS

    for name, format in FORMATS.items():
        (folder / name).mkdir(parents=True)
        format.make(folder / name)


class Worker:
    """A process that runs cases; one that dies or hangs is replaced."""

    def __init__(self, seeds: Path, seed: str) -> None:
        self.command = [sys.executable, str(HERE / "worker.py"), str(seeds), seed]
        self._start()

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit("a worker of the fuzzer can't start: run tests/fuzz/worker.py SEEDS 0")

    def send(self, number: int) -> None:
        """Give it a case."""
        assert self.process.stdin is not None
        self.number, self.begin = number, time.monotonic()
        self.process.stdin.write(f"{number}\n")

    def answer(self) -> dict[str, Any] | None:
        """What became of the case; None: it isn't over."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 0.02)
        line = self.process.stdout.readline() if ready else ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        died = bool(ready)
        if not died and time.monotonic() - self.begin < _WALL:
            return None
        self.process.kill()
        code = self.process.wait()
        self._start()
        outcome = f"the process ended with {code}" if died else "hangs"
        return {"number": self.number, "format": "?", "file": "?", "outcome": outcome, "seconds": _WALL}

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def run(seeds: Path, seed: str, numbers: list[int], workers: int) -> Iterator[dict[str, Any]]:
    """All cases, in the order in which they end."""
    own = [Worker(seeds, seed) for _ in range(workers)]
    left = iter(numbers)
    busy: list[Worker] = []
    try:
        for worker in own:
            if (number := next(left, None)) is not None:
                worker.send(number)
                busy.append(worker)
        while busy:
            for worker in list(busy):
                found = worker.answer()
                if found is None:
                    continue
                yield found
                number = next(left, None)
                if number is None:
                    busy.remove(worker)
                else:
                    worker.send(number)
    finally:
        for worker in own:
            worker.close()


def is_wrong(case: dict[str, Any]) -> bool:
    """Whether a case is anything but read or refused with our own error, in few words and little time."""
    return case["outcome"] not in ("read", "refused") or case["seconds"] > 2.0 or case.get("text", 0) > 100_000


def report(cases: list[dict[str, Any]], seed: str) -> str:
    """What came out, as Markdown."""
    rows: dict[str, Counter[str]] = {}
    slowest: dict[str, float] = {}
    for case in cases:
        rows.setdefault(case["format"], Counter())["wrong" if is_wrong(case) else case["outcome"]] += 1
        slowest[case["format"]] = max(slowest.get(case["format"], 0.0), case["seconds"])
    lines = [
        "# Mutated files",
        "",
        f"`make fuzz`: {len(cases)} mutations, seed {seed}. Each file is read within 2 s of CPU time and 500 MB, or",
        "refused with a `BitwrightError`. *Wrong* counts everything else: other exceptions, crashes, too much time.",
        "",
        "| format | mutations | read | refused | wrong | slowest, s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, count in sorted(rows.items()):
        figures = f"{count.total()} | {count['read']} | {count['refused']} | {count['wrong']} | {slowest[name]:.2f}"
        lines.append(f"| {name} | {figures} |")
    total = sum(rows.values(), Counter[str]())
    figures = f"{len(cases)} | {total['read']} | {total['refused']} | {total['wrong']} | {max(slowest.values()):.2f}"
    return "\n".join([*lines, f"| all | {figures} |", ""])


def main() -> int:
    """Run, print what is wrong, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="run this case here, and show its traceback")
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--seeds", type=Path, help="a folder with valid files, kept for later runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bitwright-seeds-") as temporary:
        seeds = given.seeds or Path(temporary) / "seeds"
        if not seeds.exists():
            make_seeds(seeds)
        if given.only is not None:
            sys.path.insert(0, str(HERE))
            import worker

            worker.show_traceback = True
            case = worker.run_case(seeds, given.seed, given.only)
            sys.stdout.write(f"{json.dumps(case)}\n")
            return int(is_wrong(case))
        cases = []
        for case in run(seeds, given.seed, list(range(given.first, given.first + given.cases)), given.workers):
            cases.append(case)
            if is_wrong(case):
                sys.stdout.write(f"{json.dumps(case)}\n")
                sys.stdout.flush()
    text = report(cases, given.seed)
    sys.stdout.write(text)
    if given.record:
        RESULT.write_text(text, encoding="utf-8")
    return int(any(map(is_wrong, cases)))


if __name__ == "__main__":
    sys.exit(main())
