"""The leaderboard's page, as text; tests/browser looks at it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bitwright.bench.page import page
from bitwright.cli import app
from leaderboards import made_up
from records import EVIL

FEW = (("lsq", "apot"), ("tvm", "onnxruntime"))


def test_every_name_is_escaped() -> None:
    text = page(made_up(*FEW, evil=EVIL))
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: seen.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert seen.count("script") == 2  # the data and ours
    assert "img" not in seen
    assert not re.search(r"https?://|\bsrc=[^x]|@import|url\(|<link", text.replace(EVIL, ""))


def test_each_cell_says_mean_and_deviation() -> None:
    board = made_up(*FEW)
    text = page(board)
    cell = next(one for one in board.summaries if one.model is not None and one.accuracy is not None)
    assert cell.accuracy is not None
    assert f"{cell.accuracy.mean:.2f} ± {cell.accuracy.std:.2f} %" in text
    assert text.count('class="opener"') == 2 * 2 * 3 * 2
    data = re.search(r'id="record">(.*?)</script>', text)
    assert data is not None
    rows = json.loads(data[1])["rows"]
    assert [row["id"] for row in rows] == [row.id for row in board.rows]
    assert "algorithms:" in rows[0]["yaml"]
    assert rows[0]["executed"]["weights"][0]["sites"] == 5
    assert "refused" in text


def test_the_verb(tmp_path: Path) -> None:
    results = made_up(*FEW).save(tmp_path / "leaderboard.json")
    command = ["leaderboard", str(results), "-o", str(tmp_path / "p.html")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "48 rows" in result.stdout
    assert "Made-up numbers" in (tmp_path / "p.html").read_text()
    results.write_text("{}")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2


@pytest.mark.parametrize("algorithms", [("lsq",), ()])
def test_small_boards(algorithms: tuple[str, ...]) -> None:
    assert "Results" in page(made_up(algorithms, ("academic",)))
