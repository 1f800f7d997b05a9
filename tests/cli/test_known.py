"""Help, completion and the man page come from a table: it says what the verbs say, and needs no torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bitwright.cli import VERBS, app
from bitwright.cli.describing import MAN, describe, in_words, table_text
from bitwright.cli.known import TABLE, read_table, real_verb
from bitwright.cli.man import man_page

ROOT = typer.main.get_command(app)
FACTS = {facts["name"]: facts for facts in read_table()}


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


def test_the_table_and_the_man_page_are_those_of_the_verbs():
    table = describe()
    assert TABLE.read_text(encoding="utf-8") == table_text(table), "run: make verbs"
    assert MAN.read_text(encoding="utf-8") == man_page(table), "run: make verbs"


@pytest.mark.parametrize("name", VERBS)
def test_help_by_the_table_is_the_verbs_own(name, run):
    real = real_verb(name, f"bitwright.cli.{VERBS[name]}")
    parent = ROOT.context_class(ROOT, info_name="bitwright", **ROOT.context_settings)
    own = real.context_class(real, info_name=name, parent=parent).get_help()
    own = in_words(re.sub(r"<(int|float)\s+range>", r"<\1 range>", own))  # a line may break there
    shown, wanted = ("".join(text.split()) for text in (run(name, "--help").out, own))  # terminals' widths differ
    assert shown == wanted


@pytest.mark.parametrize("name", VERBS)
def test_examples_have_options_that_exist(name):
    _, found, examples = FACTS[name]["help"].partition("Examples:\n")
    assert found
    known = {option for one in FACTS[name]["options"] for option in (*one["names"], *one["off"])}
    for line in examples.strip().splitlines():
        words = shlex.split(line)
        words = words[words.index("bitwright") + 1 :]  # torchrun may stand before it
        assert words[0] == name
        assert {word for word in words if word.startswith("-")} <= known, line


def test_neither_help_nor_completion_imports_torch():
    code = (
        "import sys\nfrom bitwright.cli import app\n"
        "for words in (['--help'], ['--version'], ['train', '--help']):\n"
        "    try: app(words)\n    except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'scipy', 'onnx'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_completion(tmp_path):
    assert complete("pl") == ["plan", "plan-cluster"]
    assert complete("plan", "digits", "--backend", "tensorrt") == ["tensorrt", "tensorrt_nlp"]
    assert complete("plan-cluster", "digits", "--cl") == ["--cluster"]
    assert "recover+split" in complete("plan-cluster", "digits", "--planner", "rec")
    assert complete("list", "str") == ["strategies"]
    (tmp_path / "mine.py").write_text("def _hidden(): ...\ndef small(): ...\n")
    assert complete("quantize", "mi", cwd=tmp_path) == ["mine.py:small"]
    assert complete("quantize", "digits-", cwd=tmp_path) == ["digits-untrained"]


def test_help_as_a_value_is_a_value(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = run("plan", "nowhere.py:f", "--output", "--help")
    assert ran.code == 2
    assert "nowhere.py" in ran.err


def test_a_misspelt_verb_has_a_hint(run):
    assert "Did you mean 'inspect'?" in run("inspekt").err


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_the_man_page_is_clean_roff():
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", str(MAN)], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
