"""What reaches a terminal: names of others' models are shown, never obeyed."""

from __future__ import annotations

import json

import pytest

from bitwright.cli.out import Out
from bitwright.core.errors import Problem

NAME = "a\x1b[31mb\x9b0m\u202e\x07[bold]c[/nothing]"
OBEYED = set("\x1b\x9b\u202e\x07")


def test_names_can_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = Out(json=False, quiet=False)
    out.say(NAME)
    out.note(NAME)
    out.table([NAME], [[NAME]], title=NAME)
    out.error(NAME, [])
    out.stderr.print(NAME)
    shown = capsys.readouterr()
    assert not OBEYED & set(shown.out + shown.err)
    assert shown.out.count("[bold]c[/nothing]") == 4
    assert shown.err.count("[bold]c[/nothing]") == 3


def test_names_in_json_are_escaped_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    out = Out(json=True, quiet=False)
    out.error("no", [Problem(what=NAME + "\ud800")])
    printed = capsys.readouterr().out
    assert not OBEYED & set(printed)
    assert json.loads(printed)["problems"][0]["what"] == NAME + "\ud800"


def test_names_in_progress_are_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = Out(json=False, quiet=False)
    with out.progress("x") as progress:
        progress(1, 2, "[/nothing]")
    assert "[/nothing]" in capsys.readouterr().err
