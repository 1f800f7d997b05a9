"""The page of keys is written from the tables of the importers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright.importers.key_listing import TABLES, key_rows, keys_page

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "keys.md"


def test_the_page_is_current() -> None:
    found = PAGE.read_text(encoding="utf-8")
    assert found == keys_page(), "run: python -m bitwright.importers.key_listing > docs/migrate/keys.md"


@pytest.mark.parametrize("name", TABLES)
def test_each_table_says_something_about_every_key(name: str) -> None:
    rows = key_rows(name)
    assert all(row.text.strip() for row in rows)
    assert all(row.advice for row in rows if row.handling == "rejected")
    assert len({row.key for row in rows}) == len(rows)


def test_a_repeated_section_is_listed_once() -> None:
    keys = {row.key: row.text for row in key_rows("lpot")}
    assert keys["evaluation.accuracy.dataloader.…"] == "As `quantization.train.dataloader`."
