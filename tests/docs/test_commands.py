"""Commands of the documentation: all have verbs and options that exist; those that take seconds are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bitwright.cli.app import all_commands

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
#: Verb → its options.
KNOWN = {
    name: {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    for name, command in all_commands()
}
#: `sh` is for commands, `text` for what isn't run; `py` is other people's.
LANGUAGES = {"python", "py", "sh", "text", "toml", "yaml"}


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each block."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.M | re.S)


def commands(page: Path) -> list[tuple[str, str]]:
    """(verb, words) of each command in blocks, and in the running text."""
    shell = "\n".join(text for language, text in fences(page) if language == "sh")
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"(?:^|&& |-m |`)bitwright ((?:grid )?\w[\w-]*)([^\n#&`]*)", f"{shell}\n{text}", re.M)
    return [(verb, words) for verb, words in found if verb != "list"]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_their_language(page: Path) -> None:
    assert {language for language, _ in fences(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_verbs_and_options_exist(page: Path) -> None:
    found = commands(page)
    assert {verb for verb, _ in found} <= set(KNOWN)
    for verb, words in found:
        assert set(re.findall(r"(?<=\s)--?[a-z][\w-]*", f" {words}")) <= KNOWN[verb], (verb, words)


@pytest.mark.parametrize("file", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name)
def test_targets_of_make_exist(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", file.read_text(encoding="utf-8"), re.M)) <= targets


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
    "grid.md": {
        r"backends: \[.*\]": "backends: [academic]",
        r"bits: \[.*\]": "bits: [4]",
        r"seeds: \[.*\]": "seeds: [0]",
        r"--row \w+": "--row $(python -c \"import json; print(json.load(open('leaderboard.json'))['rows'][0]['id'])\")",
    },
    "profile.md": {
        r"(bitwright profile (?!.*--(published|trace)).*) -o": r"\1 --rounds 3 -o",
        r"--compare \d+": "--compare 3",
    },
    "predict.md": {r"(bitwright profile (?!.*--published).*) -o": r"\1 --rounds 3 -o", r"--compare \d+": "--compare 3"},
    "low-precision.md": {r"--epochs \d+": "--epochs 1"},
}
MADE = {
    "start.md": ["bitwright-quickstart/report.html", "bitwright-quickstart/model.onnx"],
    "howto/amp-checkpoint-to-int8.md": ["out/model.onnx"],
    "howto/train-on-unequal-machines.md": ["plan.yaml", "alone/report.html", "run2/report.html"],
    "howto/tune-until-the-goal-holds.md": ["tuned/model.onnx", "larger/tuning.json"],
    "concepts/indicator.md": ["scores.json"],
    "score.md": ["better.yaml", "out/report.html"],
    "grid.md": ["leaderboard.md", "leaderboard.html"],
    "profile.md": ["device.json", "t4.json", "here.json", "here.rank1.json", "gpu.json"],
    "predict.md": ["report/report.html", "step.trace.json"],
    "low-precision.md": ["alone/result.json", "both/result.json", "simulated/result.json"],
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
    for name, words in (("bitwright", "-m bitwright"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tools / name).chmod(0o755)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "BITWRIGHT_CACHE": str(tmp_path / "cache")}
    assert "sh" in {language for language, _ in fences(place)}
    for language, text in fences(place):
        if language in ("yaml", "python") and (named := re.match(r"# (\S+\.(?:yaml|py))\n", text)):
            (tmp_path / named[1]).write_text(smaller(text))
        if language == "sh":
            command = ["bash", "-e", "-c", smaller(text)]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{smaller(text)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for made in MADE[page]:
        assert (tmp_path / made).exists(), made
