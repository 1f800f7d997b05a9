"""Help and shell completion, without torch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import bitwright.cli
from bitwright.cli.app import all_commands
from bitwright.training.config import TrainConfig

COMMANDS = dict(all_commands())


def complete(*words: str, cwd: Path | None = None) -> list[str]:
    environment = {
        **os.environ,
        "_BITWRIGHT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["bitwright", *words]),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "bitwright"]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_have_options_that_exist(name):
    command = COMMANDS[name]
    _, found, examples = command.help.partition("Examples:\n")
    assert found
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    for line in examples.strip().splitlines():
        words = shlex.split(line)
        words = words[words.index("bitwright") + 1 :]  # torchrun comes first in some
        assert words[: len(name.split())] == name.split()
        assert {word for word in words if word.startswith("-")} <= known, line


def test_neither_help_nor_version_imports_torch():
    names = [name.split() for name in COMMANDS]
    code = (
        "import sys\nfrom bitwright.cli import app\n"
        f"for words in [[], ['--version'], *{names!r}]:\n"
        "    try: app([*words, '--help'] if '--version' not in words else words)\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'scipy', 'onnx'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_train_has_an_option_for_each_setting():
    options = {option for one in COMMANDS["train"].params for option in one.opts}
    settings = set(TrainConfig.model_fields) - {"recipe"}  # files of other systems have one: --config
    assert {f"--{name.replace('_', '-')}" for name in settings} <= options


def test_completion(tmp_path):
    assert complete("qua") == ["quantize"]
    assert complete("grid", "le") == ["leaderboard"]
    assert complete("quantize", "digits", "--backend", "tensorrt") == ["tensorrt", "tensorrt_nlp"]
    assert complete("train", "digits", "--device-k") == ["--device-kind"]
    assert complete("list", "str") == ["strategies"]
    (tmp_path / "mine.py").write_text("def _hidden(): ...\ndef small(): ...\n")
    assert complete("quantize", "mi", cwd=tmp_path) == ["mine.py:small"]
    assert complete("quantize", "digits-", cwd=tmp_path) == ["digits-untrained"]


def test_help_as_a_value_is_a_value(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = run("quantize", "nowhere.py:f", "--output", "--help")
    assert ran.code == 2
    assert "nowhere.py" in ran.err


def test_a_misspelt_verb_has_a_hint(run):
    assert "Did you mean 'inspect'?" in run("inspekt").err


def test_the_command_line_stays_small():
    files = {file.name: len(file.read_text().splitlines()) for file in Path(bitwright.cli.__file__).parent.glob("*.py")}
    assert max(files.values()) <= 150, files
    assert sum(files.values()) < 2200
