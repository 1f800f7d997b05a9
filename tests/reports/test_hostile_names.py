"""Names from files of others never become elements, attributes or links of a page."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

import pytest
from leaderboards import made_up
from records import record

from bitwright.reports.leaderboard import leaderboard_page
from bitwright.reports.page import page

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)> javascript:alert(3) <!--<script>"


class Elements(HTMLParser):
    """Counts elements, and collects attributes that run code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.active: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name.startswith("on") or (value or "").strip().lower().startswith("javascript:"):
                self.active.append((tag, name, value))


@pytest.mark.parametrize("kind", ["report", "leaderboard"])
def test_hostile_names_stay_text(kind: str) -> None:
    def made(name: str) -> Elements:
        return Elements(page(record(name)) if kind == "report" else leaderboard_page(made_up(evil=name)))

    plain, hostile = made("x"), made(HOSTILE)
    assert hostile.active == []
    assert hostile.tags["script"] == plain.tags["script"] > 0
    assert hostile.tags["img"] == 0
