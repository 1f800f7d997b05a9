"""Backends are tables: the built-in ones, the user's own, and wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from problems import raises_problem
from ruamel.yaml import YAML
from schemas import json_schema
from torch import nn

from bitwright.backends import BackendTable, backend, check_plan, place
from bitwright.backends import tables as tables_package
from bitwright.core.errors import BitwrightError, UnknownName
from bitwright.core.formats import Format
from bitwright.core.registry import BACKENDS, OBSERVERS, QUANTIZERS
from bitwright.graph import capture
from bitwright.graph.operators import can_hook
from bitwright.plan import Plan, SiteSpec

torch.set_num_threads(1)

BUILT_IN = [
    "academic",
    "academic_fold",
    "academic_nlp",
    "acl",
    "executorch_xnnpack",
    "fbgemm",
    "ncnn",
    "nnie",
    "onnx_qnn",
    "onnxruntime",
    "openvino",
    "ppl_cuda",
    "ppl_w8a16",
    "snpe",
    "stpu",
    "tengine_u8",
    "tensorrt",
    "tensorrt_nlp",
    "tflitemicro",
    "torch_inductor",
    "tvm",
    "vitis",
]

MINE: dict[str, Any] = {
    "schema": 2,
    "name": "mychip",
    "title": "A chip with a 4-bit unit",
    "weights": {"format": "int4/channel/sym", "formats": ["int4/*", "int8/*"]},
    "activations": {"format": "uint8/tensor/asym", "formats": ["uint8/tensor/*"]},
    "operators": {"linear": {"inputs": ["input"], "weights": ["weight"], "why": "the 4-bit unit"}},
}


def write(path: Path, data: Any) -> Path:
    with path.open("w") as stream:
        YAML(typ="safe", pure=True).dump(data, stream)
    return path


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tables_make_sense(name: str) -> None:
    table = backend(name)
    assert isinstance(table, BackendTable)
    assert table.name == name
    assert backend(name) is table
    assert backend(table) is table
    assert "TBD" not in table.title
    for choice in (table.weights, table.activations):
        assert choice.allows(Format.parse(choice.format))
        assert choice.allows(Format.parse("float"))
        assert choice.observer in OBSERVERS
        assert choice.quantizer in QUANTIZERS
    absorbed = [kind for kinds in table.absorbed.values() for kind in kinds]
    kinds = {*table.operators, *table.fold, *table.transparent, *table.anchors, *table.passing}
    assert {kind for kind in (*kinds, *table.absorbed, *absorbed) if not can_hook(kind)} == set()
    assert set(table.anchors) <= set(table.operators)


@pytest.mark.parametrize("name", BUILT_IN)
def test_tables_keep_to_the_published_schema(name: str) -> None:
    path = Path(tables_package.__file__).parent / f"{name}.yaml"
    jsonschema.validate(YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")), json_schema("backend-2"))


def test_tables_of_the_first_version_are_read(tmp_path: Path) -> None:
    old = backend(str(write(tmp_path / "mine.yaml", {**MINE, "schema": 1})))
    assert (old.artefacts, old.edges) == (("qdq",), None)


def test_every_built_in_is_tested() -> None:
    folder = Path(tables_package.__file__).parent
    assert sorted(path.stem for path in folder.glob("*.yaml")) == BUILT_IN
    assert set(BUILT_IN) <= set(BACKENDS.names())


@pytest.mark.parametrize(
    ("name", "format", "ok"),
    [
        ("tensorrt", "int8/tensor/sym", True),
        ("tensorrt", "uint8/tensor/asym", False),
        ("onnxruntime", "int16/tensor/sym", True),
        ("openvino", "int16/tensor/sym", False),
        ("onnxruntime", "int8/channel/sym", False),
        ("academic", "int3/tensor/sym/pot", True),
    ],
)
def test_formats_of_activations(name: str, format: str, ok: bool) -> None:
    assert backend(name).activations.allows(Format.parse(format)) is ok


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_a_users_own_table(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"mine{suffix}", MINE)
    assert backend(str(path)).title == "A chip with a 4-bit unit"
    plan = place(capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)), str(path))
    assert {name: str(spec.format) for name, spec in plan.sites.items()} == {
        "0:input": "uint8/tensor/asym",
        "0:weight": "int4/channel/sym",
    }
    assert plan.sites["0:weight"].why == "the 4-bit unit"


def test_a_plan_for_a_users_own_table_is_good(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", MINE)
    graph = capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4))
    assert place(graph, str(path)).validate(graph) == []


def test_an_unknown_backend_lists_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        backend("onnx-runtime")
    assert "'onnxruntime'" in str(caught.value.problems[0].fix)


def test_a_missing_file(tmp_path: Path) -> None:
    with raises_problem("unreadable-file", where=tmp_path / "none.yaml"):
        backend(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "code"), [("schema: {", "invalid-yaml"), ("a: 1\na: 2\n", "duplicate-key"), ("\t- x", "invalid-yaml")]
)
def test_malformed_yaml(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with raises_problem(code, where=path):
        backend(str(path))


@pytest.mark.parametrize("text", ["", "just text", "[1, 2]"])
def test_not_a_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with raises_problem("invalid-value", mentions="mine.yaml"):
        backend(str(path))


def test_all_problems_of_a_table_at_once(tmp_path: Path) -> None:
    wrong = {
        **MINE,
        "schema": 3,
        "nmae": "x",
        "bias": "int8",
        "weights": {"format": "imt8", "formats": []},
        "operators": {"linear": {"input": ["input"], "when": "sometimes"}},
    }
    del wrong["title"]
    with pytest.raises(BitwrightError) as caught:
        backend(str(write(tmp_path / "mine.yaml", wrong)))
    assert "mine.yaml" in str(caught.value)
    assert {problem.where for problem in caught.value.problems} == {
        "schema",
        "nmae",
        "bias",
        "title",
        "weights.format",
        "operators.linear.input",
        "operators.linear.when",
    }


# -- a plan against its table --------------------------------------------------------------------------------


def test_check_plan_lists_every_site_that_the_target_cannot_run() -> None:
    plan = Plan(
        sites={
            "a:input": SiteSpec(format=Format.parse("uint8/tensor/asym")),
            "a:weight": SiteSpec(format=Format.parse("int8/channel/sym")),
            "a:output": SiteSpec(format=Format.parse("int8/tensor/sym")),
            "b:input": SiteSpec(share="a:input"),
            "b:weight": SiteSpec(format=Format.parse("int4/channel/sym")),
            "b:output": SiteSpec(),
        }
    )
    problems = check_plan(plan, backend("tensorrt"))
    assert [(problem.where, problem.value) for problem in problems] == [
        ("a:input", "uint8/tensor/asym"),
        ("b:weight", "int4/channel/sym"),
    ]
    assert all("int8/tensor/sym" in str(problem.fix) for problem in problems)
    assert [problem.where for problem in check_plan(plan, backend("onnxruntime"))] == []
