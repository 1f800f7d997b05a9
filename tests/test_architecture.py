"""The structure of the source: dependencies go one way, and one name refers to one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_imports_keep_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contracts are in pyproject.toml."""
    cli = pytest.importorskip("importlinter.cli", reason="import-linter comes with the extra 'lint'")
    monkeypatch.chdir(ROOT)
    # import-linter would silence all existing loggers, and with them the notes of the verbs in later tests.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def public_classes(tree: ast.Module) -> Iterator[str]:
    """Public classes, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def public_aliases(tree: ast.Module) -> Iterator[str]:
    """Public type aliases and type variables: names in CamelCase that a module assigns."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id[0].isupper() and not target.id.isupper():
                yield target.id


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that a second class or a type alias also has, with the modules."""
    classes, aliases = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for module, source in sources.items():
        tree = ast.parse(source)
        for name in public_classes(tree):
            classes[name].append(module)
        for name in public_aliases(tree):
            aliases[name].append(module)
    found = {name: modules + aliases[name] for name, modules in classes.items()}
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_each_class_name_refers_to_one_class() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    # The classes that describe files of LPOT and MQBench have the names of those files' options.
    peers = ("src/bitwright/importers/lpot/", "src/bitwright/importers/mqbench/")
    sources = {path: text for path, text in sources.items() if not path.startswith(peers)}
    assert len(sources) > 200
    assert shared_names(sources) == {}


def test_the_scan_finds_shared_public_classes() -> None:
    sources = {
        "a": "class Timer: pass\nclass _Local: pass\nLIMIT = 1",
        "b": "class Outer:\n    class Timer: pass\nclass _Local: pass\nclass Grid: pass",
        "c": "Grid: TypeAlias = dict[str, int]\nShape = tuple[int, ...]",
        "d": "Shape = tuple[int, ...]",
    }
    assert shared_names(sources) == {"Timer": ["a", "b"], "Grid": ["b", "c"]}


def error_classes() -> set[str]:
    """Names of our error classes that describe a single problem."""
    path = ROOT / "src" / "bitwright" / "core" / "errors.py"
    classes = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    return classes - {"PlanError", "TrainError", "TrainDiverged"}


def calls_without_code(source: str, classes: set[str]) -> list[int]:
    """Lines that create a problem or an error without a stable code."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if getattr(call.func, "id", "") in classes]
    return [call.lineno for call in named if not {None, "code"} & {keyword.arg for keyword in call.keywords}]


def test_every_problem_has_a_stable_code() -> None:
    classes = error_classes()
    assert {"Problem", "BitwrightError", "CaptureError"} <= classes
    found = {path: calls_without_code(path.read_text(), classes) for path in (ROOT / "src").rglob("*.py")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines} == {}


def test_the_scan_finds_problems_without_a_code() -> None:
    source = "Problem(what='x')\nProblem(what='x', code='y')\nraise CaptureError('x', value=3)\nProblem(**given)"
    assert calls_without_code(source, error_classes()) == [1, 3]
