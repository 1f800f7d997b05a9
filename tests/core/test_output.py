"""Output folders: whole or not at all, one writer at a time, also after a crash among the moves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bitwright.core import output_folder as output
from bitwright.core.errors import BitwrightError
from bitwright.core.output_folder import locked, recover, replacing_with_siblings, staged_output

CRASH = """
import os, sys
from pathlib import Path
from bitwright.core import output_folder as output
place = Path(sys.argv[1])
real, moved = Path.replace, []
def replace(self, target):
    if output._COMMIT in str(self) and moved:
        os.kill(os.getpid(), 9)
    moved.append(target)
    return real(self, target)
Path.replace = replace
with output.staged_output(place) as folder:
    for name in ("a", "b", "c"):
        (folder / name).write_text("new")
"""
HOLD = """
import sys, time
from pathlib import Path
from bitwright.core.output_folder import locked
with locked(Path(sys.argv[1]), name="".join(sys.argv[2:])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "out"

    def write_half() -> None:
        with staged_output(place) as folder:
            (folder / "a").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert list(tmp_path.iterdir()) == []
    with staged_output(place) as folder:
        (folder / "a").write_text("1")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("2")
        assert not (place / "a").exists()
    assert (place / "a").read_text() == "1"
    assert (place / "sub" / "b").read_text() == "2"
    assert sorted(file.name for file in place.iterdir()) == ["a", "sub"]


def test_the_next_run_completes_moves_that_a_crash_cut_off(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("old")
    ran = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], timeout=60)
    assert ran.returncode == -signal.SIGKILL
    assert sorted((tmp_path / name).read_text() for name in "abc") == ["new", "old", "old"]
    with locked(tmp_path):
        recover(tmp_path)
    assert [(tmp_path / name).read_text() for name in "abc"] == ["new"] * 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BitwrightError) as caught, locked(tmp_path, wait=0.1):
            pass
        holder.kill()
    assert caught.value.codes == ["folder-locked"]
    assert caught.value.problems[0].where == str(tmp_path)
    assert f"pid {holder.pid} " in str(caught.value.problems[0].value)
    with locked(tmp_path):  # what the dead process left is no lock
        assert json.loads((tmp_path / output.LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("held", "wanted", "codes"),
    [
        ("", "model.onnx", ["folder-locked"]),
        ("model.onnx", "", ["folder-locked"]),
        ("model.onnx", "model.onnx", ["folder-locked"]),
        ("model.onnx", "plan.yaml", []),
    ],
)
def test_a_folder_and_its_files_exclude_each_other(held: str, wanted: str, codes: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), held], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        found: list[str] = []
        try:
            with locked(tmp_path, name=wanted, wait=0.1):
                pass
        except BitwrightError as error:
            found = error.codes
        holder.kill()
    assert found == codes


def test_a_process_locks_the_folder_of_a_file_that_it_writes(tmp_path: Path) -> None:
    with locked(tmp_path, name="a"):
        with locked(tmp_path), locked(tmp_path, name="b"):
            assert len(list(tmp_path.iterdir())) == 3
        ran = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path), "c"], capture_output=True, timeout=60)
        assert f"pid {os.getpid()} ".encode() in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_thread_locks_again_and_another_one_can_not(tmp_path: Path) -> None:
    found: list[list[str]] = []

    def other() -> None:
        try:
            with locked(tmp_path, wait=0.1):
                found.append([])
        except BitwrightError as error:
            found.append(error.codes)

    with locked(tmp_path), locked(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    other()
    assert found == [["folder-locked"], []]


def test_a_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """DataLoader workers are forked, and may outlive a parent that was killed."""
    with locked(tmp_path):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.read(reading, 1)
            os._exit(0)
    with locked(tmp_path, wait=0.1):
        pass
    os.write(writing, b"x")
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)


def test_file_systems_without_locks_use_the_owner_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "fcntl", None)
    file = tmp_path / output.LOCK
    alive = {**output._owner(), "pid": os.getppid(), "born": output.process_start(os.getppid())}
    for owner, codes in (
        (alive, ["folder-locked"]),
        ({**alive, "boot": "elsewhere 1"}, ["folder-locked"]),  # can't be asked
        ({**alive, "born": "0"}, None),  # another process has the number now
    ):
        file.write_text(json.dumps(owner))
        found = None
        try:
            with locked(tmp_path, wait=0.0):
                pass
        except BitwrightError as error:
            found = error.codes
        assert found == codes


def test_two_exports_into_one_folder_do_not_exclude_each_other(tmp_path: Path) -> None:
    with replacing_with_siblings(tmp_path / "a.onnx") as first, replacing_with_siblings(tmp_path / "b.onnx") as second:
        first.write_text("a")
        first.with_suffix(".json").write_text("grids")
        second.write_text("b")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.onnx", "b.onnx"]
