from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from bitwright.core.errors import BitwrightError
from bitwright.core.files import replacing, write_text


def test_writes_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "plan.yaml"
    assert write_text(path, "größe\n") == path
    assert path.read_bytes() == "größe\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_text(path, "a long first version\n")
    write_text(path, "b")
    assert path.read_text() == "b"


def test_writing_to_a_symlink_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    link = tmp_path / "plan.yaml"
    link.symlink_to("kept/plan.yaml")
    write_text(link, "a")
    write_text(link, "b")
    assert link.is_symlink()
    assert (tmp_path / "kept" / "plan.yaml").read_text() == "b"


def test_special_files_are_written_and_not_replaced(tmp_path: Path) -> None:
    """As root, `-o /dev/null` made a plain file of the machine's null device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through\n")
    reader.join(10)
    assert found == ["through\n"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_new_files_have_the_default_permissions(tmp_path: Path) -> None:
    # mkstemp makes files that only their owner can read
    write_text(tmp_path / "ours", "")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [None, "old"])
def test_an_exception_leaves_the_old_file(tmp_path: Path, error: type[BaseException], old: str | None) -> None:
    path = tmp_path / "artefact.onnx"
    if old is not None:
        path.write_text(old)

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert [file.read_text() for file in tmp_path.iterdir()] == ([old] if old is not None else [])


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "artefact.onnx"
    path.write_text("old")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom bitwright.core.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half')\n    print('written', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert path.read_text() == "old"
    # what the killed one left is hidden and isn't in the way
    write_text(path, "new")
    assert path.read_text() == "new"
    assert all(file.name.startswith(".") for file in tmp_path.iterdir() if file != path)


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_text(path, "0" * 100_000)

    def write() -> None:
        for i in range(200):
            write_text(path, str(i % 10) * 100_000)

    writer = Thread(target=write)
    writer.start()
    seen = set()
    while writer.is_alive():
        text = path.read_text()
        assert len(text) == 100_000
        assert len(set(text)) == 1
        seen.add(text[0])
    writer.join(timeout=60)
    assert not writer.is_alive()
    assert len(seen) > 1


@pytest.mark.parametrize("blocked", ["is_a_file/plan.yaml", "is_a_folder"])
def test_unwritable_paths_are_reported(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "is_a_file").write_text("")
    (tmp_path / "is_a_folder").mkdir()
    with pytest.raises(BitwrightError) as caught:
        write_text(tmp_path / blocked, "x")
    problem = caught.value.problems[0]
    assert problem.where == str(tmp_path / blocked)
    assert problem.fix
    assert sorted(file.name for file in tmp_path.iterdir()) == ["is_a_file", "is_a_folder"]
