"""The report in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contrast import CONTRAST
from records import EVIL, large, record

from bitwright.reports import write_html

Show = Callable[..., Any]


def column(page: Any, table: str, number: int) -> list[str]:
    cells = page.locator(f"{table} tbody tr:not([hidden]):not(.detail) td:nth-child({number})")
    return [text.strip() for text in cells.all_inner_texts()]


def overflow(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_a_page_with_everything_renders_and_answers(show: Show, tmp_path: Path) -> None:
    """One page for all: starting a browser is most of the time that such a test takes."""
    page = show(write_html(large(60), tmp_path / "report.html"))
    assert page.inner_text("h1") == "net"
    page.wait_for_selector(".network .op", timeout=30000)
    assert page.locator(".network .op").count() == 30
    assert overflow(page) <= 0
    # filter: words, ports, formats
    page.fill("#filter", "layers.7.conv")
    assert page.inner_text("#shown") == "2 of 60"
    page.fill("#filter", "")
    page.select_option("#by-port", "weight")
    assert page.inner_text("#shown") == "30 of 60"
    page.fill("#filter", "no such site")
    assert page.inner_text("#shown") == "0 of 60"
    page.fill("#filter", "")
    page.select_option("#by-port", "")
    # sort: by number, both ways
    page.click("#site-table th button:text-is('SQNR')")
    values = [float(text.split()[0]) for text in column(page, "#site-table", 3)]
    assert values == sorted(values)
    page.click("#site-table th button:text-is('SQNR')")
    values = [float(text.split()[0]) for text in column(page, "#site-table", 3)]
    assert values == sorted(values, reverse=True)
    assert page.get_attribute("#site-table th[aria-sort]", "aria-sort") == "descending"
    # a histogram is drawn when its row is opened, and not before
    assert page.locator("svg.histogram").count() == 0
    page.locator(".opener").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("svg.histogram .bin").count() == 64
    assert page.locator("svg.histogram .bin.out").count() > 0
    page.keyboard.press("Enter")
    assert page.locator("svg.histogram").count() == 0


def test_names_of_others_are_only_text(show: Show, tmp_path: Path) -> None:
    page = show(write_html(record(EVIL), tmp_path / "report.html"))
    assert page.inner_text("h1") == EVIL
    for opener in page.locator(".opener").all():
        opener.click()
    for box in page.locator(".network .op").all():
        box.click()
    for option in page.locator("#measure option").all():
        page.select_option("#measure", option.get_attribute("value"))
    assert page.locator("img").count() == 0


_CROSSING = """() => {
  const found = [];
  for (const drawing of document.querySelectorAll("svg.scatter")) {
    const edge = drawing.getBoundingClientRect();
    const box = (one) => [one.textContent, one.getBoundingClientRect()];
    const boxes = (what) => [...drawing.querySelectorAll(what)].map(box);
    const names = boxes("text.name"), others = boxes(".dot, text:not(.name)");
    names.forEach(([name, a], index) => {
      if (!a.width || a.left < edge.left - 1 || a.right > edge.right + 1) found.push(`${name} is cut`);
      for (const [other, b] of [...names.slice(index + 1), ...others]) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) found.push(`${name} over ${other}`);
      }
    });
  }
  return found;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_points_meet_nothing(show: Show, tmp_path: Path, width: int) -> None:
    made = record("quantized by a name")
    close = [
        timing.model_copy(update={"runtime": name}) for name in ("onnxruntime", "openvino") for timing in made.timings
    ]
    others = tuple(made.others[0].model_copy(update={"title": f"another run, number {n}"}) for n in range(4))
    page = show(
        write_html(made.model_copy(update={"timings": tuple(close), "others": others}), tmp_path / "report.html"),
        width=width,
    )
    assert page.locator("svg.scatter text.name").count() >= 8
    assert page.evaluate(_CROSSING) == []


@pytest.mark.slow
def test_the_graph_by_keys(show: Show, tmp_path: Path) -> None:
    page = show(write_html(large(20), tmp_path / "report.html"))
    page.locator(".network .op[tabindex='0']").focus()
    assert page.locator(".network .op[tabindex='0']").count() == 1
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "layers.2.conv" in page.inner_text("#operator")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press(" ")
    assert "layers.1.conv" in page.inner_text("#operator")
    page.keyboard.press("End")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused).startswith("layers.9.conv")
    page.click("#operator button")
    assert page.inner_text("#shown") == "2 of 20"
    # boxes say which module they are
    assert "layers.9.conv" in page.locator(".network .op").last.text_content()
    # colours follow the measure; those of decibels are the same for every model
    page.select_option("#measure", "sqnr_db")
    assert "from 40 dB" in page.inner_text("#legend")
    before = page.get_attribute(".network .op", "class")
    page.select_option("#measure", "macs")
    assert page.get_attribute(".network .op >> nth=9", "class") != before
    assert "multiply" in page.locator("#measure option:checked").inner_text()


@pytest.mark.slow
def test_light_dark_and_the_choice(show: Show, tmp_path: Path) -> None:
    path = write_html(record(), tmp_path / "report.html")

    def ground(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = show(path), show(path, scheme="dark")
    assert ground(light) != ground(dark)
    assert light.inner_text("#theme") == "Auto"
    light.click("#theme")
    light.click("#theme")
    assert light.inner_text("#theme") == "Dark"
    assert ground(light) == ground(dark)
    light.reload()
    assert ground(light) == ground(dark)  # it is kept
    dark.click("#theme")
    assert ground(dark) != ground(light)


_UNNAMED = """() => Array.from(document.querySelectorAll("input, select, button, [tabindex]"))
  .filter((one) => !one.getAttribute("aria-label") && !one.textContent.trim() && !one.closest("label"))
  .map((one) => one.outerHTML.slice(0, 80))"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(show: Show, tmp_path: Path, scheme: str) -> None:
    page = show(write_html(record(), tmp_path / "report.html"), scheme=scheme)
    page.locator(".opener").first.click()
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(_UNNAMED) == []


@pytest.mark.slow
def test_a_phone(show: Show, tmp_path: Path) -> None:
    page = show(write_html(large(40), tmp_path / "report.html"), width=360)
    assert overflow(page) <= 0
    page.select_option("#sort-by", label="SQNR")
    values = [float(text.split()[0]) for text in column(page, "#site-table", 3)]
    assert values == sorted(values)
    page.locator(".opener").first.click()
    assert page.locator("svg.histogram").bounding_box()["width"] <= 360
    assert overflow(page) <= 0
