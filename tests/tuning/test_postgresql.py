"""A real PostgreSQL server, two real workers, one study."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from postgresql import running_server

WORKER = Path(__file__).parents[1] / "support" / "kill_a_study.py"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.mark.slow
def test_two_workers_share_one_study_without_a_duplicate(server: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), server, "0", "24", "0"]
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [worker.communicate(timeout=110) for worker in workers]
    for worker, (_, problem) in zip(workers, results, strict=True):
        assert worker.returncode == 0, problem[-2000:]
    lines = [output.splitlines()[-1] for output, _ in results]
    keys = [json.loads(line) for line in lines]
    assert keys[0]["keys"] == keys[1]["keys"]  # both saw the same search
    assert keys[0]["fresh_at_the_end"] + keys[1]["fresh_at_the_end"] == 24  # and shared the work
    storage = optuna.storages.RDBStorage(server.replace("postgresql:", "postgresql+psycopg:"))
    study = optuna.load_study(study_name="planted", storage=storage)
    finished = Counter(t.user_attrs["key"] for t in study.trials if "outcome" in t.user_attrs)
    storage.remove_session()
    storage.engine.dispose()
    assert set(finished.values()) == {1}
    assert len(finished) == 24
