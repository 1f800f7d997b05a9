"""Commands of the documentation: all have verbs and options that exist; those that take seconds are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bitwright.cli.known import read_table

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
KNOWN = {facts["name"]: facts for facts in read_table()}
#: `sh` is for commands, `text` for what isn't run; `py` is other people's.
LANGUAGES = {"python", "py", "sh", "text", "toml", "yaml"}
#: Their blocks have no language yet; commands in them are checked all the same.
PLAIN = {"grid.md", "low-precision.md", "predict.md", "profile.md"}


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each block."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.M | re.S)


def commands(page: Path) -> list[tuple[str, str]]:
    """(verb, words) of each command in blocks, and in the running text."""
    shell = "\n".join(text for language, text in fences(page) if language in ("", "sh"))
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"(?:^|&& |-m |`)bitwright (\w+)([^\n#&`]*)", f"{shell}\n{text}", re.M)
    return [(verb, words) for verb, words in found if verb != "list"]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_their_language(page: Path) -> None:
    strange = {language for language, _ in fences(page)} - LANGUAGES - ({""} if page.name in PLAIN else set())
    assert not strange


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_verbs_and_options_exist(page: Path) -> None:
    for verb, words in commands(page):
        assert verb in KNOWN, (verb, words)
        own = {option for one in KNOWN[verb]["options"] for option in (*one["names"], *one["off"])}
        assert set(re.findall(r"(?<=\s)--?[a-z][\w-]*", f" {words}")) <= own, (verb, words)


def test_there_is_something_to_find() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 100


#: Page → what is made smaller there, so that a test doesn't take minutes. Other commands run as they stand.
SMALLER: dict[str, dict[str, str]] = {
    "start.md": {
        # this environment is installed already; what `doctor` probes takes minutes, and has tests of its own
        r".*(venv|pip install|--install-completion|bitwright doctor).*\n": "",
    },
    "howto/amp-checkpoint-to-int8.md": {r"--epochs \d+": "--epochs 1"},
    "howto/train-on-unequal-machines.md": {
        r"(profile .*) -o": r"\1 --rounds 3 -o",
        r"torchrun --nproc-per-node 2 -m bitwright train (.*)-o run\n": r"bitwright train \1 --help > /dev/null\n",
    },
    "howto/tune-until-the-goal-holds.md": {
        r"--minutes \d+": "--trials 2",
        r"minutes: \d+": "trials: 2",
        r"latency_ratio: [\d.]+": "latency_ratio: 100",  # small models are too small to be faster
        r".*postgresql://.*\n": "",
    },
    "concepts/indicator.md": {},
    "score.md": {},
}
MADE = {
    "start.md": ["bitwright-quickstart/report.html", "bitwright-quickstart/model.onnx"],
    "howto/amp-checkpoint-to-int8.md": ["out/model.onnx"],
    "howto/train-on-unequal-machines.md": ["plan.yaml", "alone/report.html", "run2/report.html"],
    "howto/tune-until-the-goal-holds.md": ["tuned/model.onnx", "larger/tuning.json"],
    "concepts/indicator.md": ["indications.json"],
    "score.md": ["better.yaml", "out/report.html"],
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SMALLER)
def test_commands_run(page: str, tmp_path: Path) -> None:
    """In a folder of their own, in the order of the page, with the files that it tells to write."""
    place = ROOT / "docs" / page
    start = dict.fromkeys(text for language, text in fences(ROOT / "docs" / "start.md") if language == "python")
    (tmp_path / "my_workload.py").write_text(next(text for text in start if "# my_workload.py" in text))

    def smaller(text: str) -> str:
        for old, new in SMALLER[page].items():
            text = re.sub(old, new, text)
        return text

    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "bitwright").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bitwright "$@"\n')
    (tools / "bitwright").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    for language, text in fences(place):
        if language == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", text)):
            (tmp_path / named[1]).write_text(smaller(text))
        if language == "sh":
            command = ["bash", "-e", "-c", smaller(text)]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{smaller(text)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for made in MADE[page]:
        assert (tmp_path / made).exists(), made
