"""`bitwright bench grid.yaml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grid_workloads import FILE, grid
from typer.testing import CliRunner

from bitwright import Leaderboard
from bitwright.cli import app

MQBENCH = "qparams:\n    w_method: lsq\n    a_method: lsq\n    bit: 4\n\nbackend: academic\nbnfold: 4\n"


def bitwright(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_mqbenchs_config_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MQBENCH)
    board, model = tmp_path / "board.json", f"{FILE}:tiny"
    shown = bitwright("grid", "show", tmp_path / "config.yaml", "--workload", model)
    assert shown.exit_code == 1  # nothing is done yet
    assert "1 row: 1 pending" in shown.output
    done = bitwright("grid", "run", tmp_path / "config.yaml", "--workload", model, "-o", board)
    assert done.exit_code == 0, done.output
    (row,) = Leaderboard.load(board).rows
    assert (row.status, row.algorithm, row.bits, row.seed) == ("done", "lsq", 4, 1000)
    assert row.executed is not None
    assert row.executed.weights[0].quantizer == "bitwright.quantizers.lsq.Lsq"
    assert row.executed.folding == {}  # academic doesn't fold
    assert "| lsq |" in board.with_suffix(".md").read_text(encoding="utf-8")
    again = bitwright("grid", "show", tmp_path / "config.yaml", "--workload", model, "--json")
    assert json.loads(again.stdout)["rows"][0]["accuracy"] == row.accuracy


@pytest.mark.slow
def test_mqbenchs_config_runs_without_any_option(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MQBENCH)
    done = bitwright("grid", "run", tmp_path / "config.yaml", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["model"] == "digits"
    assert row["float_accuracy"] - row["accuracy"] < 5


def test_a_grid_of_refused_rows_says_why_and_fails(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(json.dumps(grid(tmp_path, backends=["tensorrt"], start=None)))
    done = bitwright("grid", "run", file, "-o", tmp_path / "board.json")
    assert done.exit_code == 1
    assert "refused: lsq, tensorrt, 1 row: plan: tensorrt can't run this weight format" in done.output
    assert "± 0.00" not in (tmp_path / "board.md").read_text(encoding="utf-8")


def test_wrong_uses_say_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(json.dumps(grid(tmp_path, backends=["tensort"])))  # JSON is YAML
    wrong = bitwright("grid", "run", file)
    assert wrong.exit_code == 2
    assert "backends.0: unknown backend" in wrong.output
    assert "tensorrt" in wrong.output
    assert "No such option: --threads" in bitwright("grid", "run", file, "--threads", "2").output
    assert "a leaderboard is a JSON file" in bitwright("grid", "run", file, "-o", "board.html").output
