"""A real PostgreSQL server for tests: Debian's package, a folder of its own, a free port."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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


@contextmanager
def running_server() -> Iterator[str]:
    """The address of an empty database; the test is skipped, with the reason, where there is no PostgreSQL."""
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
