"""Every backend's quantizers on five blocks, as text that can be read against the target's documentation.

After a change that is meant: `BITWRIGHT_UPDATE_SNAPSHOTS=1 pytest tests/backends/test_snapshots.py`; read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from target_blocks import BLOCKS, graph_of

from bitwright.backends import backend, check_plan, place, tables
from bitwright.plan import Plan, SiteSpec

SNAPSHOTS = Path(__file__).with_name("snapshots")
BUILT_IN = sorted(path.stem for path in Path(tables.__file__).parent.glob("*.yaml"))


def line(site: str, spec: SiteSpec) -> str:
    if spec.share is not None:
        return f"  {site} = {spec.share}"
    quantizer = "" if spec.quantizer == "plain" else f" {spec.quantizer}"
    return f"  {site}: {spec.format}{quantizer}" if spec.quantizes else f"  {site}: float"


def section(block: str, plan: Plan) -> list[str]:
    lines = [block, *(line(site, spec) for site, spec in plan.sites.items())]
    lines += [f"  {norm} folded into {fold.into}" for norm, fold in plan.folds.items()]
    return lines + [f"  {name} float: {why}" for name, why in plan.float.items()]


@pytest.mark.parametrize("name", BUILT_IN)
def test_snapshot(name: str) -> None:
    text = "\n".join(line for block in BLOCKS for line in [*section(block, place(graph_of(block), name)), ""])
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("BITWRIGHT_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), "a new backend: see the head of this file for how its snapshot is made"
    assert text == path.read_text(encoding="utf-8")


def test_no_snapshot_is_left_over() -> None:
    assert sorted(path.stem for path in SNAPSHOTS.iterdir()) == BUILT_IN


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_placements_are_good_plans(name: str, block: str) -> None:
    graph = graph_of(block)
    plan = place(graph, name)
    assert plan.validate(graph) == []
    assert check_plan(plan, backend(name), graph) == []
    assert Plan.from_yaml(plan.to_yaml()) == plan
