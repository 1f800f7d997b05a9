"""Processes that a benchmark starts end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from common import Ranks, clean_up_on_signals
clean_up_on_signals()
with Ranks() as ranks:
    rank = ranks.start(["sh", "-c", "sleep 600 & echo $! $$; wait"])
    ranks.wait(600)
"""


def _there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="benchmarks of several processes are for Linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_ranks_and_their_children(number: signal.Signals) -> None:
    """A benchmark that was ended left its ranks, a cgroup and a network namespace."""
    script = subprocess.Popen([sys.executable, "-c", SCRIPT, str(BENCHMARKS)], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    started = [int(word) for word in script.stdout.readline().split()]
    assert len(started) == 2
    script.send_signal(number)
    assert script.wait(60) == 128 + number
    script.stdout.close()
    until = time.monotonic() + 10
    while any(map(_there, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_there, started))
