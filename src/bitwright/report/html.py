"""`write_html`: the record as one page that needs nothing else: no network, no other file."""

from __future__ import annotations

import re
from pathlib import Path

from bitwright.files import write_text
from bitwright.report.page import sites, summary, work
from bitwright.report.page.elements import asset, document, pair
from bitwright.report.page.network import network
from bitwright.report.page.ran import ran
from bitwright.report.record import Record

# What the bar at the top links to; the rest is near one of them.
_NAV = {
    "warnings": "Warnings",
    "tradeoff": "Trade-off",
    "accuracy": "Accuracy",
    "latency": "Latency",
    "ran": "What ran",
    "graph": "Graph",
    "sites": "Plan",
    "float": "Float",
    "tuning": "Tuning",
    "training": "Training",
    "devices-0": "Devices",
    "runtimes": "Runtimes",
    "environment": "Environment",
}


def write_html(record: Record, path: str | Path) -> Path:
    """Write the page, whole or not at all."""
    return write_text(Path(path), page(record))


def page(record: Record) -> str:
    """The page's text; a section that the run has no data for is left out."""
    parts = [
        summary.header(record),
        summary.cards(record),
        summary.warnings(record),
        summary.tradeoff(record),
        summary.measured(record),
        ran(record),
        network(record),
        pair(summary.worst(record), work.suggestion(record)),
        sites.plan(record),
        sites.left(record),
        work.steps(record),
        work.tuning(record),
        work.training(record),
        work.devices(record),
        work.runtimes(record),
        work.environment(record),
    ]
    body = "\n".join(part for part in parts if part)
    there = set(re.findall(r'<section id="([\w-]+)"', body))
    nav = [(anchor, name) for anchor, name in _NAV.items() if anchor in there]
    data = record.model_dump_json()
    return document(record.title, body, data=data, nav=nav, scripts=map(asset, ("sites.js", "graph.js")))
