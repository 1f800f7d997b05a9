from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import raises_problem
from torch import Tensor, nn

from bitwright.core.errors import WorkloadError
from bitwright.core.registry import WORKLOADS
from bitwright.workload import Workload, batches, call, evaluate, load_workload


def linear_workload(**fields: Any) -> Workload:
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    return Workload(**{"name": "w", "model": model, "inputs": (torch.zeros(1, 3),), **fields})


GOOD_FILE = """
import torch
from bitwright.workload import Workload

def tiny():
    return Workload(name="tiny", model=torch.nn.Linear(2, 2), inputs=(torch.zeros(1, 2),))
"""


def test_load_from_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD_FILE)
    before = list(sys.path)
    workload = load_workload(f"{file}:tiny")
    assert workload.name == "tiny"
    assert sys.path == before
    assert "mine" not in sys.modules


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD_FILE)
    load_workload(f"{file}:tiny")
    file.write_text(GOOD_FILE.replace('"tiny"', '"edited, and longer"'))
    assert load_workload(f"{file}:tiny").name == "edited, and longer"


def test_neighbours_of_two_workloads_keep_apart(tmp_path: Path) -> None:
    names = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "my_neighbour.py").write_text(f"NAME = {folder.name!r}")
        (folder / "main.py").write_text("from my_neighbour import NAME\n" + GOOD_FILE.replace('"tiny"', "NAME"))
        names.append(load_workload(f"{folder / 'main.py'}:tiny").name)
    assert names == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "function", "code", "mentions"),
    [
        (GOOD_FILE, "tinny", "unknown-function", "'tiny'"),
        ("X = 1", "X", "unknown-function", "'X'"),
        ("def f():\n    raise KeyError('lost')", "f", "user-code-failed", "KeyError: 'lost'"),
        ("def f(x):\n    return x", "f", "user-code-failed", "TypeError"),
        ("def f():\n    return 7", "f", "not-a-workload", "int"),
        ("import nowhere_to_be_found", "f", "user-code-failed", "ModuleNotFoundError"),
        ("def f(:", "f", "user-code-failed", "SyntaxError"),
        ("raise SystemExit(1)", "f", "user-code-failed", "SystemExit"),
    ],
)
def test_file_that_fails(tmp_path: Path, source: str, function: str, code: str, mentions: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source)
    with raises_problem(code, mentions=mentions, kind=WorkloadError) as caught:
        load_workload(f"{file}:{function}")
    assert (caught.value.__cause__ is not None) is (code == "user-code-failed")


def test_reference_that_names_no_file_or_function(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as raised:
        load_workload(f"{tmp_path / 'none.py'}:f")
    assert raised.value.codes == ["workload-file-missing"]
    with raises_problem("invalid-reference", mentions="mine.py:function"):
        load_workload("mine.py")


def test_error_of_bitwrights_own_passes_unwrapped(tmp_path: Path) -> None:
    file = tmp_path / "slip.py"
    file.write_text(GOOD_FILE.replace("inputs=(torch.zeros(1, 2),)", "inputs=torch.zeros(1, 2)"))
    with raises_problem("invalid-inputs", where="workload 'tiny'", mentions="inputs=(x,)"):
        load_workload(f"{file}:tiny")


def test_load_by_registered_name() -> None:
    WORKLOADS.register("test-linear", linear_workload)
    try:
        assert load_workload("test-linear").name == "w"
        with raises_problem("unknown-name", mentions="'test-linear'"):
            load_workload("test-liner")
    finally:
        WORKLOADS.unregister("test-linear")


@pytest.mark.parametrize(
    ("field", "value", "code", "fix"),
    [
        ("model", nn.Linear, "not-a-module", "Net(), not Net"),
        ("inputs", torch.zeros(1, 3), "invalid-inputs", "inputs=(x,)"),
        ("calibration", [torch.zeros(1, 3)], "not-a-function", "calibration=lambda: loader"),
    ],
)
def test_fields_of_the_wrong_type_are_rejected_with_a_fix(field: str, value: object, code: str, fix: str) -> None:
    with raises_problem(code, where="workload 'w'", mentions=fix):
        linear_workload(**{field: value})


def test_call_takes_each_form_of_batch() -> None:
    def model(a: int, b: int = 10) -> tuple[int, int]:
        return a, b

    assert call(model, 1) == (1, 10)
    assert call(model, (1, 2)) == (1, 2)
    assert call(model, [1, 2]) == (1, 2)
    assert call(model, {"b": 1, "a": 2}) == (2, 1)


def test_call_tells_a_misfit_from_the_models_own_error() -> None:
    x = torch.zeros(1, 3)
    with raises_problem("invalid-batch", mentions="targets"):
        call(nn.Linear(3, 3), (x, torch.zeros(1)))

    def broken(x: Tensor) -> Tensor:
        raise TypeError("the model's own")

    with pytest.raises(TypeError, match="the model's own"):
        call(broken, x)


def test_batches_limit_and_restart() -> None:
    def loader() -> Iterator[Tensor]:
        yield from torch.eye(4)

    assert len(list(batches(loader, 3))) == 3
    assert len(list(batches(loader))) == 4


def test_batches_refuses_what_it_cannot_use() -> None:
    used = iter([torch.zeros(1)])
    next(used)
    with pytest.raises(WorkloadError) as raised:
        batches(None)
    assert raised.value.codes == ["no-calibration-data"]
    with raises_problem("invalid-value", mentions="got 0"):
        batches(list, 0)
    with pytest.raises(WorkloadError) as raised:
        list(batches(lambda: used))
    assert raised.value.codes == ["no-data"]
    with raises_problem("invalid-batch", mentions="batch 1"):
        list(batches(lambda: [torch.zeros(1), "text"]))


def evaluation() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.eye(3), torch.tensor([0, 1, 0])
    yield torch.eye(3)[:1], torch.tensor([0])


def test_measure_top1() -> None:
    workload = linear_workload(evaluation=evaluation)
    assert evaluate(workload, workload.model) == {"top1": 75.0, "n": 4.0}
    assert evaluate(workload, lambda x: SimpleNamespace(logits=x))["top1"] == 75.0


def test_measure_counts_nan_as_a_miss() -> None:
    workload = linear_workload(evaluation=evaluation)
    assert evaluate(workload, lambda x: torch.full((len(x), 3), torch.nan))["top1"] == 0.0


def test_measure_leaves_the_module_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    evaluate(linear_workload(evaluation=evaluation), model)
    assert [m.training for m in model.modules()] == [True, True, False]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_measure_uses_the_owners_metric() -> None:
    workload = linear_workload(evaluate=lambda predict: {"f1": float(predict(torch.ones(1, 3)).sum())}, metric="f1")
    assert evaluate(workload, workload.model) == {"f1": 3.0}


@pytest.mark.parametrize(
    ("fields", "code", "mentions"),
    [
        ({}, "no-evaluation", "evaluation= or evaluate="),
        ({"evaluation": list}, "no-data", "evaluation"),
        ({"evaluation": lambda: [(torch.eye(3), torch.zeros(2))]}, "invalid-output", "tensor (3, 3), tensor (2,)"),
        ({"evaluation": evaluation, "metric": "f1"}, "metric-not-measured", "'f1'"),
    ],
)
def test_evaluate_rejects_workloads_that_it_cant_measure(fields: dict[str, Any], code: str, mentions: str) -> None:
    workload = linear_workload(**fields)
    with raises_problem(code, where="workload 'w'", mentions=mentions):
        evaluate(workload, workload.model)


def test_directions_are_said_or_doubted() -> None:
    def own(**fields: Any) -> Workload:
        return linear_workload(evaluate=lambda model: {}, **fields)

    assert own(metric="loss", lower_is_better=True).less_is_better()
    assert not own(metric="loss", lower_is_better=True).less_is_better("top1")
    assert own(lower_is_better=("mse",)).less_is_better("mse")
    assert not own(lower_is_better=("mse",)).less_is_better()
    for name in ("val_loss", "errors", "RMSE", "perplexity"):
        assert own(metric=name).direction_note()
        assert own(metric=name, lower_is_better=False).direction_note() is None
    assert not any(own(metric=name).direction_note() for name in ("top1", "lossless", "accuracy", "dice"))
    with raises_problem("wrong-argument-type", where="workload 'w'", mentions="('mse',)"):
        own(lower_is_better="mse")
