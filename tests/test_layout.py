"""The tables of packages and files in CONTRIBUTING match the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bitwright"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return GUIDE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_places_of_concepts_exist() -> None:
    rows = re.findall(r"^\| (Where [^|]*\?) \| `([^`]+)` \|$", section("Where to find things"), re.M)
    assert len(rows) >= 20
    assert [place for _, place in rows if not (SOURCE / place).exists()] == []


def test_all_packages_are_described() -> None:
    described = re.findall(r"^\| `(\w+)` \|", section("Package layout"), re.M)
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    packages |= {path.stem for path in SOURCE.glob("[a-z]*.py")}  # a package of one module
    assert len(described) == len(set(described))
    assert set(described) == packages
