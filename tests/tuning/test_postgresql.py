"""A real PostgreSQL server, two real workers, one study."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

WORKER = Path(__file__).parents[1] / "kill_a_study.py"


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) if Path("/usr/lib/postgresql").is_dir() else []
    named = shutil.which("initdb")
    return found[-1].parent if found else Path(named).parent if named else None


def _owner() -> dict[str, object]:
    """The server refuses to run as root: Debian's package brings a user for it."""
    if os.geteuid() != 0:
        return {}
    try:
        return {"user": pwd.getpwnam("postgres").pw_uid}
    except KeyError:
        pytest.skip("PostgreSQL doesn't run as root, and there is no user postgres")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    binaries = _binaries()
    if binaries is None:
        pytest.skip("there is no PostgreSQL server (Debian: apt-get install postgresql)")
    owner = _owner()
    folder = Path(tempfile.mkdtemp(prefix="bitwright-pg-"))  # not pytest's: sockets need a short path
    if owner:
        os.chown(folder, int(str(owner["user"])), -1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        options: dict[str, object] = {"check": True, "capture_output": True, "cwd": folder, **owner}
        init = [str(binaries / "initdb"), "-D", f"{folder}/data", "-A", "trust", "-U", "bitwright"]
        subprocess.run(init, **options)  # type: ignore[call-overload]
        log = folder / "log"
        start = [str(binaries / "pg_ctl"), "-D", f"{folder}/data", "-l", str(log), "-w", "start"]
        settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        subprocess.run([*start, "-o", settings], **{**options, "capture_output": False})  # type: ignore[call-overload]
        try:
            yield f"postgresql://bitwright@127.0.0.1:{port}/postgres"
        finally:
            stop = [str(binaries / "pg_ctl"), "-D", f"{folder}/data", "-m", "immediate", "stop"]
            subprocess.run(stop, **options)  # type: ignore[call-overload]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
