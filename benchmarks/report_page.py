"""How large the report of a model with 1,000 sites is, and how long a browser needs to open it.

    python benchmarks/report_page.py [--layers 56]

A narrow BERT, quantized and recorded for real: sites count, not their width. Milliseconds are the browser's own, from
the start of the navigation until scripts have run and a frame was painted; then those of jumps to the graph and to the
table, which are drawn when they come into view. Several fresh profiles. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import environment, save

import bitwright
from bitwright.reports import Accuracy, Record, Size, make_record, sensitivity, write_report
from bitwright.sensitivity import Scores, SiteScore

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
_PAINTED = """() => new Promise((done) => {
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())));
})"""


def recorded(layers: int) -> tuple[Record, dict[str, float]]:
    """The record of a BERT with histograms, and what looking at its sites costs with and without them."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=24, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=48, vocab_size=64
    )
    model = BertForSequenceClassification(config).eval()
    batches = [{"input_ids": torch.randint(0, 64, (8, 16))} for _ in range(2)]
    quantized = bitwright.quantize(model, batches, example=batches[0])
    seconds: dict[str, float] = {}
    for histograms in (False, True):
        start = time.process_time()
        record = make_record(
            quantized,
            batches,
            workload="bert",
            accuracies=[Accuracy(where=w, metric="top1", value=50.0) for w in ("float", "simulated")],
            sizes=[Size(name=n, bytes=b) for n, b in (("float", 4_000_000), ("quantized", 1_000_000))],
            histograms=histograms,
        )
        seconds["with" if histograms else "without"] = time.process_time() - start
    # Scoring each of 1,000 sites isn't what is measured here: its part of the record has these sites, and no figures.
    none = {"mse": 0.0, "output_error": 0.0, "cosine_distance": 0.0, "loss_change": None}
    score = [SiteScore(site=s.site, format=s.format, sqnr_db=s.sqnr_db, **none) for s in record.sites]
    scores = Scores(sites=tuple(score), together=score[0], samples=0, shared=0.0, kept_bytes=0)
    return record.model_copy(update={"sensitivity": sensitivity(scores)}), seconds


def opened(page: Path, times: int) -> list[dict[str, Any]]:
    """Open the page in fresh profiles."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    found: list[dict[str, Any]] = []
    with sync_playwright() as playwright:
        for _ in range(times):
            browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            session = tab.context.new_cdp_session(tab)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            tab.goto(page.as_uri())
            ready = tab.evaluate(_PAINTED)
            metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
            scripts = tab.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
            graph, sites = (_jump(tab, section) for section in ("graph", "sites"))
            start = tab.evaluate("performance.now()")
            tab.fill("#filter", "layer.7.")
            filtered = tab.evaluate(_PAINTED) - start
            found.append(
                {
                    "ready_ms": ready,
                    "cpu_ms": 1e3 * metrics["ThreadTime"],
                    "scripts_ms": scripts,
                    "graph_ms": graph,
                    "sites_ms": sites,
                    "filter_ms": filtered,
                    "elements": tab.evaluate("document.querySelectorAll('*').length"),
                    "operators": tab.locator(".network .op").count(),
                }
            )
            browser.close()
    return found


def _jump(tab: Any, section: str) -> float:
    """What it takes to go to a section: only then it is laid out and drawn."""
    start = tab.evaluate("performance.now()")
    tab.evaluate(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")
    return float(tab.evaluate(_PAINTED) - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=56)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    record, seconds = recorded(options.layers)
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(record, folder)
        size, data = page.stat().st_size, (Path(folder) / "report.json").stat().st_size
        runs = opened(page, options.times)
    best, median = (choose(run["ready_ms"] for run in runs) for choose in (min, statistics.median))
    rows = {
        "sites": len(record.sites),
        "operators drawn": runs[0]["operators"],
        "elements of the page": runs[0]["elements"],
        "page, MB (bar: 6)": round(size / 1e6, 2),
        "report.json, MB": round(data / 1e6, 2),
        "opened in ms, best (bar: 2000)": round(best),
        "opened in ms, median": round(median),
        "CPU of the page's thread until then, ms, median": round(statistics.median(run["cpu_ms"] for run in runs)),
        "to the graph, ms, median": round(statistics.median(run["graph_ms"] for run in runs)),
        "to the plan, ms, median": round(statistics.median(run["sites_ms"] for run in runs)),
        "filter, ms, median": round(statistics.median(run["filter_ms"] for run in runs)),
        "looking at sites without histograms, CPU s": round(seconds["without"], 2),
        "with histograms, CPU s": round(seconds["with"], 2),
    }
    lines = ["| | |", "|---|---:|", *(f"| {name} | {value:,} |" for name, value in rows.items())]
    save("report_page", {"rows": rows, "runs": runs, "environment": environment()}, "\n".join(lines))


if __name__ == "__main__":
    main()
