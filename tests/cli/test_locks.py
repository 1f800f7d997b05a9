"""Two processes with one output: the second one is told who writes there, and changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

HOLDER = """
import sys
from contextlib import ExitStack
from bitwright.core.output_folder import locked, locked_file
folder, *files = sys.argv[1:]
with ExitStack() as stack:
    stack.enter_context(locked(folder))
    for file in files:
        stack.enter_context(locked_file(file))
    print("ready", flush=True)
    sys.stdin.read()
"""
# verb → the file that it would write; the others write to the folder `out`
FILES = {
    "export": "files/model.onnx",
    "export for ncnn": "files/model.param",
    "plan": "files/plan.yaml",
    "profile": "files/device.json",
    "report": "files/page.html",
    "score": "files/better.yaml",
    "predict": "files/step.trace.json",
    "bench": "files/figures.json",
    "grid leaderboard": "files/leaderboard.html",
}
FOLDERS = ["quantize", "deploy"]  # `train` is in test_signals.py


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A folder with outputs that another process is writing, and the id of that process."""
    place = tmp_path_factory.mktemp("held")
    for file in [*FILES.values(), "out/report.json"]:
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_text("before")
    arguments = [str(place / "out"), *(str(place / file) for file in FILES.values())]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield place, process.pid
        process.stdin.close()


@pytest.mark.parametrize("verb", [*FILES, *FOLDERS])
def test_the_second_process_is_refused_and_changes_nothing(
    verb: str, held: tuple[Path, int], run: Run, small: str, made: Path
) -> None:
    place, pid = held
    saved = ["--plan", made / "plan.yaml", "--checkpoint", made / "checkpoint.safetensors"]
    profile = place / "profile-to-read.json"
    arguments: dict[str, list[object]] = {
        "export": ["export", small, *saved],
        "export for ncnn": ["export", small, *saved],
        "report": ["report", made],
        "predict": ["predict", small, "--profile", profile],
        "bench": ["bench", small],
        "grid leaderboard": ["grid", "leaderboard", place / "board-to-read.json"],
        "deploy": ["deploy", small, made],
    }
    target = place / FILES.get(verb, "out")
    option = "--trace" if verb == "predict" else "-o"
    ran = run(*arguments.get(verb, [verb, small]), option, target, "--json")
    assert ran.code == 2, ran.err
    (problem,) = ran.json["problems"]
    assert problem["code"] == "folder-locked"
    assert problem["where"] == str(target if verb in FOLDERS else target.parent)
    assert f"pid {pid} " in problem["value"]
    visible = {file.relative_to(place): file.read_text() for file in place.rglob("[!.]*") if file.is_file()}
    assert visible == {Path(file): "before" for file in [*FILES.values(), "out/report.json"]}


def test_a_verb_frees_its_file(run: Run, small: str, tmp_path: Path) -> None:
    for _ in range(2):
        ran = run("plan", small, "-o", tmp_path / "plan.yaml", "--quiet")
        assert ran.code == 0, ran.err
    assert [file.name for file in tmp_path.iterdir()] == ["plan.yaml"]
