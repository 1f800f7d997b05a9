"""Reports of rows: written when they run, linked from the page, made again from the leaderboard's file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from grid_workloads import FILE, algorithm, grid
from leaderboards import made_up
from ruamel.yaml import YAML
from typer.testing import CliRunner

from bitwright import BitwrightError, GridConfig, Leaderboard, rerun_rows
from bitwright.bench.leaderboard import summaries
from bitwright.cli import app
from bitwright.reports import read_json


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid that was run by the command line, with reports: two rows are done, one is refused."""
    folder = tmp_path_factory.mktemp("made")
    data = grid(folder, algorithms=[algorithm("tqt")], backends=["academic", "onnxruntime", "snpe"])
    with (folder / "grid.yaml").open("w") as file:
        YAML().dump(data, file)
    result = invoke(
        "grid", "run", folder / "grid.yaml", "-o", folder / "board.json", "--reports", folder / "rows of it"
    )
    assert result.exit_code == 0, result.output
    assert "2 of 2 finished rows have a report" in result.stderr
    return folder


@pytest.fixture(scope="module")
def board(made: Path) -> Leaderboard:
    return Leaderboard.load(made / "board.json")


def test_a_finished_row_has_a_complete_report(made: Path, board: Leaderboard) -> None:
    academic, runtime, refused = board.rows
    assert refused.status == "refused"
    assert sorted(path.name for path in (made / "rows of it").iterdir()) == sorted([academic.id, runtime.id])
    record = read_json(made / "rows of it" / runtime.id / "report.json")
    assert record.title == "tiny: tqt for onnxruntime, 4 bits, seed 0"
    assert runtime.device is not None
    assert {one.where: one.value for one in record.accuracies} == {
        "float": runtime.float_accuracy,
        "simulated": runtime.accuracy,
        "onnxruntime": runtime.device.accuracy,
    }
    assert record.row is not None
    assert record.row.id == runtime.id
    assert record.row.config == runtime.config
    assert record.row.executed == runtime.executed
    assert record.training is not None
    assert record.training.metrics[-1]["top1"] == runtime.accuracy
    assert all(site.histogram is not None for site in record.sites)
    assert next(site.why for site in record.sites if site.site == "bn2:output") == "read as integers by /add#0"
    text = (made / "rows of it" / runtime.id / "report.html").read_text()
    assert "bitwright.quantizers.tqt.Tqt" in text
    assert "Config as YAML" in text
    assert "bitwright.quantizers.tqt.Tqt" in (made / "rows of it" / runtime.id / "report.md").read_text()


def test_the_leaderboard_has_a_few_figures_of_each_site(made: Path, board: Leaderboard) -> None:
    for row in board.rows[:2]:
        record = read_json(made / "rows of it" / row.id / "report.json")
        sites = [one for one in record.sites if not one.site.endswith(":bias")]  # they follow from the others
        assert [one.site for one in row.sites] == [one.site for one in sites]
        for short, whole in zip(row.sites, sites, strict=True):
            assert short.format == whole.format
            assert short.high == pytest.approx(whole.high, rel=0.01)
            assert whole.clipped is not None
            assert short.clipped == pytest.approx(whole.clipped, rel=0.01)
    assert board.rows[2].sites == ()


def test_a_rerun_row_is_identical(made: Path, board: Leaderboard, tmp_path: Path) -> None:
    row = board.rows[1]
    starts = made / "grid.starts"
    again = ["grid", "rerun", made / "board.json", "--starts", starts, "--row", row.id[:8]]
    result = invoke(*again, "--reports", tmp_path)
    assert result.exit_code == 0, result.output
    assert "yes" in result.stdout
    one, before = (read_json(place / row.id / "report.json") for place in (tmp_path, made / "rows of it"))
    same = {"created": "", "environment": before.environment}  # all but when and where
    assert one.model_copy(update=same) == before.model_copy(update=same)
    # a leaderboard that says something else is found out
    other = row.model_copy(update={"accuracy": 12.0})
    board.model_copy(update={"rows": (other,), "summaries": summaries((other,))}).save(tmp_path / "board.json")
    result = invoke("grid", "rerun", tmp_path / "board.json", "--starts", starts, "--row", row.id)
    assert result.exit_code == 1
    assert "accuracy was 12.0, is" in result.stderr
    assert "the rows were made by revision" in result.stderr
    assert "ATEN_CPU_CAPABILITY" not in result.stderr


def test_a_row_of_other_instructions_says_which_variables_to_set(
    made: Path, board: Leaderboard, tmp_path: Path
) -> None:
    here = board.machines[str(board.rows[0].machine)]
    other = "DEFAULT" if here.isa != "DEFAULT" else "AVX2"
    elsewhere = {"elsewhere": here.model_copy(update={"isa": other, "cpu_features": ("avx2",)})}
    rows = tuple(row.model_copy(update={"machine": "elsewhere"}) for row in board.rows)
    board.model_copy(update={"machines": elsewhere, "rows": rows}).save(tmp_path / "board.json")
    result = invoke("grid", "rerun", tmp_path / "board.json", "--starts", made / "grid.starts", "--row", rows[0].id)
    assert result.exit_code == 0, result.output
    assert "it ran with" in result.stderr
    if other == "DEFAULT":
        assert "set ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2" in result.stderr


def test_rows_that_cannot_be_rerun_are_errors(made: Path, board: Leaderboard, tmp_path: Path) -> None:
    with pytest.raises(BitwrightError) as caught:
        rerun_rows(made_up(), ["zzzz", "0000", f"{3:016x}"])
    assert caught.value.codes == ["unknown-row", "ambiguous-row"]
    moved = {**board.config, "models": [{"name": "tiny", "workload": "gone/grid_workloads.py:tiny"}]}
    with pytest.raises(BitwrightError) as caught:
        rerun_rows(board.model_copy(update={"config": moved}), [board.rows[0].id])
    assert caught.value.codes == ["workload-file-missing"]
    with pytest.raises(BitwrightError) as caught:
        rerun_rows(board, [board.rows[0].id], workload=f"{FILE}:flaky")
    assert caught.value.codes == ["row-changed"]
    assert "--row is required" in invoke("grid", "rerun", made / "board.json").output


def test_the_config_of_a_row_is_that_row(board: Leaderboard) -> None:
    """What the page offers for download runs the row: the same hash, so the same row."""
    assert board.rows
    for row in board.rows:
        config = {**row.config, "models": [{**row.config["models"][0], "workload": f"{FILE}:tiny"}]}
        (task,) = GridConfig.parse(config, where="row", folder=Path()).tasks()
        assert task.key == row.id


def test_the_page_links_to_the_reports_that_are_there(made: Path, board: Leaderboard, tmp_path: Path) -> None:
    page = made / "pages" / "board.html"
    result = invoke("grid", "leaderboard", made / "board.json", "--reports", made / "rows of it", "-o", page)
    assert result.exit_code == 0, result.output
    assert "3 rows, 2 with a report" in result.stdout
    data = re.search(r'id="record">(.*?)</script>', page.read_text())
    assert data is not None
    found = json.loads(data[1])
    assert found["results"] == "board.json"
    links = [row.get("report") for row in found["rows"]]
    assert links[0] == f"../rows%20of%20it/{board.rows[0].id}/report.html"
    assert (page.parent / unquote(links[0])).is_file()
    assert links[2] is None
    assert len(found["rows"][0]["sites"]) == len(board.rows[0].sites) > 10
    missing = invoke("grid", "leaderboard", made / "board.json", "--reports", tmp_path / "none", "-o", page)
    assert missing.exit_code == 2


def test_reports_of_rows_that_ran_before_are_told_of(made: Path, tmp_path: Path) -> None:
    result = invoke("grid", "run", made / "grid.yaml", "--reports", tmp_path)
    assert "0 of 2 finished rows have a report" in result.stderr
    assert re.search(r"--row\s+\w{16}", result.output)
