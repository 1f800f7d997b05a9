"""The record and its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bitwright
from bitwright.attach import quantizers_of
from bitwright.deploy import Latency
from bitwright.report import (
    Accuracy,
    FloatOperator,
    Parity,
    Record,
    SiteRow,
    Size,
    StepRow,
    environment,
    make_record,
    read_json,
    site_rows,
    timings,
    words,
    write_html,
    write_json,
)

EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'


def record(name: str = "net") -> Record:
    site = SiteRow(
        site=f"{name}:weight",
        format="int8/channel/sym",
        observer=name,
        quantizer="plain",
        guard=name,
        share=None,
        scales=8,
        scale_min=0.01,
        scale_max=0.02,
        zero_point_min=0,
        zero_point_max=0,
        low=-2.56,
        high=2.54,
        clipped=0.125,
        sqnr_db=40.5,
        why=name,
    )
    fast, slow = (Latency(median_ms=m, p10_ms=m * 0.9, p90_ms=m * 1.2, p99_ms=m * 1.3, runs=9) for m in (1.0, 2.0))
    return Record(
        title=name,
        workload=name,
        backend=name,
        created="2026-01-02T03:04:05+00:00",
        seed=0,
        plan_sha256="0" * 64,
        environment=environment(),
        accuracies=(
            Accuracy(where="float", metric="top1", value=91.5, samples=100),
            Accuracy(where=name, metric="top1", value=91.25, samples=100),
        ),
        sizes=(Size(name="float", bytes=1000), Size(name=name, bytes=260)),
        timings=tuple(timings(name, 1, 1, float=slow, quantized=fast)),
        parities=(
            Parity(
                runtime=name,
                passed=False,
                samples=3,
                sqnr_db=None,
                max_error=0.5,
                top1_agreement=0.75,
                first_divergence=name,
            ),
        ),
        sites=(site,),
        float_operators=(FloatOperator(operator=name, kind="softmax", why=name),),
        folds={name: name},
        steps=(StepRow(step=name, units=7, seconds=12.34, skipped={name: name}),),
    )


class Tags(HTMLParser):
    """All tags of a page, and that they are closed in order."""

    VOID = ("meta", "input", "img", "line", "rect", "wbr")

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
    for text in ("", "{}", '{"version": 9}'):
        path.write_text(text)
        with pytest.raises(bitwright.BitwrightError, match="can't read the report"):
            read_json(path)


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


def test_page_of_an_empty_record(tmp_path: Path) -> None:
    bare = record().model_copy(
        update=dict.fromkeys(("accuracies", "sizes", "timings", "parities", "sites", "float_operators", "steps"), ())
    )
    tags = Tags()
    tags.feed(write_html(bare, tmp_path / "report.html").read_text())
    assert not tags.open


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


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_250_000, "1.2 MB"), (3e12, "3.0 TB")]
)
def test_sizes(count: int, text: str) -> None:
    assert words.size(count) == text
