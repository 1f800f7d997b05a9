"""A test that hangs in C code fails under its name, and the others still run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRATCH = """
import ctypes
import time

import pytest


def test_before():
    assert 1 + 1 == 2


def hang():
    # locks a mutex twice, with the GIL held: neither a signal nor a Python thread gets through
    lib = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    lib.pthread_mutex_init(mutex, None)
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)


@pytest.mark.timeout(1)
@pytest.mark.parametrize("how", ["in_c"])
def test_hangs(how):
    hang()


@pytest.fixture
def late():
    yield
    hang()


@pytest.mark.timeout(1)
def test_hangs_after_it_failed(late):
    assert 1 + 1 == 3


@pytest.mark.timeout(1)
def test_hangs_in_python():
    while True:
        pass


@pytest.mark.timeout(1)
def test_report_takes_longer_than_the_test_may():
    __tracebackhide__ = lambda error: time.sleep(2)  # pytest calls it while it writes the report
    raise ValueError


@pytest.mark.parametrize("number", range(4))
def test_after(number):
    assert number < 4
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest as the repository configures it."""
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "test_scratch.py").write_text(SCRATCH)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "hang_grace=1", *options]
    return subprocess.run(
        [*command, "test_scratch.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )


def test_a_hang_is_a_named_failure_and_the_rest_runs(tmp_path: Path) -> None:
    ran = run(tmp_path, "-n", "2")
    text = ran.stdout + ran.stderr
    assert ran.returncode == 1, text
    assert "crashed while running 'test_scratch.py::test_hangs[in_c]'" in text
    assert "crashed while running 'test_scratch.py::test_hangs_after_it_failed'" in text
    assert "FAILED test_scratch.py::test_hangs_in_python" in text  # its worker lives on
    assert "test_hangs_in_python'" not in text
    assert "FAILED test_scratch.py::test_report_takes_longer" in text
    assert "INTERNALERROR" not in text  # a timeout in pytest's own code would end the whole run
    assert "5 passed" in text
    assert "in hang\n" in ran.stderr  # the stacks


@pytest.mark.parametrize(("test", "said"), [("in_c", "in test_hangs\n"), ("after_it_failed", "in late\n")])
def test_without_workers_the_run_ends_with_the_stacks(tmp_path: Path, test: str, said: str) -> None:
    ran = run(tmp_path, "-k", f"test_hangs and {test}")
    assert ran.returncode == 1
    assert "Timeout (0:00:02)!" in ran.stderr
    assert said in ran.stderr
