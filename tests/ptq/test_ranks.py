"""calibrate() by two real processes: bit-equal grids, merged as observers say, and nobody waits for ever."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import two_ranks

from bitwright.core.registry import OBSERVERS
from bitwright.ptq import calibrate

sys.path.insert(0, str(Path(__file__).parent))
from ranks_worker import EXTREMES, MEANS, QUANTIZERS, data, fork, state

SIGNED, UNSIGNED = [-128, 127], [0, 255]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return two_ranks.run(Path(__file__).with_name("ranks_worker.py"), tmp_path_factory.mktemp("ranks"))


def equal(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        same = torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        assert same, key


def test_every_observer_is_tested() -> None:
    assert {*EXTREMES, *MEANS} == set(OBSERVERS.names())
    assert {name for name in OBSERVERS.names() if OBSERVERS.get(name).merge == "extremes"} == set(EXTREMES)


@pytest.mark.parametrize("observer", [*EXTREMES, *MEANS])
def test_grids_are_bit_equal_and_signs_agree(ranks: list[Any], observer: str) -> None:
    first, second = (rank[f"observer {observer}"] for rank in ranks)
    equal(first, second)
    assert len(first) == 2 * 3 + 2
    alone = []
    for rank in (0, 1):
        model = fork(["left:input", "left:weight"], observer=observer)
        calibrate(model, [data(rank)] * (rank + 1))
        alone.append(state(model))
    # apart, the ranks would have had other codes: only one has seen negative numbers
    assert [found["left:input codes"] for found in alone] == [UNSIGNED, SIGNED]
    assert first["left:input codes"] == SIGNED
    weight = "bitwright.left:weight.scale"
    assert torch.equal(first[weight], alone[0][weight])
    if observer in ("minmax", "average-minmax", "ema-minmax"):
        highest = [data(rank).max().item() for rank in (0, 1)]
        end = max(highest) if observer in EXTREMES else sum(highest) / 2
        assert first["bitwright.left:input.scale"].item() == pytest.approx(end / 127, rel=1e-6)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_path_that_only_one_rank_takes(ranks: list[Any], quantizer: str) -> None:
    first, second = (rank[f"quantizer {quantizer}"] for rank in ranks)
    equal(first, second)
    assert first["right:input codes"][0] < 0
    alone = fork(["right:input", "right:weight"], quantizer=quantizer)
    calibrate(alone, [-data(0)])
    for key, value in state(alone).items():
        same = torch.equal(value, first[key]) if isinstance(value, torch.Tensor) else value == first[key]
        assert same, key


def test_guards_and_biases_of_a_rank_without_a_batch(ranks: list[Any]) -> None:
    first, second = (rank["no batch on one rank"] for rank in ranks)
    equal(first, second)
    assert len(first) > 8
    assert first["bitwright.4:weight.scale"].max() > 1e-3


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no batch at all", ["CalibrationError", "yielded no batch"]),
        ("never reached", ["PlanError", "right:input: no calibration batch", "right:weight: no calibration batch"]),
        ("no codes", ["PlanError", "left:input: uint8/tensor/sym has no codes", "right:weight: uint8/tensor/sym has"]),
        ("unequal shapes", ["PlanError", "left:input: processes observed shapes", "(16, 4), (20, 4)"]),
        ("unequal plans", ["PlanError", "last:weight: only one of rank 0 and rank 1", "the same plan"]),
    ],
)
def test_all_ranks_report_the_same(ranks: list[Any], case: str, words: list[str]) -> None:
    first, second = (rank[case] for rank in ranks)
    assert first == second
    for word in words:
        assert word in " ".join(first)


@pytest.mark.parametrize(
    ("case", "culprit", "words"),
    [
        ("nan", 1, ["CalibrationError", "right:input: NaN in the calibration data"]),
        ("broken loader", 1, ["FileNotFoundError", "images/0001.jpg"]),
        ("bad weight on one way", 0, ["CalibrationError", "right:weight: infinity in the weight"]),
    ],
)
def test_an_error_on_one_rank_ends_all(ranks: list[Any], case: str, culprit: int, words: list[str]) -> None:
    own, other = ranks[culprit][case], ranks[1 - culprit][case]
    for word in words:
        assert word in " ".join(own)
    assert other[0] == "PlanError"
    assert f"rank {culprit}" in other[1]
    assert words[1] in other[1]


def test_a_subgroup_calibrates_alone(ranks: list[Any]) -> None:
    assert [rank["alone"]["left:input codes"] for rank in ranks] == [UNSIGNED, SIGNED]


def test_ranks_stay_synchronized_after_errors(ranks: list[Any]) -> None:
    equal(*(rank["again"] for rank in ranks))
