"""A real PostgreSQL server, two real workers in folders of their own, one grid: every row once."""

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

WORKER = Path(__file__).parents[1] / "support" / "kill_a_grid.py"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server() as address:
        yield address


def test_two_workers_share_one_grid_and_run_each_row_once(server: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            # each has its float networks in its own folder, as machines without a shared disk have
            [sys.executable, str(WORKER), str(tmp_path / name), "0", server],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    results = [worker.communicate(timeout=110) for worker in workers]
    for worker, (_, problem) in zip(workers, results, strict=True):
        assert worker.returncode == 0, problem[-2000:]
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in results)
    assert first["rows"] == second["rows"]  # both end with the whole leaderboard
    assert [row[1:2] + row[3:] for row in first["rows"]] == [["done", 1]] * 8
    assert sorted(first["own"] + second["own"]) == sorted(row[0] for row in first["rows"])  # and shared the work
    storage = optuna.storages.RDBStorage(server.replace("postgresql:", "postgresql+psycopg:"))
    study = optuna.load_study(study_name="small", storage=storage)
    finished = Counter(t.user_attrs["key"] for t in study.trials if "outcome" in t.user_attrs)
    storage.remove_session()
    storage.engine.dispose()
    assert set(finished.values()) == {1}
    assert len(finished) == 8
