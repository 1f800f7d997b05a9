"""The notebook runs from the first cell to the last."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import bitwright

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "notebook.ipynb"
NOTEBOOK = json.loads(PATH.read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
TEXT = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"]


def run_cell(source: str, space: dict[str, Any]) -> Any:
    """Run one cell and return the value of its last expression, as Jupyter does."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, type_ignores=[]), PATH.name, "exec"), space)
    return None if last is None else eval(compile(ast.Expression(last.value), PATH.name, "eval"), space)


def test_it_is_a_clean_notebook() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert len(cells) > 20


@pytest.mark.timeout(600)
def test_all_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BITWRIGHT_CACHE", str(tmp_path / "cache"))
    space: dict[str, Any] = {"__name__": "notebook"}
    shown = [run_cell(source, space) for source in CODE]
    assert [value for value in shown if "\n" in repr(value)] == []

    assert space["check"].passed
    assert space["tuned"].met_goal
    _, calibrated, trained = [value["top1"] for value in shown if isinstance(value, dict) and "top1" in value]
    # How much 4 bits lose before training depends on the CPU's order of additions: from nothing to some percent.
    assert trained > max(97, calibrated - 1), "training recovers what 4 bits lose"
    assert space["cluster_plan"].devices["t4"].compute, "the slow device has operators in FP16"
    assert not space["cluster_plan"].devices["v100"].compute, "the fast device stays in float"
    assert space["planned"].seconds < space["in_float"].seconds
    assert {file.name for file in tmp_path.iterdir()} >= {"plan.yaml", "digits.onnx", "digits-int8", "report.html"}


def test_it_covers_the_workflow() -> None:
    called = set(re.findall(r"\bbw\.(\w+)\(", "\n".join(CODE)))
    verbs = {"capture", "make_plan", "quantize", "evaluate", "score", "tune", "profile", "plan_cluster", "predict"}
    assert verbs | {"Qat", "report", "strip", "load_workload"} <= called
    assert called <= set(bitwright.__all__) | {"Cluster"}
    methods = set(re.findall(r"\bquantized\.(\w+)\(", "\n".join(CODE)))
    assert methods == {"evaluate", "export", "check", "save"}


def test_links_go_somewhere() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", "\n".join(TEXT))
    assert len(links) >= 2
    assert [link for link in links if "://" not in link and not (PATH.parent / link).exists()] == []
