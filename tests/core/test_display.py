"""Results in notebooks."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from leaderboards import made_up
from records import EVIL, record
from torch import nn

import bitwright
from bitwright.core.display import Chart, bar_chart, table
from bitwright.sensitivity import OperatorScores
from bitwright.sensitivity.score import Scores, SiteScore


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.append(tag)


def tags(text: str) -> list[str]:
    parser = Tags()
    parser.feed(text)
    return parser.names


def score(site: str, error: float) -> SiteScore:
    return SiteScore(
        site=site, format="int8", sqnr_db=30.0, mse=0.1, output_error=error, cosine_distance=0.0, loss_change=None
    )


def results() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    quantized = bitwright.quantize(model, [torch.randn(16, 6)])
    sites = (score(f"{EVIL}:weight", 0.5), score("0:input", 0.25))
    scores = Scores(sites=sites, together=score("", 0.6), samples=4, shared=0.0, kept_bytes=0)
    by_operator = OperatorScores(indicator="hessian", values={EVIL: {"float": 0.0, "int8": 0.5}}, samples=4)
    return {
        "operator_scores": by_operator,
        "graph": quantized.graph,
        "plan": quantized.plan,
        "quantized": quantized,
        "scores": scores,
        "comparison": record(EVIL).comparison,
        "leaderboard": made_up(evil=EVIL),
    }


def test_results_are_tables_without_foreign_markup() -> None:
    shown = results()
    assert len(shown) == 7
    for name, result in shown.items():
        found = set(tags(result._repr_html_()))
        assert "table" in found, name
        assert found <= {"table", "thead", "tbody", "tr", "th", "td", "p", "b"}, name


def test_results_have_one_line_and_plain_data() -> None:
    found = results()
    assert [name for name, result in found.items() if "\n" in repr(result) or len(repr(result)) > 200] == []
    assert [name for name, result in found.items() if not json.loads(json.dumps(result.to_dict()))] == []


def test_one_line_says_what_a_result_contains() -> None:
    shown = {name: repr(result) for name, result in results().items()}
    assert shown["graph"] == "<Graph: 3 operators, 38 parameters, 64 MACs>"
    assert shown["plan"] == "<Plan of any model for onnxruntime: 6 quantized sites>"
    assert shown["scores"] == f"<Scores of 2 sites on 4 samples, most sensitive: {EVIL}:weight>"
    assert shown["operator_scores"] == "<OperatorScores of 1 operators by hessian on 4 samples>"
    assert repr(bitwright.Plan()) == "<Plan of any model for any backend: empty>"
    workload = bitwright.Workload(name="tiny", model=nn.Linear(2, 2), inputs=(torch.ones(1, 2),))
    assert repr(workload) == "<Workload tiny: Linear with no data>"


def test_a_check_is_a_table(tmp_path: Path) -> None:
    data = [torch.randn(16, 6)]
    quantized = bitwright.quantize(nn.Sequential(nn.Linear(6, 4)), data)
    text = quantized.check(quantized.export(tmp_path / "model.onnx").path, data)._repr_html_()
    assert "onnxruntime: passed, 16 samples" in text


def test_plots_are_svg(tmp_path: Path) -> None:
    found = results()
    for name in ("scores", "comparison", "leaderboard"):
        chart = found[name].plot()
        assert isinstance(chart, Chart)
        assert ElementTree.fromstring(chart._repr_svg_()).tag.endswith("svg")
        assert "script" not in tags(chart._repr_html_())
    assert ElementTree.parse(chart.save(tmp_path / "chart.svg")).getroot() is not None


def test_tables_escape_and_shorten() -> None:
    text = table(["name", "#value"], [(EVIL, None)] * 60, title=EVIL)
    assert set(tags(text)) == {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert "10 more rows" in text
    with pytest.raises(ValueError, match="zip"):
        table(["one"], [(1, 2)])


def test_bars_without_values_are_drawn() -> None:
    assert "<rect" in bar_chart([("a", "0", 0.0)], label="none").svg
