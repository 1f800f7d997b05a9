"""Run a study in processes that are killed at random moments; print what became of it.

It forks, so that torch is imported once: python kill_a_study.py STORE KILLS TRIALS SEED
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from planted import workload

from bitwright import Budget, Goal, Space, tune
from bitwright.tuning import Tuned


def run(store: str, trials: int) -> Tuned:
    return tune(
        workload(8, (3,), lower=True, samples=200),
        Goal(drop="10%", lower_is_better=True),
        Budget(trials=trials),
        "random",
        store,
        space=Space(weights="int8/channel/sym", steps=((),)),
        backend="tensorrt",
        resume=True,
    )


def main(store: str, kills: int, trials: int, seed: int) -> None:
    generator, killed = random.Random(seed), 0
    while killed < kills:
        child = os.fork()
        if child == 0:
            run(store, trials)
            os._exit(0)
        time.sleep(generator.uniform(0.05, 1.2))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)  # else it came to its end before
    tuned = run(store, trials)
    keys = [asked.candidate.key for asked in tuned.history]
    fresh = sum(asked.fresh for asked in tuned.history)
    sys.stdout.write(json.dumps({"killed": killed, "keys": keys, "fresh_at_the_end": fresh}) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], *map(int, sys.argv[2:]))
