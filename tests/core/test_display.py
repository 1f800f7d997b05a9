"""Results in notebooks."""

from __future__ import annotations

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from leaderboards import made_up
from records import EVIL, record
from step_cases import net, profile_of, timed_sample
from torch import nn

import bitwright
from bitwright.cluster import Cluster, Link, predict_step
from bitwright.core.display import Chart, Table, bar_chart
from bitwright.profiling import DeviceProfile, StepSettings, Variant, record_step
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


def prediction() -> tuple[DeviceProfile, bitwright.Prediction]:
    model, batch, loss = net()
    step = record_step(model, batch, loss)
    profile = profile_of(timed_sample(Variant(model=model), batch, loss).calls)
    cluster = Cluster.of({"<b>": 2}, link=Link(latency_us=1, gbit_per_s=10))
    return profile, predict_step(step, bitwright.Plan(), {"<b>": profile}, cluster, StepSettings(fuse=False))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One result of each type that users see, with hostile names where names are free."""
    data = torch.randn(16, 6)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    quantized = bitwright.quantize(copy.deepcopy(model), [data])
    workload = bitwright.Workload(
        name=EVIL,
        model=model,
        inputs=(data[:1],),
        calibration=lambda: [data],
        evaluate=lambda predict: {"top1": 90.0, "n": 16.0},
    )
    sites = (score(f"{EVIL}:weight", 0.5), score("0:input", 0.25))
    profile, predicted = prediction()
    return {
        "operator_scores": OperatorScores(indicator="hessian", values={EVIL: {"float": 0.0, "int8": 0.5}}, samples=4),
        "graph": quantized.graph,
        "plan": quantized.plan,
        "quantized": quantized,
        "check": quantized.check(quantized.export(tmp_path_factory.mktemp("check") / "model.onnx").path, [data]),
        "scores": Scores(sites=sites, together=score("", 0.6), samples=4, shared=0.0, kept_bytes=0),
        "tuned": bitwright.tune(workload, budget=bitwright.Budget(stop="first")),
        "profile": profile,
        "prediction": predicted,
        "comparison": record(EVIL).comparison,
        "leaderboard": made_up(evil=EVIL),
    }


TYPES = (
    *("operator_scores", "graph", "plan", "quantized", "check", "scores", "tuned", "profile", "prediction"),
    *("comparison", "leaderboard"),
)
PLOTTED = ("scores", "tuned", "profile", "prediction", "comparison", "leaderboard")


def test_all_types_are_tested(results: dict[str, Any]) -> None:
    assert set(TYPES) == set(results)
    assert set(PLOTTED) == {name for name, result in results.items() if hasattr(result, "plot")}


@pytest.mark.parametrize("name", TYPES)
def test_a_result_has_one_line_a_table_and_plain_data(results: dict[str, Any], name: str) -> None:
    result = results[name]
    line = repr(result)
    assert "\n" not in line
    assert 0 < len(line) <= 200
    assert json.loads(json.dumps(result.to_dict()))
    html = result._repr_html_()
    assert set(tags(html)) <= {"table", "thead", "tbody", "tr", "th", "td", "p", "b"}  # no markup from names
    assert "table" in tags(html)
    ElementTree.fromstring(f"<div>{html}</div>")  # every element is closed


@pytest.mark.parametrize("name", PLOTTED)
def test_a_plot_is_svg(results: dict[str, Any], name: str, tmp_path: Path) -> None:
    chart = results[name].plot()
    assert isinstance(chart, Chart)
    assert ElementTree.fromstring(chart._repr_svg_()).tag.endswith("svg")
    assert "script" not in tags(chart._repr_html_())
    assert ElementTree.parse(chart.save(tmp_path / "chart.svg")).getroot() is not None


def test_one_line_says_what_a_result_contains(results: dict[str, Any]) -> None:
    shown = {name: repr(result) for name, result in results.items()}
    assert shown["graph"] == "<Graph: 3 operators, 38 parameters, 64 MACs>"
    assert shown["plan"] == "<Plan for onnxruntime: 6 quantized sites>"
    assert shown["scores"] == f"<Scores of 2 sites on 4 samples, most sensitive: {EVIL}:weight>"
    assert shown["operator_scores"] == "<OperatorScores of 1 operator by hessian on 4 samples>"
    assert repr(bitwright.Plan()) == "<Plan for any backend: empty>"
    workload = bitwright.Workload(name="tiny", model=nn.Linear(2, 2), inputs=(torch.ones(1, 2),))
    assert repr(workload) == "<Workload tiny: Linear with no data>"


def test_tables_escape_and_shorten() -> None:
    text = Table(["name", "#value"], [(EVIL, None)] * 60, title=EVIL).to_html()
    assert set(tags(text)) == {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert "10 more rows" in text
    with pytest.raises(ValueError, match="zip"):
        Table(["one"], [(1, 2)]).to_html()


def test_bars_without_values_are_drawn() -> None:
    assert "<rect" in bar_chart([("a", "0", 0.0)], label="none").svg
