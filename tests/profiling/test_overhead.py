"""What the host takes between operators."""

from __future__ import annotations

from pathlib import Path

import two_ranks


def test_one_rank_can_measure_without_the_others(tmp_path: Path) -> None:
    found = two_ranks.run(Path(__file__).with_name("overhead_worker.py"), tmp_path)
    assert found == ["rank 0 is through", "rank 1 is through"]
