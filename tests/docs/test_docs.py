"""Every Python block of the documentation runs, and every plan and backend table in it can be read."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import bitwright as bw
from bitwright.cluster import Cluster

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md"))]
SLOW = {"tune.md", "predict.md", "profile.md"}  # each takes more than 15 s


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf'^```{language}(?: title="[^"]*")?\n(.*?)^```', page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else []) for page in PAGES],
    ids=[page.relative_to(ROOT / "docs").as_posix() for page in PAGES],
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = blocks(ROOT / "docs" / "start.md", "python")
    (tmp_path / "my_workload.py").write_text(next(text for text in start if text.startswith("# my_workload.py")))
    for block in blocks(page, "yaml"):  # files that the page tells to write
        if name := re.match(r"# (\S+\.yaml)\n", block):
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    # a module that can be imported: what a page defines can be pickled
    space = ModuleType("page_" + re.sub(r"\W", "_", page.stem))
    monkeypatch.setitem(sys.modules, space.__name__, space)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_yaml_blocks_are_plans_tables_clusters_searches_or_grids(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        if re.search(r"^schema:", block, re.M):
            path = tmp_path / "table.yaml"
            path.write_text(block, encoding="utf-8")
            assert bw.backend(str(path)).title
        elif re.search(r"^bitwright_cluster:", block, re.M):
            assert Cluster.from_yaml(block).devices
        elif re.search(r"^bitwright-tune:|accuracy_criterion:", block, re.M):  # ours, or LPOT's
            path = tmp_path / "tune.yaml"
            path.write_text(block, encoding="utf-8")
            assert bw.TuneConfig.load(path).goal
        elif re.search(r"^(bitwright-grid|qparams):", block, re.M):
            path = tmp_path / "grid.yaml"
            path.write_text(block, encoding="utf-8")
            assert bw.GridConfig.load(path).tasks()
        else:
            assert bw.Plan.from_yaml(block).validate() == []


def test_other_peoples_loops_take_at_most_five_lines() -> None:
    loops = [block for block in blocks(ROOT / "docs" / "training.md", "python") if "# +" in block]
    assert len(loops) == 4
    for block in loops:
        assert 3 <= sum(line.endswith("# +") for line in block.splitlines()) <= 5, block


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: (\S+)\.(\w+)$", text, re.M)
    assert sorted(name for _, name in named) == sorted(set(bw.__all__) - {"__version__"})
    for module, name in named:
        assert getattr(import_module(module), name) is getattr(bw, name), name


def test_links_go_somewhere() -> None:
    """Files and headings; the site's own build finds more, but needs MkDocs."""
    problems = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, _ = link.partition("#")
            generated = target.endswith("reference/command-line.md")  # by the site's hook
            if target and "://" not in target and not generated and not (page.parent / target).exists():
                problems.append(f"{page.relative_to(ROOT)}: {link}")
    assert not problems


def test_pages_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [
        str(page.relative_to(ROOT / "docs"))
        for page in PAGES
        if page.relative_to(ROOT / "docs").as_posix() not in navigation
    ]
    assert not missing, "name them in mkdocs.yml"


def test_pages_have_blocks_to_run() -> None:
    assert sum(len(blocks(page, "python")) for page in PAGES) > 20
    assert sum(len(blocks(page, "yaml")) for page in PAGES) > 10
