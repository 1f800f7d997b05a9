"""Tests of the tests: every one of them must be able to fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import bitwright.core.errors

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


def _not_empty(node: ast.expr, known: set[str]) -> bool:
    """Whether an iterable has an item, as far as its source shows; `known` are constants of the module that have."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return bool(node.elts)
    if isinstance(node, ast.Dict):
        return bool(node.keys)
    if isinstance(node, ast.Constant):
        return bool(node.value)
    if isinstance(node, ast.Name):
        return node.id in known
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == "range":
            return all(isinstance(argument, ast.Constant) for argument in node.args)
        parts = node.args or ([node.func.value] if isinstance(node.func, ast.Attribute) else [])
        sources = ("enumerate", "zip", "sorted", "reversed", "list", "product", "items", "values", "keys")
        return name in sources and bool(parts) and all(_not_empty(part, known) for part in parts)
    return False


def _constants(tree: ast.Module) -> set[str]:
    """Names of the module's own constants that have items."""
    found: set[str] = set()
    for one in tree.body:
        value = one.value if isinstance(one, ast.Assign | ast.AnnAssign) else None
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        if value is not None and _not_empty(value, found):
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _checks(node: ast.AST, helpers: set[str]) -> bool:
    called = set(_names(node))
    words = any(word in name.lower() for name in called for word in CHECKS)
    return words or bool(called & helpers) or any(isinstance(one, ast.Assert) for one in ast.walk(node))


def _surely_checks(body: list[ast.stmt], helpers: set[str], known: set[str]) -> bool:
    """Whether these statements check something on every path: a loop may have no rounds, an `if` may not hold."""
    for one in body:
        if isinstance(one, ast.For):
            if _checks(one.iter, helpers) or (_not_empty(one.iter, known) and _surely_checks(one.body, helpers, known)):
                return True
        elif isinstance(one, ast.If):
            branches = (one.body, one.orelse)
            if _checks(one.test, helpers) or all(_surely_checks(branch, helpers, known) for branch in branches):
                return True
        elif isinstance(one, ast.Try):
            if any(_surely_checks(part, helpers, known) for part in (one.body, one.finalbody)):
                return True
        elif isinstance(one, ast.With):
            if any(_checks(item, helpers) for item in one.items) or _surely_checks(one.body, helpers, known):
                return True
        elif not isinstance(one, ast.While | ast.FunctionDef | ast.ClassDef) and _checks(one, helpers):
            return True
    return False


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, bitwright.BitwrightError)


def _matches_wording(call: ast.Call, errors: set[str]) -> bool:
    """`pytest.raises` of one of our errors with `match`: a test checks codes and locations, not the wording."""
    if getattr(call.func, "attr", "") != "raises" or not call.args or all(k.arg != "match" for k in call.keywords):
        return False
    kind = call.args[0]
    return getattr(kind, "attr", getattr(kind, "id", "")) in errors


#: Tests over the blocks of a page, which may have none; another test counts them.
MAY_BE_EMPTY = {"test_python_blocks_run", "test_yaml_blocks_are_plans_tables_clusters_searches_or_grids"}


def weak(source: str) -> list[tuple[int, str]]:
    """Lines of a test module that can't fail, with the reason."""
    tree = ast.parse(source)
    helpers = _helpers(tree) | _shared_helpers()
    constants = _constants(tree)
    errors = {name for name, kind in vars(bitwright.core.errors).items() if _is_error(kind)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            why = tautology(node.test)
            if why is not None:
                found.append((node.lineno, why))
        if isinstance(node, ast.Call) and _broad(node):
            found.append((node.lineno, "any exception will do"))
        if isinstance(node, ast.Call) and _matches_wording(node, errors):
            found.append((node.lineno, "matches the wording of an error: use raises_problem"))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            asserts = any(isinstance(one, ast.Assert) for one in ast.walk(node))
            called = set(_names(node))
            if not asserts and not called & helpers and not any(w in n.lower() for n in called for w in CHECKS):
                found.append((node.lineno, "checks nothing"))
            elif node.name not in MAY_BE_EMPTY and not _surely_checks(node.body, helpers, constants):
                found.append((node.lineno, "all checks are in a loop or an `if` that may not run"))
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
        "with pytest.raises(BitwrightError, match='wording'):\n        f()",
        "f()",
        "for x in f():\n        assert x == 1",
        "if f():\n        assert g() == 1",
        "for x in (1, 2):\n        if x in f():\n            assert g() == 1",
        "while f():\n        assert g() == 1",
    ],
)
def test_the_scan_finds_what_cannot_fail(body: str) -> None:
    assert len(weak(f"def test_it():\n    {body}\n")) >= 1


@pytest.mark.parametrize(
    "body",
    [
        "assert x == y",
        "assert f() == f()",
        "with pytest.raises(ValueError):\n        f()",
        "for x in (1, 2):\n        assert f(x) == 1",
        "if f():\n        assert g() == 1\n    else:\n        assert g() == 2",
        "for x in f():\n        assert x == 1\n    assert f() == 2",
    ],
)
def test_the_scan_leaves_sound_tests_alone(body: str) -> None:
    assert weak(f"def test_it():\n    {body}\n") == []
