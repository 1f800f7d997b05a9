from __future__ import annotations

import pickle

import pytest

from bitwright.core import errors
from bitwright.core.errors import BitwrightError, PlanError, Problem, did_you_mean, nearest


def test_a_problem_prints_where_what_value_and_fix() -> None:
    problem = Problem(what="too wide", where="conv1:weight", value="int99", fix="use int8")
    assert str(problem) == "conv1:weight: too wide (got 'int99')\n    fix: use int8"


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(what="too wide"), "too wide"),
        (Problem(what="too wide", value=0), "too wide (got 0)"),
        (Problem(what="too wide", fix="less"), "too wide\n    fix: less"),
    ],
)
def test_a_problem_omits_missing_fields(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_an_error_carries_its_problem() -> None:
    error = BitwrightError("wrong", where="a", value=1, fix="b")
    assert error.problems == [Problem(what="wrong", where="a", value=1, fix="b")]
    assert str(error) == str(error.problems[0])


def test_a_plan_error_lists_all() -> None:
    error = PlanError([Problem(what="first"), Problem(what="second", where="x")], title="bad.yaml has problems")
    assert str(error) == "bad.yaml has problems (2):\n  - first\n  - x: second"
    assert len(error.problems) == 2


def test_all_errors_are_caught_by_the_base() -> None:
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(kinds) > 8
    assert all(issubclass(kind, BitwrightError) for kind in kinds)


@pytest.mark.parametrize(
    "error",
    [BitwrightError("wrong", where="a", value=1, fix="b"), PlanError([Problem(what="x"), Problem(what="y")])],
)
def test_errors_cross_processes(error: BitwrightError) -> None:
    # a worker's error reaches its parent by pickle: distributed training and tuning stand on it
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.problems == error.problems
    assert str(copy) == str(error)


def test_nearest_comes_first() -> None:
    assert nearest("percentle", ["minmax", "percentile", "mse"])[0] == "percentile"


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("conv1", ["conv2", "bn"], "did you mean 'conv2'?"),
        ("zzz", ["conv2", "bn"], "known: bn, conv2"),
    ],
)
def test_did_you_mean(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known) == hint


def test_did_you_mean_stays_short() -> None:
    hint = did_you_mean("zzz", [f"module{i:04d}" for i in range(5000)])
    assert len(hint) < 250
    assert "…" in hint


def test_many_problems_of_a_kind_are_one_line() -> None:
    many = [Problem(what="not there", where=f"op{i}", value=i, fix="put it there") for i in range(20)]
    error = PlanError([*many, Problem(what="else", where="x")], title="all wrong")
    assert str(error).splitlines() == [
        "all wrong (21):",
        "  - op0, op1, op2 and 17 more: not there (got 0)",
        "    fix: put it there",
        "  - x: else",
    ]
    assert len(error.problems) == 21


def test_codes_name_the_problems() -> None:
    error = PlanError([Problem(what="x", code="unknown-site"), Problem(what="y")])
    assert error.codes == ["unknown-site", "PlanError"]
    assert pickle.loads(pickle.dumps(error)).codes == error.codes
    assert BitwrightError("x", code="scale-underflow").codes == ["scale-underflow"]


@pytest.mark.parametrize(
    "value",
    [
        "x" * 7_000_000,
        [["y" * 1000] * 1000] * 1000,
        {str(n): n for n in range(100_000)},
        10**100_000,
        [10**5000],
        b"z" * 10**6,
    ],
    ids=["text", "nested", "mapping", "integer", "list", "bytes"],
)
def test_long_values_are_shortened(value: object) -> None:
    text = str(BitwrightError("wrong", where="a", value=value, fix="b"))
    assert len(text) < 1000
    assert text.startswith("a: wrong (got ")
    assert text.endswith("fix: b")
