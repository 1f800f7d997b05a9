"""The committed leaderboard is the whole of its grid, and says what ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright import GridConfig, Leaderboard
from bitwright.core.registry import QUANTIZERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("leaderboard", "leaderboard_why", "leaderboard_ranges")


@pytest.mark.parametrize("name", NAMES)
def test_the_published_leaderboard_has_all_rows_of_its_grid(name: str) -> None:
    config = GridConfig.load(BENCHMARKS / f"{name}.yaml")
    file = BENCHMARKS / "results" / f"{name}.json"
    board = Leaderboard.load(file)
    assert board.config_hash == config.digest
    assert [row.id for row in board.rows] == [task.key for task in config.tasks()]
    assert {row.status for row in board.rows} <= {"done", "refused", "diverged"}
    assert file.stat().st_size <= 5_200_000


@pytest.mark.parametrize("name", NAMES)
def test_finished_rows_have_a_machine_and_sites(name: str) -> None:
    board = Leaderboard.load(BENCHMARKS / "results" / f"{name}.json")
    assert board.drops_from == "trained"
    for row in board.rows:
        if row.status == "done":
            assert row.sites
            assert row.observers is not None
            machine = board.machines[str(row.machine)]
            assert machine.instructions == ("AVX2", "AVX2")
            assert machine.revision is not None


@pytest.mark.parametrize("name", NAMES)
def test_executed_quantizers_match_the_settings_of_rows(name: str) -> None:
    rows = Leaderboard.load(BENCHMARKS / "results" / f"{name}.json").rows
    assert any(row.status == "done" for row in rows)
    for row in rows:
        if row.status != "done":
            assert row.reason
            continue
        assert row.executed is not None
        for sites, method in ((row.executed.weights, row.w_method), (row.executed.activations, row.a_method)):
            # Modules may move after a leaderboard was made; the class stays the same.
            assert {one.quantizer.rpartition(".")[2] for one in sites} == {QUANTIZERS.get(method).__qualname__}
            assert all(one.levels <= 2 ** int(one.format.partition("/")[0].lstrip("uint")) for one in sites)
        assert row.executed.folding.keys() <= {str(row.config.get("bnfold", 4))}
