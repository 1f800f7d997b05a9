"""Plan files: what goes out comes in again, and what is wrong in a file is said with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import raises_problem
from ruamel.yaml import YAML

from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.formats import Format
from bitwright.plan import ComputeSpec, Device, FoldSpec, Plan, SiteSpec, json_schema

# -- random plans --------------------------------------------------------------------------------------------

names = st.one_of(
    st.from_regex(r"[a-z0-9_]{1,8}(\.[a-z0-9_]{1,8}){0,2}(/[a-z_]{1,6}#[0-9])?:(input|weight|output)", fullmatch=True),
    st.sampled_from(["*:weight", "layer?.*:input", "[ab]:output", "0:input", "/add#0:input1"]),
)
words = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["yes", "null", "1", "1.0", "0x1f", "# no", "a: b", "- x", "two\nlines\n", " ", "'\"", "{}", "~"]),
)
titles = words.filter(lambda text: bool(text.strip()))
kinds = words.filter(lambda text: text.isprintable() and bool(text.strip(" .")) and not {"/", "\\"} & set(text))
formats = st.sampled_from(
    [
        "float",
        "int8/channel/sym",
        "uint8/tensor/asym",
        "int4/group64/sym",
        "int8/tensor/sym/pot/adasign",
        "bf16",
    ]
).map(Format.parse)
scalars = st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.booleans(), words)
options = st.dictionaries(st.sampled_from(["percentile", "bins", "mode"]), scalars, max_size=2)
specs = st.builds(
    SiteSpec,
    format=formats,
    observer=st.sampled_from(["minmax", "percentile", "yes"]),
    observer_options=options,
    quantizer=st.sampled_from(["plain", "lsq"]),
    quantizer_options=options,
    guard=st.none() | st.just("int16-pairs"),
    share=st.none() | names,
    why=words,
)
sites = st.dictionaries(names, specs, max_size=4)
folds = st.builds(FoldSpec, into=names, strategy=st.integers(0, 4), sync=st.booleans())
plans = st.builds(
    Plan,
    sites=sites,
    fold=st.dictionaries(names, names | folds, max_size=3),
    float=st.dictionaries(names, words, max_size=2),
    devices=st.dictionaries(kinds, st.builds(Device, sites=sites, why=words, channels_last=st.booleans()), max_size=2),
    backend=st.none() | titles,
    model=st.none() | titles,
)


@given(plans)
@settings(max_examples=60)
def test_round_trip(plan: Plan) -> None:
    text = plan.to_yaml()
    again = Plan.from_yaml(text)
    assert again == plan
    assert list(again.sites) == list(plan.sites), "the order of patterns has a meaning"
    assert again.to_yaml() == text


@given(plans)
@settings(max_examples=15)
def test_what_is_written_keeps_to_the_schema(plan: Plan) -> None:
    jsonschema.validate(YAML(typ="safe", pure=True).load(plan.to_yaml()), json_schema())


def test_the_text_is_for_people() -> None:
    plan = Plan(
        model="tiny",
        backend="onnxruntime",
        sites={
            "*:input": SiteSpec(format=Format.parse("uint8/tensor/asym")),
            "conv1:weight": SiteSpec(
                format=Format.parse("int8/channel/sym"),
                observer="percentile",
                observer_options={"percentile": 99.9},
                guard="int16-pairs",
                why="first layer: outliers",
            ),
            "conv2:input": SiteSpec(share="conv1:output", why="the same tensor"),
        },
        fold={"bn1": "conv1", "bn2": FoldSpec(into="conv2", strategy=2), "bn3": FoldSpec(into="conv3", sync=True)},
        float={"softmax": "no integer rule"},
        devices={"t4": Device(sites={"conv1:weight": SiteSpec()}, why="slow int8 here")},
    )
    assert plan.to_yaml() == (
        "bitwright: 1\n"
        "model: tiny\n"
        "backend: onnxruntime\n"
        "sites:\n"
        "  '*:input': uint8/tensor/asym\n"
        "  conv1:weight:\n"
        "    format: int8/channel/sym\n"
        "    observer:\n"
        "      name: percentile\n"
        "      percentile: 99.9\n"
        "    guard: int16-pairs\n"
        "    why: 'first layer: outliers'\n"
        "  conv2:input:\n"
        "    share: conv1:output\n"
        "    why: the same tensor\n"
        "fold:\n"
        "  bn1: conv1\n"
        "  bn2:\n"
        "    into: conv2\n"
        "    strategy: 2\n"
        "  bn3:\n"
        "    into: conv3\n"
        "    sync: true\n"
        "float:\n"
        "  softmax: no integer rule\n"
        "devices:\n"
        "  t4:\n"
        "    sites:\n"
        "      conv1:weight: float\n"
        "    why: slow int8 here\n"
    )


def test_files(tmp_path: Path) -> None:
    plan = Plan(sites={"conv1:weight": SiteSpec(format=Format.parse("int8"), why="größer\nals")})
    path = plan.save(tmp_path / "deep" / "plan.yaml")
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).to_yaml() == path.read_text(encoding="utf-8")
    assert list(path.parent.iterdir()) == [path]


def test_comments_of_a_hand_edited_file_do_no_harm() -> None:
    plan = Plan.from_yaml("# mine\nbitwright: 1  # one\nsites:\n  # first\n  a:weight: int8 # short\n")
    assert str(plan.sites["a:weight"].format) == "int8/tensor/sym"


# -- wrong files ---------------------------------------------------------------------------------------------


def problems_of(text: str) -> list[Any]:
    with pytest.raises(BitwrightError) as caught:
        Plan.from_yaml(text, where="my.yaml")
    assert "my.yaml" in str(caught.value)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bitwright: 1\nsites: {a: b\n", 3),
        ("bitwright: 1\n  sites: x\n", 2),
        ("bitwright: 1\nsites:\n\t- x\n", 3),
        ("bitwright: 1\nsites:\n  a:input: int8\n  a:input: int4\n", 4),
        ("bitwright: 1\nmodel: a\nmodel: b\n", 3),
        ("bitwright: 1\nmodel: !!python/object:os.system x\n", 2),
    ],
)
def test_malformed_yaml_has_a_line(text: str, line: int) -> None:
    (problem,) = problems_of(text)
    assert problem.where.startswith(f"my.yaml:{line}:"), problem
    assert problem.code in ("invalid-yaml", "duplicate-key")
    assert problem.fix


def test_duplicate_keys_are_named() -> None:
    (problem,) = problems_of("bitwright: 1\nsites:\n  a:input: int8\n  a:input: int4\n")
    assert problem.code == "duplicate-key"
    assert "a:input" in problem.what


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b\n", "null"])
def test_not_a_mapping(text: str) -> None:
    (problem,) = problems_of(text)
    assert problem.code == "not-a-mapping"
    assert "bitwright: 1" in problem.fix


@pytest.mark.parametrize("version", ["2", "0", '"1"', "true", "null", "1.5", "[1]"])
def test_wrong_schema_version(version: str) -> None:
    (problem,) = problems_of(f"bitwright: {version}\nsites: {{}}\n")
    assert problem.code == "wrong-version"
    assert "version 1" in problem.fix


def test_no_schema_version() -> None:
    assert [problem.code for problem in problems_of("sites: {}\n")] == ["wrong-version"]


@pytest.mark.parametrize(
    ("text", "where", "near"),
    [
        ("bitwright: 1\nsite: {}\n", "site", "'sites'"),
        ("bitwright: 1\nsites: {a:input: {fromat: int8}}\n", "sites.a:input.fromat", "'format'"),
        ("bitwright: 1\ndevices: {t4: {site: {}}}\n", "devices.t4.site", "'sites'"),
        (
            "bitwright: 1\ndevices: {t4: {sites: {a:input: {shar: x}}}}\n",
            "devices.t4.sites.a:input.shar",
            "'share'",
        ),
    ],
)
def test_unknown_keys_give_the_nearest(text: str, where: str, near: str) -> None:
    (problem,) = problems_of(text)
    assert problem.where == where
    assert problem.code == "unknown-key"
    assert near in problem.fix


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("bitwright: 1\nsites: {a:input: 8}\n", "sites.a:input"),
        ("bitwright: 1\nsites: {a:input: [int8]}\n", "sites.a:input"),
        ("bitwright: 1\nsites: {a:input: {format: 8}}\n", "sites.a:input.format"),
        ("bitwright: 1\nsites: {a:input: {format: int8, observer: 5}}\n", "sites.a:input.observer"),
        ("bitwright: 1\nsites: {a:input: {format: int8, why: [x]}}\n", "sites.a:input.why"),
        ("bitwright: 1\nsites: []\n", "sites"),
        ("bitwright: 1\nfold: {a: 1}\n", "fold.a"),
        ("bitwright: 1\nfold: {a: [b]}\n", "fold.a"),
        ("bitwright: 1\nfold: {a: {into: 1}}\n", "fold.a.into"),
        ("bitwright: 1\nfold: {a: {strategy: 1}}\n", "fold.a.into"),
        ("bitwright: 1\nfold: {a: {into: b, strategy: two}}\n", "fold.a.strategy"),
        ("bitwright: 1\nfold: {a: {into: b, sync: 1}}\n", "fold.a.sync"),
        ("bitwright: 1\ndevices: {t4: 1}\n", "devices.t4"),
    ],
)
def test_wrong_types_are_one_problem_each(text: str, where: str) -> None:
    (problem,) = problems_of(text)
    assert problem.where == where
    assert problem.value is not None
    assert problem.fix


def test_an_unknown_folding_strategy_lists_the_known_ones() -> None:
    (problem,) = problems_of("bitwright: 1\nfold: {bn: {into: conv, strategy: 7}}\n")
    assert (problem.code, problem.value) == ("unknown-folding-strategy", 7)
    assert problem.fix is not None
    assert all(f"{number} (" in problem.fix for number in range(5))
    (problem,) = problems_of("bitwright: 1\nfold: {bn: {into: conv, strategy: -1}}\n")
    assert problem.fix == "remove bn from `fold`"
    (problem,) = problems_of("bitwright: 1\nfold: {bn: {into: conv, stratgy: 2}}\n")
    assert "strategy" in str(problem.fix)


def test_all_problems_of_a_file_at_once() -> None:
    text = (
        "bitwright: 1\n"
        "sites:\n"
        "  a:input: {why: no format}\n"
        "  b:input: imt8\n"
        "  c:input: {format: int8, observer: {percentile: 99}}\n"
        "  d:input: int8/tensor/sym\n"
        "devices:\n"
        "  t4: {sites: {e:input: int99}}\n"
    )
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text, where="my.yaml")
    found = {problem.where: problem for problem in caught.value.problems}
    assert list(found) == ["a:input", "b:input", "c:input", "devices.t4 e:input"]
    assert all(problem.fix for problem in found.values())
    assert found["b:input"].value == "imt8"
    assert "'int8'" in found["b:input"].fix


def test_all_wrong_types_at_once() -> None:
    found = problems_of("bitwright: 1\nmodle: x\nsites: {a:input: 8, b:input: {formt: x, share: 3}}\n")
    assert {problem.where for problem in found} == {
        "modle",
        "sites.a:input",
        "sites.b:input.formt",
        "sites.b:input.share",
    }


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda p: None, "unreadable-file"),
        (lambda p: p.mkdir(), "not-a-file"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), "not-utf8"),
    ],
)
def test_unreadable_files(tmp_path: Path, make: Any, code: str) -> None:
    path = tmp_path / "plan.yaml"
    make(path)
    with raises_problem(code, where=path) as caught:
        Plan.load(path)
    assert caught.value.problems[0].fix


# -- what the schema and the code accept ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {"bitwright": 1},
        {"bitwright": 1, "sites": {"a:input": "int8"}},
        {"bitwright": 1, "sites": {"a:input": {"format": "int8", "observer": {"name": "kl", "bins": 5}}}},
        {"bitwright": 1, "devices": {"t4": {"sites": {"*:weight": "float"}, "why": "slow"}}},
        {"bitwright": 1, "fold": {"bn": {"into": "conv", "strategy": 0}, "bn2": {"into": "x", "sync": True}}},
        {"bitwright": 1, "fold": {"bn": "conv"}, "float": {"x": "y"}, "model": None, "backend": "openvino"},
    ],
)
def test_valid_data(data: Any) -> None:
    jsonschema.validate(data, json_schema())
    Plan.from_yaml(json.dumps(data))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"bitwright": 2},
        {"bitwright": 1, "site": {}},
        {"bitwright": 1, "sites": []},
        {"bitwright": 1, "sites": {"a:input": 8}},
        {"bitwright": 1, "sites": {"a:input": {"fromat": "int8"}}},
        {"bitwright": 1, "devices": {"t4": {"foo": 1}}},
        {"bitwright": 1, "fold": {"bn": 1}},
        {"bitwright": 1, "fold": {"bn": {"into": "conv", "strategy": 5}}},
        {"bitwright": 1, "fold": {"bn": {"into": "conv", "strategy": -1}}},
        {"bitwright": 1, "fold": {"bn": {"into": "conv", "strategy": True}}},
        {"bitwright": 1, "fold": {"bn": {"into": "conv", "stratgy": 1}}},
        {"bitwright": 1, "fold": {"bn": {"strategy": 1}}},
    ],
)
def test_invalid_data(data: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, json_schema())
    with pytest.raises(BitwrightError):
        Plan.from_yaml(json.dumps(data))


def test_scales_of_kernels_are_written_where_they_arent_usual() -> None:
    text = "bitwright: 1\ncompute:\n  a: {format: int8, scales: tensor}\n  b: {format: int8, scales: row}\n"
    plan = Plan.from_yaml(text)
    assert [plan.compute[name].per_tensor for name in "ab"] == [True, False]
    assert plan.compute["b"] == ComputeSpec(format="int8")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "scales: tensor" in plan.to_yaml()
    assert "row" not in plan.to_yaml()
    with raises_problem("invalid-value", where="compute.a.scales"):
        Plan.from_yaml(text.replace("tensor", "column"))
    wrong = Plan(compute={"a": ComputeSpec(format="int8", scales="column")}).validate()
    assert [problem.code for problem in wrong] == ["unknown-scales"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("devices: {'': {}}", "devices"),
        ("devices: {'../x': {}}", "devices"),
        ("devices: {'..': {}}", "devices"),
        ("sites: {'': int8}", "sites"),
        ("devices: {fast: {sites: {' ': int8}}}", "devices.fast.sites"),
        ("compute: {'': int8}", "compute"),
        ("float: {'': no kernel}", "float"),
    ],
)
def test_names_that_can_not_be_names_are_refused(text: str, where: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(f"bitwright: 1\n{text}\n")
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [("invalid-name", where)]


def test_a_plan_in_python_has_the_same_names_as_a_file() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(sites={"": SiteSpec()}, devices={"../x": Device()}, model="")
    assert [(p.code, p.where) for p in caught.value.problems] == [
        ("invalid-name", where) for where in ("model", "sites", "devices")
    ]


@pytest.mark.parametrize("key", ["model", "backend"])
def test_an_empty_model_or_backend_is_refused(key: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(f"bitwright: 1\n{key}: ''\n")
    assert [problem.where for problem in caught.value.problems] == [key]


def test_problems_of_the_schema_hide_no_others() -> None:
    text = """
bitwright: 1
folds: {bn: conv}
sites:
  conv:weight: {format: int8/channel/sym, observr: mse}
  conv:input: int88
  head: int8/tensor/sym
  head:weight: {format: int8/channel/sym, observer: mss}
"""
    with pytest.raises(PlanError) as error:
        Plan.from_yaml(text)
    found = {problem.where: problem.code for problem in error.value.problems}
    assert found["folds"] == "unknown-key"
    assert found["sites.conv:weight.observr"] == "unknown-key"
    assert found["head:weight"] == "unknown-name"
    assert {"conv:input", "head"} <= found.keys()
