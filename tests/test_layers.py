"""Dependencies go one way (the contracts are in pyproject.toml)."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_imports_keep_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("importlinter.cli", reason="import-linter comes with the extra 'lint'")
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    # it would silence all loggers that are there already: notes of the verbs, in tests that follow
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert cli.lint_imports(config_filename=str(root / "pyproject.toml"), no_cache=True) == 0
