"""Signals end every verb cleanly: what is kept, how to resume, nothing left behind; a second one ends at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKLOAD = """
import os, subprocess, sys, time
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from bitwright import Workload

HERE = os.path.dirname(__file__)


def ready(text=""):
    with open(os.path.join(HERE, "ready"), "w") as file:
        file.write(text)


def slow(kind=""):
    def calibration():
        for step in range(1000):
            if step == 2:
                ready()
            time.sleep(0.05)
            yield torch.ones(1, 4)
    return Workload(name="slow", model=torch.nn.Linear(4, 2), inputs=(torch.ones(1, 4),), calibration=calibration)


def stuck():
    '''One operation in C that takes minutes.'''
    def calibration():
        yield torch.ones(1, 4)
        x = torch.randn(6000, 6000)
        ready()
        torch.linalg.svd(x)
    return Workload(name="stuck", model=torch.nn.Linear(4, 2), inputs=(torch.ones(1, 4),), calibration=calibration)


class Waits(TensorDataset):
    def __getitem__(self, index):
        if index == 40:
            ready(str(os.getpid()))
        time.sleep(0.002)
        return super().__getitem__(index)


def trained():
    torch.manual_seed(0)
    x = torch.randn(4000, 4)
    return Workload(name="trained", model=torch.nn.Linear(4, 2), inputs=(x[:1],), loss=F.cross_entropy,
                    calibration=lambda: [x[:8]], training=lambda: Waits(x, (x[:, 0] > 0).long()))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORKLOAD)
    return tmp_path


def _default_signals() -> None:
    """The tests may run under nohup or in the background of a shell: both hand ignored signals down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bitwright", *arguments],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=_default_signals,
    )
    for _ in range(1200):
        if (place / "ready").exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    return process


def _cpu_seconds(process: subprocess.Popen[str]) -> float:
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _wait_until_busy(process: subprocess.Popen[str]) -> None:
    """Wait until the process has used 0.5 s of CPU time from now on."""
    begin = _cpu_seconds(process)
    for _ in range(1200):
        if _cpu_seconds(process) - begin >= 0.5:
            return
        time.sleep(0.05)
    raise AssertionError("the process doesn't compute")


def group_is_gone(leader: int) -> bool:
    for _ in range(600):
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_told_and_nothing_is_left(place: Path, number: signal.Signals) -> None:
    process = start(place, "quantize", "work.py:slow", "-o", "results/out", "--json")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert err == f"error: interrupted by {number.name}: nothing was written\n"
    assert json.loads(out)["error"].startswith("interrupted")
    assert not (place / "results").exists()


def test_a_second_signal_ends_at_once_even_within_c(place: Path) -> None:
    process = start(place, "quantize", "work.py:stuck", "-o", "out")
    _wait_until_busy(process)  # it is within the operation then
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None  # it waits for the operation
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert process.returncode == 130, err
    assert list((place / "out").glob(".bitwright-*")) == []


def test_ctrl_c_with_data_workers_keeps_the_run(place: Path) -> None:
    """A terminal sends Ctrl-C to the whole group: the workers must live until the checkpoint is written."""
    options = ["--workers", "2", "--batch", "20", "--no-tensorboard", "-o", "out"]
    process = start(place, "train", "work.py:trained", *options)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "the run is saved; rerun the command to resume" in err
    assert "Traceback" not in err
    assert list((place / "out" / "checkpoints").glob("step-*"))
    assert group_is_gone(process.pid)


def test_a_killed_run_leaves_a_free_folder_which_the_next_one_cleans(place: Path) -> None:
    process = start(place, "quantize", "work.py:slow", "-o", "out")
    process.kill()
    process.communicate(timeout=60)
    assert list((place / "out").glob(".bitwright-*"))
    (place / "ready").unlink()
    process = start(place, "quantize", "work.py:slow", "-o", "out")
    assert len(list((place / "out").glob(".bitwright-*-*"))) == 1  # its own
    process.terminate()
    process.communicate(timeout=60)
    assert list((place / "out").iterdir()) == []


def test_the_holder_of_a_locked_folder_is_named(place: Path) -> None:
    first = start(place, "quantize", "work.py:slow", "-o", "out")
    try:
        second = subprocess.run(
            [sys.executable, "-m", "bitwright", "train", "work.py:trained", "-o", "out", "--json", "--no-tensorboard"],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert second.returncode == 2, second.stderr
        (problem,) = json.loads(second.stdout)["problems"]
        assert problem["code"] == "folder-locked"
        assert problem["where"] == "out"
        assert f"pid {first.pid} " in problem["value"]
        assert "quantize" in problem["value"]
        assert first.poll() is None
    finally:
        first.terminate()
        first.communicate(timeout=60)


def test_a_signal_during_the_imports(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bitwright", "quantize", "work.py:slow", "-o", "out"],
        cwd=place,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    maps = Path(f"/proc/{process.pid}/maps")
    for _ in range(600):
        if "libtorch" in maps.read_text():
            break
        time.sleep(0.02)
    process.terminate()
    assert process.stderr.read() == "error: interrupted by SIGTERM: nothing was written\n"
    assert process.wait(60) == 143
    process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_work_changes_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """The interpreter may take seconds to end: what is complete must not look as if it had been killed."""
    program = (
        "import os, signal, sys\n"
        "from bitwright.cli import main\n"
        "class Last:\n"
        "    def __init__(self):\n"
        "        self.kill, self.pid = os.kill, os.getpid()\n"
        "    def __del__(self):\n"
        f"        self.kill(self.pid, {int(number)})\n"
        "sys.last = Last()\n"
        "sys.argv = ['bitwright', '--version']\n"
        "main()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=_default_signals,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("bitwright ")
