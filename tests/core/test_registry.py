from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from problems import raises_problem

from bitwright.core.errors import DuplicateName, UnknownName
from bitwright.core.formats import Format
from bitwright.core.registry import (
    BACKENDS,
    IMPORTERS,
    OBSERVERS,
    QUANTIZERS,
    RUNTIMES,
    WORKLOADS,
    Importer,
    Registry,
    translated,
)

Distribution = Callable[[str, str, str], Path]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """Puts a folder onto sys.path that looks as an installed package does: module, metadata, entry points."""

    def install(name: str, points: str, code: str) -> Path:
        folder = tmp_path / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        (folder / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        return folder

    return install


@pytest.mark.parametrize(
    ("registry", "names"),
    [
        (OBSERVERS, {"minmax", "ema-minmax", "percentile", "mse", "kl"}),
        (QUANTIZERS, {"plain", "lsq"}),
        (BACKENDS, {"onnxruntime", "openvino", "tensorrt", "academic"}),
        (RUNTIMES, {"onnxruntime", "openvino"}),
        (WORKLOADS, {"digits"}),
    ],
)
def test_built_ins_are_entry_points(registry: Registry, names: set[str]) -> None:
    assert names <= set(registry.names())
    assert registry.names() == sorted(registry.names())
    assert all(name in registry for name in names)


@pytest.mark.parametrize("registry", [OBSERVERS, QUANTIZERS, BACKENDS])
def test_every_built_in_loads_once(registry: Registry) -> None:
    assert registry.names()
    for name in registry.names():
        assert registry.get(name) is registry.get(name)


def test_a_plugin_is_found(distribution: Distribution) -> None:
    distribution(
        "bw_plugin_a",
        "[bitwright.observers]\nhalf = bw_plugin_a:Half\n",
        "from bitwright.quantizers.observers.minmax import MinMax\nclass Half(MinMax):\n    pass\n",
    )
    registry = Registry("observer", "bitwright.observers")
    assert "half" in registry
    assert {"half", "minmax"} <= set(registry.names())
    observer = registry.get("half")(format=Format.parse("int8"))
    assert type(observer).__module__ == "bw_plugin_a"


def test_a_plugin_is_not_imported_before_it_is_asked_for(distribution: Distribution) -> None:
    distribution("bw_plugin_b", "[bitwright.observers]\nbroken = bw_plugin_b:X\n", "raise RuntimeError('boom')\n")
    registry = Registry("observer", "bitwright.observers")
    assert "broken" in registry.names()
    assert registry.get("minmax").__name__ == "MinMax"


def test_two_packages_with_one_name_are_refused(distribution: Distribution) -> None:
    distribution("bw_plugin_c", "[bitwright.observers]\nsame = bw_plugin_c:A\n", "A = 1\n")
    distribution("bw_plugin_d", "[bitwright.observers]\nsame = bw_plugin_d:A\n", "A = 2\n")
    with pytest.raises(DuplicateName) as caught:
        Registry("observer", "bitwright.observers").names()
    text = str(caught.value)
    assert "'same'" in text
    assert "bw_plugin_c:A" in text
    assert "bw_plugin_d:A" in text
    assert caught.value.problems[0].fix


def test_a_plugin_may_not_take_a_built_in_name(distribution: Distribution) -> None:
    distribution("bw_plugin_e", "[bitwright.observers]\nminmax = bw_plugin_e:A\n", "A = 1\n")
    with raises_problem("duplicate-name", mentions="minmax", kind=DuplicateName):
        Registry("observer", "bitwright.observers").get("mse")


def test_the_same_package_twice_on_the_path_is_no_conflict(distribution: Distribution, tmp_path: Path) -> None:
    points = "[bitwright.observers]\ntwice = bw_plugin_f:A\n"
    distribution("bw_plugin_f", points, "A = 1\n")
    (tmp_path / "bw_plugin_f").rename(tmp_path / "first")
    distribution("bw_plugin_f", points, "A = 1\n")
    assert Registry("observer", "bitwright.observers").get("twice") == 1


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        OBSERVERS.get("min-max")
    problem = caught.value.problems[0]
    assert (problem.code, problem.value) == ("unknown-name", "min-max")
    assert "'minmax'" in str(problem.fix)


def test_an_empty_registry_is_reported() -> None:
    with raises_problem("unknown-name", kind=UnknownName):
        Registry("thing", "bitwright.nothing").get("x")


def test_register_by_hand() -> None:
    registry = Registry("observer", "bitwright.observers")
    registry.register("mine", dict)
    assert registry.get("mine") is dict
    assert "mine" in registry.names()
    with raises_problem("duplicate-name", mentions="mine", kind=DuplicateName):
        registry.register("mine", list)
    with raises_problem("duplicate-name", mentions="minmax", kind=DuplicateName):
        registry.register("minmax", list)
    registry.unregister("mine")
    assert "mine" not in registry
    for name in ("mine", "minmax"):
        with pytest.raises(UnknownName):
            registry.unregister(name)


@pytest.fixture
def importer_plugin() -> Iterator[None]:
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


def test_a_plugin_translates_files_of_its_target(importer_plugin: None) -> None:
    data = {"their-key": "digits"}
    assert translated(data, "tune", where="a.yaml") == {"workload": "digits", "name": "a.yaml"}
    assert translated(data, "grid", where="a.yaml") is None


def test_our_own_files_are_not_translated() -> None:
    assert translated({"workload": "digits"}, "tune", where="a.yaml") is None
    assert translated({"models": ["digits"]}, "grid", where="a.yaml") is None
