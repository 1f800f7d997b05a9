"""Tests of the tests: every one of them must be able to fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(ROOT.glob("tests/**/test_*.py"))
#: Calls that check something on their own.
CHECKS = ("assert", "check", "raises", "fail", "expect", "same", "agree", "validate", "exec")


def _names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            called = one.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            yield name


def _helpers(tree: ast.AST) -> set[str]:
    """Functions that check something."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if any(isinstance(node, ast.Assert) for node in ast.walk(one))}


@cache
def _shared_helpers() -> set[str]:
    """Those of modules beside the tests."""
    files = [path for path in ROOT.glob("tests/**/*.py") if path not in FILES]
    return {name for path in files for name in _helpers(ast.parse(path.read_text(encoding="utf-8")))}


def _constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def tautology(test: ast.expr) -> str | None:
    """Why an assertion holds whatever the product does; None if it may fail."""
    if _constant(test):
        return "a constant"
    if isinstance(test, ast.Tuple):
        return "a tuple is always true"
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        for value in test.values:
            if tautology(value) is not None:
                return f"one side is {tautology(value)}"
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, op, right = test.left, test.ops[0], test.comparators[0]
        alike = ast.dump(left) == ast.dump(right) and not any(isinstance(n, ast.Call) for n in ast.walk(left))
        if alike and isinstance(op, ast.Eq | ast.Is | ast.LtE | ast.GtE):
            return "compares a thing with itself"
        if isinstance(op, ast.In) and isinstance(right, ast.Tuple | ast.List | ast.Set):
            values = {n.value for n in right.elts if isinstance(n, ast.Constant) and isinstance(n.value, bool)}
            if values == {True, False}:
                return "every bool is one of both"
        length = isinstance(left, ast.Call) and getattr(left.func, "id", "") == "len"
        if length and isinstance(op, ast.GtE) and isinstance(right, ast.Constant) and right.value == 0:
            return "no length is negative"
    if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "isinstance" and len(test.args) == 2:
        kind = test.args[1]
        if isinstance(kind, ast.Name) and kind.id == "object":
            return "everything is an object"
    return None


def _broad(call: ast.Call) -> bool:
    """`pytest.raises(Exception)` without `match`."""
    if getattr(call.func, "attr", "") != "raises" or not call.args or any(k.arg == "match" for k in call.keywords):
        return False
    return isinstance(call.args[0], ast.Name) and call.args[0].id in ("Exception", "BaseException")


def weak(source: str) -> list[tuple[int, str]]:
    """Lines of a test module that can't fail, with the reason."""
    tree = ast.parse(source)
    helpers = _helpers(tree) | _shared_helpers()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            why = tautology(node.test)
            if why is not None:
                found.append((node.lineno, why))
        if isinstance(node, ast.Call) and _broad(node):
            found.append((node.lineno, "any exception will do"))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            asserts = any(isinstance(one, ast.Assert) for one in ast.walk(node))
            called = set(_names(node))
            if not asserts and not called & helpers and not any(w in n.lower() for n in called for w in CHECKS):
                found.append((node.lineno, "checks nothing"))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_tests_can_fail(path: Path) -> None:
    assert weak(path.read_text(encoding="utf-8")) == []


def test_doctests_can_fail() -> None:
    """A doctest that asks whether something is True or False says nothing."""
    files = sorted(ROOT.glob("src/**/*.py"))
    assert len(files) > 100
    wrong = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = line.strip().removeprefix(">>> ")
            if line.strip().startswith(">>> ") and not code.endswith((":", "(", "[", "{", ",")):
                try:
                    parsed = ast.parse(code, mode="eval").body
                except SyntaxError:
                    continue
                if not isinstance(parsed, ast.Constant | ast.Tuple) and tautology(parsed):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {code}")
    assert wrong == []


@pytest.mark.parametrize(
    "body",
    [
        "assert True",
        "assert x in (True, False)",
        "assert len(x) >= 0",
        "assert x == x",
        "assert x == 1 or True",
        "assert isinstance(x, object)",
        "assert (x, 'message')",
        "with pytest.raises(Exception):\n        f()",
        "f()",
    ],
)
def test_the_scan_finds_what_cannot_fail(body: str) -> None:
    assert len(weak(f"def test_it():\n    {body}\n")) >= 1


@pytest.mark.parametrize("body", ["assert x == y", "assert f() == f()", "with pytest.raises(ValueError):\n        f()"])
def test_the_scan_leaves_sound_tests_alone(body: str) -> None:
    assert weak(f"def test_it():\n    {body}\n") == []
