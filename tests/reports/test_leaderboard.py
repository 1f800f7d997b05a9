"""The HTML page and the Markdown of a leaderboard; tests/browser tests the page in a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean

import pytest
from leaderboards import made_up
from records import EVIL
from typer.testing import CliRunner

from bitwright.bench.leaderboard import comparable, summaries
from bitwright.cli import app
from bitwright.reports.leaderboard import leaderboard_markdown, leaderboard_page

FEW = (("lsq", "apot"), ("tvm", "onnxruntime"))


def test_every_name_is_escaped() -> None:
    text = leaderboard_page(made_up(*FEW, evil=EVIL))
    seen: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: seen.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert seen.count("script") == 2  # the data and ours
    assert "img" not in seen
    assert not re.search(r"https?://|\bsrc=[^x]|@import|url\(|<link", text.replace(EVIL, ""))


def test_each_cell_has_mean_and_deviation() -> None:
    board = made_up(*FEW)
    text = leaderboard_page(board)
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


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    results = made_up(*FEW).save(tmp_path / "leaderboard.json")
    command = ["grid", "leaderboard", str(results), "-o", str(tmp_path / "p.html")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "48 rows" in result.stdout
    assert "Made-up numbers" in (tmp_path / "p.html").read_text()
    results.write_text("{}")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2


def test_markdown_escapes_every_name() -> None:
    text = leaderboard_markdown(made_up(*FEW, evil=EVIL))
    assert "made" in text.lower()
    assert not re.search(r"(?<!\\)<", text)
    assert not re.search(r"(?<!\\)`(?!0123456789abcdef`)(?<!0123456789abcdef`)", text)


def test_one_value_has_no_deviation_and_one_row_no_plural() -> None:
    board = made_up(("lsq",), ("tvm",))
    rows = tuple(row for row in board.rows if (row.seed, row.bits) == (0, 8))[:1]
    text = leaderboard_markdown(board.model_copy(update={"rows": rows, "summaries": summaries(rows)}))
    assert text.splitlines()[2].startswith("1 row: 1 done")
    assert "±" not in text.split("Config")[1].replace("mean ± deviation", "")
    for threads, words in ((1, "1 thread"), (3, "3 threads")):
        machines = {key: one.model_copy(update={"threads": threads}) for key, one in board.machines.items()}
        text = leaderboard_markdown(board.model_copy(update={"machines": machines}))
        assert f", {words}, Python" in text


def test_means_over_backends_are_of_rows_that_all_algorithms_have() -> None:
    board = made_up(("lsq", "apot"), ("tvm", "onnxruntime"))  # apot is refused by tvm
    shared = comparable(board.rows)
    assert {row.backend for row in shared} == {"onnxruntime"}
    assert {row.algorithm for row in shared} == {"lsq", "apot"}
    text = leaderboard_markdown(board)
    assert "backends left out: tvm" in text
    own = [row.drop for row in shared if (row.algorithm, row.bits) == ("lsq", 8) and row.drop is not None]
    assert f"| lsq | {mean(own):.2f} ±" in text
    # one that has no accuracy at all hides nobody else's
    refused = [row for row in board.rows if row.backend == "tvm"]
    assert {row.algorithm for row in comparable(refused)} == {"lsq"}


def test_drops_are_from_the_float_network_that_was_trained_on() -> None:
    row = next(row for row in made_up(*FEW).rows if row.accuracy is not None)
    assert row.accuracy is not None
    assert row.float_accuracy is not None
    assert row.drop == row.float_accuracy - row.accuracy
    assert row.model_copy(update={"float_trained": 80.0}).drop == 80.0 - row.accuracy
    board = made_up(*FEW)
    start, trained = (
        leaderboard_markdown(board.model_copy(update={"drops_from": name})) for name in ("start", "trained")
    )
    assert "below the float weights that a row started from" in start
    assert "below the float network after the same training without quantizers" in trained


@pytest.mark.parametrize("algorithms", [("lsq",), ()])
def test_pages_of_small_leaderboards(algorithms: tuple[str, ...]) -> None:
    assert "Results" in leaderboard_page(made_up(algorithms, ("academic",)))
