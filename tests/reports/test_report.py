"""The record and its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from problems import raises_problem
from records import EVIL, large, record
from schemas import json_schema
from torch import nn

import bitwright
from bitwright.bench.comparison import timings, unreliable_latency
from bitwright.core import formatting
from bitwright.deployment import Latency
from bitwright.quantizers import quantizers_of
from bitwright.reports import (
    Record,
    add_to_report,
    join,
    make_record,
    new_record,
    read_json,
    site_rows,
    write_html,
    write_json,
    write_markdown,
)
from bitwright.reports.charts import front, phases, points
from bitwright.reports.record import ranges


class Tags(HTMLParser):
    """All tags of a page, and that they are closed in order."""

    VOID = ("meta", "input", "img", "wbr")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_json_round_trip(tmp_path: Path) -> None:
    path = write_json(record(EVIL), tmp_path / "report.json")
    assert read_json(path) == record(EVIL)
    assert json.loads(path.read_text())["version"] == 2


def test_unreadable_json_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for text, code, where in (
        ("", "invalid-json", f"{path}:1:1"),
        ("{}", "invalid-value", path),
        ('{"version": 9}', "invalid-value", path),
    ):
        path.write_text(text)
        with raises_problem(code, where=where):
            read_json(path)


def test_a_report_that_is_not_there_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(bitwright.BitwrightError) as error:
        read_json(tmp_path / "nothing")
    assert error.value.codes == ["missing-file"]


def test_a_leaderboard_is_told_from_a_report(tmp_path: Path) -> None:
    path = tmp_path / "lb.json"
    path.write_text('{"bitwright-leaderboard":1,\n"name":"x","rows":[]}')
    with pytest.raises(bitwright.BitwrightError) as error:
        read_json(path)
    assert error.value.codes == ["leaderboard-file"]
    path.write_text('{"version": 2, "title": 1, "strange": 3}')
    with raises_problem("invalid-value", mentions="3 more") as error:
        read_json(path)
    assert len(str(error.value).splitlines()) == 2  # the error and its fix


def test_page_is_escaped_and_well_formed(tmp_path: Path) -> None:
    text = write_html(record(EVIL), tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert tags.seen.count("script") == 2  # the data and ours
    assert "img" not in tags.seen
    assert "<script>alert" not in text
    data = re.search(r'<script type="application/json" id="record">(.*?)</script>', text)
    assert data is not None
    assert Record.model_validate_json(data[1]) == record(EVIL)


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    text = write_html(record(), tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|\bsrc=|@import|url\(|<link", text)
    assert "prefers-color-scheme: dark" in text


def test_page_says_the_figures(tmp_path: Path) -> None:
    text = write_html(record(), tmp_path / "report.html").read_text()
    for words_ in (
        "91.25 %",
        "-0.25 points",
        "26 % of 1.0 kB",
        "0.50× the time of float",
        "12.5 %",
        "40.5 dB",
        "12.3 s",
        "net: net",
    ):
        assert words_ in text
    assert "diverges" in text


def test_sections_appear_only_with_data(tmp_path: Path) -> None:
    full = set(re.findall(r'<section id="([\w-]+)"', write_html(record(), tmp_path / "report.html").read_text()))
    empty = new_record("net")
    tags, text = Tags(), write_html(empty, tmp_path / "empty.html").read_text()
    tags.feed(text)
    assert not tags.open
    assert re.findall(r'<section id="([\w-]+)"', text) == ["environment"]
    assert full >= {
        "tradeoff", "accuracy", "parity", "latency", "runs", "graph", "worst", "suggestion", "sites", "float", "folds",
        "steps", "tuning", "training", "devices-0", "runtimes", "environment",
    }  # fmt: skip
    # each link of the bar leads somewhere
    assert set(re.findall(r'<a href="#([\w-]+)"', text)) <= {"main", "environment"}


def test_markdown_has_the_same_figures_and_no_markup_of_names(tmp_path: Path) -> None:
    text = write_markdown(record(), tmp_path / "report.md").read_text()
    for words_ in ("91.25 %", "-0.25 points", "260 B", "0.50×", "12.5 %", "40.5 dB", "12.3 s", "7.500 ms", "-6.7 %"):
        assert words_ in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    hostile = write_markdown(record(f"a|b\n# c {EVIL} `x` *y* _z_ under_score"), tmp_path / "evil.md").read_text()
    assert not re.search(r"(?<!\\)<", hostile)
    assert "under_score" in hostile
    rows = [line for line in hostile.splitlines() if line.startswith("|")]
    assert rows
    assert "\n# c" not in hostile


def test_records_conform_to_the_schema() -> None:
    jsonschema.validate(json.loads(record().model_dump_json()), json_schema("report-2"))


def test_an_old_record_is_read(tmp_path: Path) -> None:
    data = json.loads(record().model_dump_json())
    new = ("graph", "sensitivity", "forecasts", "tuning", "training", "comparison", "others")
    sites = [
        {k: v for k, v in site.items() if k not in ("seen_low", "seen_high", "histogram")} for site in data["sites"]
    ]
    old = {**{k: v for k, v in data.items() if k not in new}, "version": 1, "sites": sites}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(old))
    found = read_json(path)
    assert found.version == 1
    assert found.sites[0].histogram is None
    assert "Plan" in write_html(found, tmp_path / "report.html").read_text()


def test_a_verb_adds_its_part_to_a_folder(tmp_path: Path) -> None:
    full = record()
    add_to_report(tmp_path, "net", sensitivity=full.sensitivity)
    add_to_report(tmp_path, "net", forecasts=full.forecasts)
    again = full.forecasts[0].model_copy(update={"step_ms": 9.0})
    other = again.model_copy(update={"name": "other"})
    found = add_to_report(tmp_path, "net", forecasts=(again, other))
    assert found.sensitivity == full.sensitivity
    assert [(one.name, one.step_ms) for one in found.forecasts] == [("net", 9.0), ("other", 9.0)]
    assert read_json(tmp_path / "report.json") == found
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.html", "report.md"}
    with pytest.raises(bitwright.BitwrightError) as error:
        add_to_report(tmp_path, "another", tuning=full.tuning)
    assert error.value.codes == ["other-workload"]


def test_runs_are_joined_around_the_first_with_sites() -> None:
    scored = new_record("net", sensitivity=record().sensitivity)
    plain = record().model_copy(update={"sensitivity": None, "others": (), "title": "first"})
    second = plain.model_copy(update={"title": "second"})
    page = join([scored, plain, second])
    assert page.title == "first"
    assert page.sensitivity == scored.sensitivity
    assert [row.title for row in page.others] == ["second"]
    assert "second" in {point.name for point in points(page)}
    with pytest.raises(bitwright.BitwrightError) as error:
        join([plain, new_record("other")])
    assert error.value.codes == ["different-workloads"]


def test_results_in_memory_are_joined(tmp_path: Path) -> None:
    data = torch.randn(32, 8)
    workload = bitwright.Workload(
        name="tiny",
        model=nn.Sequential(nn.Linear(8, 4)),
        inputs=(data[:1],),
        training=lambda: torch.utils.data.TensorDataset(data, data[:, :4]),
        loss=nn.functional.mse_loss,
    )
    device = bitwright.profile(workload, published="nvidia-t4", batch=8)
    prediction = bitwright.predict(workload, device, batch=8)
    quantized = bitwright.quantize(workload.model, [data], name="tiny")
    scores = bitwright.score(quantized.model, [data])
    comparison = record("tiny").comparison.model_copy(update={"workload": "tiny"})
    page = bitwright.report([scores, prediction, quantized, comparison], tmp_path / "page.json")
    assert page == read_json(tmp_path / "page.json")
    assert (page.workload, page.title) == ("tiny", "tiny for onnxruntime")
    assert {site.site for site in page.sites} == {"0:input", "0:weight", "0:bias"}
    assert page.sensitivity.samples == 32
    assert page.forecasts[0].step_ms == pytest.approx(1e3 * prediction.seconds)
    assert page.comparison == comparison
    assert "\n" not in repr(page)
    assert bitwright.report(scores, tmp_path / "scores.html").workload == "model"
    with pytest.raises(bitwright.BitwrightError) as error:
        bitwright.report([quantized, device], tmp_path / "page.html")
    assert error.value.codes == ["no-record"]


def test_the_front_has_what_nothing_beats() -> None:
    found = points(record())
    assert {point.kind for point in found} == {"float", "quantized", "trial", "other"}
    assert "trial 1" not in {point.name for point in found}  # it was given up: its metric is an estimate
    for cost in ("ratio", "size"):
        corners = front(found, cost)
        known = [(getattr(point, cost), point.score) for point in found if getattr(point, cost) is not None]
        beaten = [(x, y) for x, y in known if any(a <= x and b >= y and (a, b) != (x, y) for a, b in known)]
        assert sorted(set(known) - set(beaten)) == corners
    assert front(found, "size") == [(200, 91.0), (260, 91.25), (300, 92.0)]


def test_less_of_a_loss_is_better(tmp_path: Path) -> None:
    """The page once said "up is better" of an error, filled its worst points, and drew the second metric of `bench`."""
    whole = record()
    assert whole.tuning is not None
    assert whole.comparison is not None
    low = [one.model_copy(update={"metric": "mae", "lower_is_better": True}) for one in whole.accuracies]
    tuning = whole.tuning.model_copy(update={"lower_is_better": True})
    row = whole.comparison.runtimes[0]
    second = [one.model_copy(update={"metric": "rmse", "value": 7.0}) for one in row.accuracies]
    comparison = whole.comparison.model_copy(
        update={"runtimes": (row.model_copy(update={"accuracies": (*row.accuracies, *second)}),)}
    )
    lower = whole.model_copy(update={"accuracies": tuple(low), "tuning": tuning, "comparison": comparison})
    found = points(lower)
    assert 7.0 not in {point.score for point in found}
    corners = front(found, "size", lower=True)
    known = [(point.size, point.score) for point in found if point.size is not None]
    beaten = [(x, y) for x, y in known if any(a <= x and b <= y and (a, b) != (x, y) for a, b in known)]
    assert sorted(set(known) - set(beaten)) == corners != front(found, "size")
    assert "Down and to the left is better" in write_html(lower, tmp_path / "low.html").read_text()
    assert "Up and to the left is better" in write_html(whole, tmp_path / "page.html").read_text()
    assert low[1].change_from(low[0]) == "-0.25, better"
    assert low[0].change_from(low[1]) == "+0.25, worse"


def test_histograms_count_what_reached_the_site() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4))
    calibration, batch = torch.randn(64, 6), 3 * torch.randn(32, 6)
    bitwright.quantize(model, [calibration], saturating=False)
    rows = {row.site: row for row in site_rows(model, [batch, batch], histograms=True)}
    row = rows["0:input"]
    assert row.histogram is not None
    assert (row.seen_low, row.seen_high) == (float(batch.min()), float(batch.max()))
    assert sum(row.histogram.counts) == 2 * batch.numel()
    inner = np.clip(batch.numpy().ravel(), row.histogram.low, row.histogram.high)
    want, _ = np.histogram(inner, bins=64, range=(row.histogram.low, row.histogram.high))
    assert np.abs(np.array(row.histogram.counts) / 2 - want).sum() <= 2  # bins' edges are rounded in float32
    weight = rows["0:weight"]
    assert weight.histogram is not None
    assert sum(weight.histogram.counts) == 24  # a weight is counted once


def test_a_large_site_is_looked_at_here_and_there() -> None:
    model = nn.Sequential(nn.Linear(64, 2))
    batch = torch.randn(8192, 64)
    bitwright.quantize(model, [batch], saturating=False)
    row = next(row for row in site_rows(model, [batch, batch], histograms=True) if row.site == "0:input")
    assert row.histogram is not None
    assert (1 << 16) < sum(row.histogram.counts) <= (1 << 18)


def test_sites_against_numpy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4))
    calibration, batch = torch.randn(64, 6), 3 * torch.randn(32, 6)  # beyond the range: some are clipped
    quantized = bitwright.quantize(model, [calibration], saturating=False)
    rows = {row.site: row for row in site_rows(model, [batch])}
    row = rows["0:input"]
    grid = quantizers_of(model)["0:input"].grid()
    x = batch.numpy().astype(np.float64)
    codes = np.rint(x / float(grid.scale)) + float(grid.zero_point)
    near = (np.clip(codes, grid.qmin, grid.qmax) - float(grid.zero_point)) * float(grid.scale)
    assert row.clipped == np.mean((codes < grid.qmin) | (codes > grid.qmax)) > 0
    assert row.sqnr_db == pytest.approx(10 * np.log10((x**2).sum() / ((x - near) ** 2).sum()), abs=0.01)
    assert (row.scale_min, row.scales) == (float(grid.scale), 1)
    assert rows["0:weight"].scales == 4
    assert rows["0:weight"].scale_min < rows["0:weight"].scale_max

    found = make_record(quantized, [batch], workload="net")
    assert found.sites == site_rows(model, [batch], histograms=True)
    assert make_record(quantized, [batch], workload="net", histograms=False).sites == tuple(rows.values())
    assert found.plan_sha256 != record().plan_sha256


def test_steps_that_ran_are_in_the_record() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    data = [torch.randn(16, 6)]
    quantized = bitwright.quantize(model, data, steps=["adaround:iterations=2,batch=8"])
    (row,) = make_record(quantized, data, workload="net").steps
    assert (row.step, row.units, row.skipped) == ("adaround:iterations=2,batch=8", 2, {})
    assert row.seconds > 0
    assert make_record(bitwright.quantize(nn.Sequential(nn.Linear(6, 4)), data), data, workload="net").steps == ()


def test_sites_leave_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).train()
    bitwright.quantize(model, [torch.randn(8, 6)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    site_rows(model, [torch.randn(8, 6)])
    assert all(module.training for module in model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_report_of_a_thousand_sites_is_small(tmp_path: Path) -> None:
    path = write_html(large(1000), tmp_path / "report.html")
    assert path.stat().st_size <= 6_000_000  # how fast it opens: benchmarks/report_page.py


def test_the_card_says_the_backends_own_accuracy(tmp_path: Path) -> None:
    made = record().model_copy(update={"backend": "onnxruntime"})
    places = {"float": 91.5, "simulated": 91.4, "onnxruntime": 91.3, "openvino": 90.1}
    scores = tuple(made.accuracies[0].model_copy(update={"where": w, "value": v}) for w, v in places.items())
    page = write_html(made.model_copy(update={"accuracies": scores}), tmp_path / "report.html").read_text()
    card = page[page.index('<div class="card">') :].partition("</div>")[0]
    assert "91.30 %" in card
    assert "on onnxruntime" in card


def test_latency_comes_from_what_was_measured(tmp_path: Path) -> None:
    def title(made: Record) -> str:
        found = re.search(r"<h3>Latency[^<]*</h3><strong>([^<]*)", write_html(made, tmp_path / "r.html").read_text())
        return "" if found is None else found[1]

    benched = record().model_copy(update={"timings": ()})
    assert title(record()) == title(benched) == "1 ms"
    tuned = benched.model_copy(update={"comparison": None})
    assert title(tuned) == "0.90×"  # of the chosen trial
    assert title(tuned.model_copy(update={"tuning": None})) == ""


def test_ranges_are_those_that_were_seen() -> None:
    site = record().sites[0]
    assert ranges(site) == ("-3 … 2.5", "-2.56 … 2.54")
    bias = site.model_copy(update={"format": "int32/channel/sym", "low": -2.2e5, "high": 2.2e5})
    assert ranges(bias) == ("-3 … 2.5", "")
    assert ranges(bias.model_copy(update={"seen_low": None})) == ("–", "")


def test_phases_are_on_the_clock_of_the_operators(tmp_path: Path) -> None:
    made = record()
    forecast = made.forecasts[0]
    kinds = {"forward": (0.1, 2.1), "backward": (2.2, 6.0), "collective": (6.0, 8.0), "tail": (8.0, 9.0)}
    spans = tuple(
        forecast.devices[0].spans[0].model_copy(update={"kind": kind, "start_ms": start, "end_ms": end})
        for kind, (start, end) in kinds.items()
    )
    device = forecast.devices[0].model_copy(update={"spans": spans})
    bars = {bar.name: (bar.start, bar.end) for bar in phases(device)}
    assert bars["forward"] == (0.1, 2.1)
    assert bars["waits"] == (6.0, 8.0)
    assert bars["optimizer"] == (8.0, 9.0)
    assert max(end for _, end in bars.values()) == 9.0


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_250_000, "1.2 MB"), (3e12, "3.0 TB")]
)
def test_sizes(count: int, text: str) -> None:
    assert formatting.size(count) == text


def test_a_result_without_a_name_joins_those_with_one(tmp_path: Path) -> None:
    """`quantize` of a model has no name, `tune` that of the workload."""
    data = torch.randn(8, 8)
    quantized = bitwright.quantize(nn.Sequential(nn.Linear(8, 4)), [data])
    page = bitwright.report([quantized, record("net")], tmp_path / "page.json")
    assert (page.workload, page.title) == ("net", "net for onnxruntime")
    assert bitwright.report(quantized, tmp_path / "alone.json").workload == "Sequential"


def test_a_ratio_measured_on_a_busy_machine_is_marked() -> None:
    calm = Latency.of([1.0, 1.01, 1.02, 1.0, 1.03])
    busy = Latency.of([0.02, 1.0, 7.0, 0.02, 3.0])
    sure = timings("onnxruntime", 1, 1, float=calm, quantized=calm)
    unsure = timings("onnxruntime", 1, 1, float=busy, quantized=calm)  # the spread of the reference counts, too
    assert unreliable_latency(sure) == []
    [warning] = unreliable_latency(unsure)
    assert (warning.code, warning.where) == ("unreliable-latency", "onnxruntime, batch 1")
    assert sure[1].doubt_text == ""
    assert unsure[1].doubt_text in str(unsure[1].cells())
    assert unsure[1].doubt_text != ""
