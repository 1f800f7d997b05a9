"""The leaderboard in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contrast import CONTRAST
from leaderboards import made_up
from records import EVIL, record

from bitwright.reports import write_report
from bitwright.reports.leaderboard import write_leaderboard_page

Show = Callable[..., Any]
FEW = (("lsq", "apot", "tqt"), ("tvm", "onnxruntime"))


@pytest.mark.slow
def test_filters_hold_for_overview_and_table(show: Show, tmp_path: Path) -> None:
    board = made_up(*FEW)
    page = show(write_leaderboard_page(board, tmp_path / "board.html"))
    assert page.inner_text("#shown") == "36 lines, 72 rows"
    assert page.locator(".matrix").count() == 3
    page.select_option("#by-bits", "4")
    page.select_option("#by-algorithm", "lsq")
    assert page.inner_text("#shown") == "4 of 36 lines, 8 rows"
    assert page.locator(".matrix").count() == 1
    drops = [row.drop for row in board.rows if (row.algorithm, row.bits, row.backend) == ("lsq", 4, "tvm")]
    mean = sum(drop for drop in drops if drop is not None) / len(drops)
    assert page.locator(".heat[aria-label^='lsq, tvm, 4 bits']").inner_text().startswith(f"{mean:.1f}")
    page.reload()
    assert page.inner_text("#shown") == "4 of 36 lines, 8 rows"  # filters are in the address
    page.click("#clear")
    page.select_option("#by-status", "refused")
    assert page.inner_text("#shown") == "6 of 36 lines, 12 rows"
    page.click("#clear")
    page.locator(".heat").first.click()
    assert page.input_value("#by-algorithm") == "apot"


@pytest.mark.slow
def test_a_line_opens_to_config_and_what_was_executed(show: Show, tmp_path: Path) -> None:
    page = show(write_leaderboard_page(made_up(*FEW), tmp_path / "board.html"))

    def drops() -> list[float]:
        return [float(cell.get_attribute("data-v")) for cell in page.locator("#board tbody td:nth-child(6)").all()]

    assert drops() == sorted(drops())  # what loses least comes first
    page.click("#board th button:text-is('Drop')")
    assert drops() == sorted(drops(), reverse=True)
    page.click("#board th button:text-is('Drop')")
    page.locator("#board .opener").first.click()
    text = page.inner_text("#board tr.detail")
    assert "Executed, weights" in text
    assert re.search(r"5 × \w+, int8/channel/sym, 256 levels", text)
    page.locator("#board tr.detail .config summary").first.click()
    assert "algorithms:" in page.inner_text("#board tr.detail pre >> nth=0")
    row = page.get_attribute("#board tr.detail article", "id")
    page.goto(f"{page.url.split('#')[0]}#{row}")
    page.reload()
    assert page.locator("#board tr.detail").count() == 1  # an address can name a row


@pytest.mark.slow
def test_many_lines_are_shown_a_part_at_a_time(show: Show, tmp_path: Path) -> None:
    board = made_up(("lsq", "apot", "tqt", "dsq", "pact"), ("tvm", "onnxruntime", "academic"))
    page = show(write_leaderboard_page(board, tmp_path / "board.html"))
    lines = page.locator("#board tbody tr:not([hidden])")
    assert lines.count() == 60
    assert page.inner_text("#more") == "Show 30 more of 30"
    page.select_option("#by-algorithm", "lsq")
    assert lines.count() == 18
    assert page.locator("#more").is_hidden()
    page.click("#clear")
    page.click("#more")
    assert lines.count() == 90
    # a heading isn't hidden by what sticks to the top
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    page.evaluate("document.getElementById('results').scrollIntoView()")
    bar, head = (page.locator(one).bounding_box() for one in ("#filters", "#results-h"))
    assert head["y"] > bar["y"] + bar["height"]


@pytest.mark.slow
def test_a_phone(show: Show, tmp_path: Path) -> None:
    page = show(write_leaderboard_page(made_up(*FEW), tmp_path / "board.html"), width=390)
    assert page.locator("#board tbody tr:not([hidden])").count() == 20
    for cell in page.locator("#board tbody tr >> nth=0").locator("td").all():
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= 390  # nothing of a line is off the screen
    cut = "[...document.querySelectorAll('.heat')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert page.evaluate(cut) == 0
    page.select_option("#sort-by", label="Accuracy")
    first = page.locator("#board tbody tr >> nth=0").locator("td:nth-child(5)").get_attribute("data-v")
    assert float(first) == max(one.accuracy.mean for one in made_up(*FEW).summaries if one.model and one.accuracy)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 360])
def test_a_row_opens_to_its_sites_and_its_report(show: Show, tmp_path: Path, width: int) -> None:
    board = made_up(*FEW)
    told = next(row for row in board.rows if row.status == "done")
    write_report(record("its net"), tmp_path / "rows & reports" / told.id)
    page = show(
        write_leaderboard_page(board, tmp_path / "board.html", reports=tmp_path / "rows & reports"), width=width
    )
    page.goto(f"{page.url}#{told.id}")
    page.reload()
    row = page.locator(f"article[id='{told.id}']")
    assert "Sites: 3; most is lost at conv0:weight, 20.0 dB" in row.inner_text()
    row.locator("details.sites summary").click()
    assert row.locator("details.sites tbody tr").count() == 3
    assert "1.25 %" in row.locator("details.sites tbody tr").first.inner_text()
    assert f"bitwright bench leaderboard.json --row {told.id}" in row.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.locator("article a.report").count() == 1  # the other seed has none
    row.locator("a.report").click()
    assert page.inner_text("h1") == "its net"
    assert page.locator("#ran tbody tr").count() == 2
    page.locator("#ran summary").click()
    assert "bits:" in page.inner_text("#ran pre")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page.go_back()
    assert page.locator(f"article[id='{told.id}']").count() == 1  # back at the row


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 360])
def test_names_of_others_are_only_text(show: Show, tmp_path: Path, width: int) -> None:
    page = show(write_leaderboard_page(made_up(*FEW, evil=EVIL), tmp_path / "board.html"), width=width)
    for opener in page.locator("#board .opener").all()[:6]:
        opener.click()
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_colour(show: Show, tmp_path: Path, scheme: str) -> None:
    page = show(write_leaderboard_page(made_up(*FEW), tmp_path / "board.html"), scheme=scheme)
    steps = "document.querySelectorAll('.heat').forEach((cell, n) => { cell.className = `heat q${n % 7}`; })"
    page.evaluate(steps)
    page.locator("#board .opener").first.click()
    assert page.evaluate(CONTRAST) == []
