"""Every message that the troubleshooting page quotes is one that the code can say."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.M)
HOLE = "\0"


@cache
def texts() -> list[str]:
    """All strings of the package, with a hole for each value that is filled in."""
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_it(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.S)
    wanted = [text for text in texts() if pattern.fullmatch(text) or message == text]
    assert wanted, f"no error says {message!r}: has it changed?"


def test_there_is_something_to_find() -> None:
    assert len(MESSAGES) > 40
    assert len(set(MESSAGES)) == len(MESSAGES)
    assert not any(re.fullmatch("this is said nowhere", text) for text in texts())
