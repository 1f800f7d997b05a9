"""Importers are plugins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bitwright.core.importer import Importer, translated
from bitwright.core.registry import IMPORTERS


@pytest.fixture
def plugin() -> Iterator[None]:
    importer = Importer(
        target="tune",
        recognizes=lambda data: "their-key" in data,
        translate=lambda data, *, where: {"workload": data["their-key"], "name": where},
    )
    IMPORTERS.register("test-importer", importer)
    yield
    IMPORTERS.unregister("test-importer")


def test_built_in_importers_are_registered() -> None:
    assert {"lpot", "mqbench"} <= set(IMPORTERS.names())


def test_a_plugin_translates_files_of_its_target(plugin: None) -> None:
    data = {"their-key": "digits"}
    assert translated(data, "tune", where="a.yaml") == {"workload": "digits", "name": "a.yaml"}
    assert translated(data, "grid", where="a.yaml") is None


def test_our_own_files_are_not_translated() -> None:
    assert translated({"workload": "digits"}, "tune", where="a.yaml") is None
    assert translated({"models": ["digits"]}, "grid", where="a.yaml") is None
