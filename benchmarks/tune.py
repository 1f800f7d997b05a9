"""Whole evaluations until planted layers are found, strategy by strategy; and two workers on one study.

python benchmarks/tune.py [--postgresql URL]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from common import environment, save
from planted import workload

from bitwright import Budget, Goal, Space, tune

PLANTED = {20: (7,), 40: (5, 18, 31)}
STRATEGIES = ("bisect", "basic", "mse", "mse_v2", "hawq_v2", "auto")
SPACE = Space(weights="int8/channel/sym", observer="minmax", steps=((),))


def planted() -> list[dict[str, object]]:
    rows = []
    for layers, sick in PLANTED.items():
        for lower in (False, True):
            for strategy in STRATEGIES:
                begin = time.process_time()
                goal = Goal(drop="10%", lower_is_better=lower)
                budget = Budget(trials=300)
                found = tune(
                    workload(layers, sick, lower=lower),
                    goal,
                    budget,
                    strategy,
                    space=SPACE,
                    backend="tensorrt",
                    early=False,
                )
                rows.append(
                    {
                        "layers": layers,
                        "planted": len(sick),
                        "metric": "error (less is better)" if lower else "top-1",
                        "strategy": strategy,
                        "met": found.met_goal,
                        "found": {str(i) for i in sick} <= found.candidate.float,
                        "evaluations": found.full_evaluations,
                        "in_float": len(found.candidate.float),
                        "cpu_seconds": round(time.process_time() - begin, 1),
                    }
                )
                print(rows[-1], flush=True)
    return rows


WORKER = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from planted import workload
from bitwright import Budget, Goal, Space, tune
store = sys.argv[1]
sys.stdin.readline()
begin = time.perf_counter()
found = tune(workload(40, (5, 18, 31), lower=True, samples=300000), Goal(drop="10%", lower_is_better=True),
             Budget(trials=40), "random", store, backend="tensorrt", resume=True,
             space=Space(weights="int8/channel/sym", observer="minmax", steps=((),)))
print(time.perf_counter() - begin, sum(a.fresh for a in found.history), len({{a.candidate.key for a in found.history}}))
"""


def shared(store: str, workers: int) -> dict[str, object]:
    """One study of 40 trials by so many processes that begin together, each on its own core."""
    code = WORKER.format(tests=str(Path(__file__).parents[1] / "tests"))
    processes = [
        subprocess.Popen(
            ["taskset", "-c", str(core), sys.executable, "-c", code, store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in range(workers)
    ]
    time.sleep(15)  # imports
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.communicate()[0].split() for process in processes]
    seconds = max(float(line[0]) for line in lines)
    fresh = [int(line[1]) for line in lines]
    assert sum(fresh) == 40, "a trial was evaluated twice, or lost"
    return {"workers": workers, "seconds": round(seconds, 1), "trials_of_each": fresh}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--postgresql", help="postgresql://… of an empty database; else SQLite files")
    options = parser.parse_args()
    rows = planted()
    with tempfile.TemporaryDirectory() as folder:
        together = []
        for workers in (1, 2):
            store = options.postgresql or str(Path(folder) / f"{workers}-{len(together)}.db")
            if options.postgresql:  # each study has a database of its own
                name = f"study{len(together)}"
                subprocess.run(["psql", options.postgresql, "-qc", f"CREATE DATABASE {name}"], check=True)
                store = options.postgresql.rpartition("/")[0] + f"/{name}"
            together.append(shared(store, workers))
            print(together[-1], flush=True)
    lines = [
        "# Whole evaluations until the goal holds",
        "",
        "Chains of linear layers; some lose accuracy in low precision. Early stopping is off: every trial is whole.",
        "",
        "| layers | planted | metric | strategy | goal holds | found | whole evaluations | in float | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['layers']} | {r['planted']} | {r['metric']} | {r['strategy']} | {r['met']} | {r['found']} "
            f"| {r['evaluations']} | {r['in_float']} | {r['cpu_seconds']} |"
            for r in rows
        ),
        "",
        f"# Workers on one study ({'PostgreSQL' if options.postgresql else 'SQLite'}), 40 trials, random",
        "",
        "| workers | seconds | trials of each |",
        "|---|---|---|",
        *(f"| {r['workers']} | {r['seconds']} | {r['trials_of_each']} |" for r in together),
    ]
    one = sorted(float(str(r["seconds"])) for r in together if r["workers"] == 1)
    two = sorted(float(str(r["seconds"])) for r in together if r["workers"] == 2)
    lines += ["", f"Speed-up of two workers: {min(one) / min(two):.2f} (fastest runs)."]
    save("tune", {"planted": rows, "workers": together, "environment": environment()}, "\n".join(lines))


if __name__ == "__main__":
    main()
