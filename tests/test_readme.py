"""The README: its code runs, and its figures are those of the benchmarks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from bitwright.plan import Plan

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str = "") -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return next(text for kind, text in blocks if kind == language and containing in text)


def test_python_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block("python"), "README.md", "exec"), {})
    assert (tmp_path / "model.onnx").is_file()
    assert capsys.readouterr().out == "True\n"


def test_plan_block_is_a_plan_for_digits(tmp_path: Path) -> None:
    from bitwright import capture
    from bitwright.zoo.workloads import DigitsNet, digits_split

    plan = Plan.from_yaml(block("yaml", "sites:"))
    resolved = plan.resolve(capture(DigitsNet(), digits_split().test_images[:1]))
    assert str(resolved.sites["head:weight"].format) == "int4/group16/sym"
    assert str(resolved.sites["conv1:weight"].format) == "int8/channel/sym"


def test_verbs_are_those_of_the_command_line() -> None:
    from typer.testing import CliRunner

    from bitwright.cli import app

    help_text = CliRunner().invoke(app, ["--help"]).stdout
    table = README[README.index("## What it does") : README.index("## Measured results")]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    verbs = {verb for cell in cells for verb in re.findall(r"`([a-z-]+)`", cell)}
    assert {"quantize", "check"} <= verbs
    for verb in verbs:
        assert re.search(rf"^  {verb} ", help_text, re.MULTILINE), verb


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_figures_stand_in_the_results_that_they_link_to() -> None:
    table = README[README.index("## Measured results") : README.index("## The plan")]
    checked = 0
    for row in table.splitlines():
        for link in re.findall(r"\((benchmarks/results/\w+\.md)\)", row):
            text = (ROOT / link).read_text(encoding="utf-8")
            for figure in re.findall(r"(\d+\.\d\d) (?:%|/)", row):
                assert figure in text, (link, figure)
                checked += 1
    assert checked > 8


def _numbers(text: str) -> list[float]:
    """All numbers on a page of results, and the times of its tables relative to a row for float."""
    found = [float(number) for number in re.findall(r"\d+\.\d+", text)]
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        times = {name: float(time) for name, time in re.findall(r"^\| ([^|]+) \| (\d+\.\d+) \|", table, re.MULTILINE)}
        found += [time / times["float"] for time in times.values() if "float" in times]
    return found


def test_ratios_stand_in_the_results_that_they_link_to() -> None:
    """A new measurement changes the page of results; the README has to follow."""
    table = README[README.index("## Measured results") : README.index("## The plan")]
    checked = 0
    for row in table.splitlines():
        links = re.findall(r"\((benchmarks/results/\w+\.md)\)", row)
        near = {f"{number:.2f}" for link in links for number in _numbers((ROOT / link).read_text(encoding="utf-8"))}
        for figure in re.findall(r"(\d+\.\d\d)×", row):
            assert figure in near, (links, figure)
            checked += 1
    assert checked > 15


def test_the_chart_is_the_one_that_the_script_draws() -> None:
    chart = load_script()
    drawn = chart.draw()
    assert chart.CHART == ROOT / "docs" / "pictures" / "results.svg"
    assert chart.CHART.read_text(encoding="utf-8") == drawn, "run: python benchmarks/readme_chart.py"
    assert "](docs/pictures/results.svg)" in README
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_the_chart_shows_figures_of_the_table() -> None:
    table = README[README.index("## Measured results") : README.index("## The plan")]
    latencies, calibration, steps = load_script().panels()
    shown = [bar for bar in latencies.bars if bar.name.startswith("ResNet-20")] + calibration.bars + steps.bars
    assert len(shown) == 10
    assert [bar.name for bar in shown if f"{bar.value:.2f}×" not in table] == []


def load_script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "readme_chart.py")))


def test_no_path_of_a_machine() -> None:
    assert not re.search(r"/(home|work|tmp|root|Users)/", README)
