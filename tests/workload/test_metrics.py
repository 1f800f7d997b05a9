from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import raises_problem
from sklearn.metrics import f1_score, mean_absolute_error, mean_squared_error, top_k_accuracy_score

from bitwright.workload.metrics import make_evaluate

GENERATOR = np.random.default_rng(0)
SCORES = GENERATOR.normal(size=(97, 5)).astype(np.float32)
TARGETS = GENERATOR.integers(0, 5, 97)


def measured(wanted: dict[str, dict[str, object]], outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """In batches of 20, by a model that looks its outputs up."""
    table = torch.from_numpy(outputs)
    data = [
        (torch.arange(i, min(i + 20, len(targets))), torch.from_numpy(targets[i : i + 20])) for i in range(0, 97, 20)
    ]
    return make_evaluate(wanted, lambda: data)(lambda index: table[index])


@pytest.mark.parametrize("k", [1, 3])
def test_topk_is_scikit_learns(k: int) -> None:
    expected = 100 * top_k_accuracy_score(TARGETS, SCORES, k=k)
    assert measured({"topk": {"k": k}}, SCORES, TARGETS)[f"top{k}"] == pytest.approx(expected)


def test_f1_is_scikit_learns() -> None:
    two, targets = SCORES[:, :2], TARGETS % 2
    expected = 100 * f1_score(targets, two.argmax(1))
    assert measured({"f1": {}}, two, targets)["f1"] == pytest.approx(expected)


def test_errors_are_scikit_learns() -> None:
    wanted = GENERATOR.normal(size=(97, 5)).astype(np.float32)
    values = measured({"mse": {}, "mae": {}, "rmse": {}}, SCORES, wanted)
    assert values["mse"] == pytest.approx(mean_squared_error(wanted, SCORES), rel=1e-6)
    assert values["mae"] == pytest.approx(mean_absolute_error(wanted, SCORES), rel=1e-6)
    assert values["rmse"] == pytest.approx(mean_squared_error(wanted, SCORES) ** 0.5, rel=1e-6)
    assert values["n"] == 97


def test_nan_is_a_miss() -> None:
    broken = np.full_like(SCORES, np.nan)
    assert measured({"topk": {}}, broken, TARGETS)["top1"] == 0.0


def test_an_unknown_metric_names_the_nearest() -> None:
    with raises_problem("unknown-name", mentions="'topk'"):
        make_evaluate({"topkk": {}}, list)
