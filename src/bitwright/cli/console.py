"""Texts for the terminal: names from models and files are shown, never interpreted."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

from rich.console import Console
from rich.text import Text

from bitwright.core.errors import UNSEEN, Problem, shortened, shortened_repr, visible_text


class SafeConsole(Console):
    """A console that prints texts without control characters."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts without control characters."""
        super().print(*(visible_text(one) if isinstance(one, str) else one for one in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raise what the pipe raised: rich would end the process by itself, as if with an error."""
        raise


def safe_text(words: object) -> Text:
    """A text without markup; None is empty."""
    return Text("" if words is None else visible_text(str(words)))


def problem_data(problem: Problem) -> dict[str, Any]:
    """A problem as JSON data."""
    value = problem.value
    shown = None if value is None else shortened(value) if isinstance(value, str) else shortened_repr(value)
    return {**vars(problem), "value": shown}


def json_text(value: Any) -> str:
    """JSON with escaped control characters; infinity and NaN are null."""
    text = json.dumps(_finite(value), indent=1, ensure_ascii=False)
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
