"""Patterns, devices, tied weights, problems, differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.core.errors import PlanError
from bitwright.core.formats import Format
from bitwright.graph import Graph, capture
from bitwright.plan import Device, FoldSpec, Plan, SiteSpec
from bitwright.plan.plan import matching

torch.set_num_threads(1)

INT8 = SiteSpec(format=Format.parse("int8/tensor/sym"), why="eight")
INT4 = SiteSpec(format=Format.parse("int4/tensor/sym"), why="four")
FLOAT = SiteSpec(why="float here")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 24, 3)
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.bn1(self.conv1(x)).relu())
        return self.head(y.mean((2, 3)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Net(), torch.randn(1, 3, 8, 8))


@pytest.fixture(scope="module")
def tied() -> Graph:
    return capture(Tied(), torch.tensor([[1, 2]]))


def formats(plan: Plan) -> dict[str, str]:
    return {name: str(spec.format) for name, spec in plan.sites.items()}


# -- patterns ------------------------------------------------------------------------------------------------


def test_a_pattern_becomes_its_sites_in_the_order_of_the_model(graph: Graph) -> None:
    plan = Plan(sites={"head:weight": INT8, "conv*:weight": INT8}).resolve(graph)
    assert list(plan.sites) == ["conv1:weight", "conv2:weight", "head:weight"]
    assert not plan.has_patterns
    assert plan.sites["conv2:weight"].why == "eight"


@pytest.mark.parametrize("order", [["conv1:weight", "*:weight"], ["*:weight", "conv1:weight"]])
def test_exact_beats_pattern(graph: Graph, order: list[str]) -> None:
    specs = {"conv1:weight": INT4, "*:weight": INT8}
    plan = Plan(sites={key: specs[key] for key in order}).resolve(graph)
    assert plan.sites["conv1:weight"] == INT4
    assert plan.sites["conv2:weight"] == INT8


def test_a_later_pattern_beats_an_earlier_one(graph: Graph) -> None:
    plan = Plan(sites={"*:weight": INT8, "conv?:weight": INT4, "*2:*": FLOAT}).resolve(graph)
    assert formats(plan)["conv1:weight"] == "int4/tensor/sym"
    assert plan.sites["conv2:weight"] == FLOAT
    assert formats(plan)["head:weight"] == "int8/tensor/sym"
    again = Plan(sites={"conv?:weight": INT4, "*:weight": INT8}).resolve(graph)
    assert formats(again)["conv1:weight"] == "int8/tensor/sym"


def test_resolving_twice_changes_nothing(graph: Graph) -> None:
    once = Plan(sites={"*:input": INT8, "head:*": FLOAT}).resolve(graph)
    assert once.resolve(graph) == once


def test_a_pattern_that_matches_nothing_is_an_error(graph: Graph) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(sites={"conw*:weight": INT8, "*:weight": INT8}).resolve(graph)
    (problem,) = caught.value.problems
    assert problem.code == "unknown-site"
    assert (problem.where, problem.value) == ("conw*:weight", "conw*:weight")
    assert "conv" in str(problem.fix)


def test_why_goes_with_every_site_of_a_pattern(graph: Graph) -> None:
    plan = Plan.from_yaml("bitwright: 1\nsites:\n  '*:weight': {format: int8, why: because}\n").resolve(graph)
    assert {spec.why for spec in plan.sites.values()} == {"because"}
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_site_may_share_with_one_that_a_pattern_made(graph: Graph) -> None:
    plan = Plan(sites={"*:output": INT8, "conv2:input": SiteSpec(share="/relu#0:output")})
    assert plan.validate(graph) == []
    assert plan.resolve(graph).sites["conv2:input"].share == "/relu#0:output"


def test_sharing_with_a_float_site_is_float(graph: Graph) -> None:
    plan = Plan(sites={"/relu#0:output": FLOAT, "conv2:input": SiteSpec(share="/relu#0:output")})
    assert dict(plan.resolve(graph).quantized) == {}


# -- tied weights --------------------------------------------------------------------------------------------


def test_a_pattern_gives_a_tied_weight_one_quantizer(tied: Graph) -> None:
    plan = Plan(sites={"*:weight": INT8}).resolve(tied)
    assert plan.sites["embed:weight"] == INT8
    assert plan.sites["body:weight"] == INT8
    assert plan.sites["head:weight"] == SiteSpec(share="embed:weight", why="eight")
    assert plan.resolve(tied) == plan


def test_the_first_quantized_use_owns_a_tied_weight(tied: Graph) -> None:
    for sites in ({"head:*": INT8}, {"*:weight": INT8, "embed:weight": FLOAT}, {"head:weight": INT8}):
        assert Plan(sites=sites).resolve(tied).sites["head:weight"] == INT8


def test_a_tied_weight_with_two_exact_formats_is_a_problem(tied: Graph) -> None:
    (problem,) = Plan(sites={"embed:weight": INT8, "head:weight": INT4}).validate(tied)
    assert problem.where == "head:weight"
    assert problem.code == "tied-weight"
    assert problem.value == "int4/tensor/sym"
    assert "embed:weight" in str(problem.fix)
    # the fix is right
    fixed = Plan(sites={"embed:weight": INT8, "head:weight": SiteSpec(share="embed:weight")})
    assert fixed.validate(tied) == []
    other_way = Plan(sites={"embed:weight": SiteSpec(share="head:weight"), "head:weight": INT8})
    assert other_way.validate(tied) == []


# -- devices -------------------------------------------------------------------------------------------------


def two_devices(common: dict[str, SiteSpec], own: dict[str, SiteSpec]) -> Plan:
    return Plan(sites=common, devices={"t4": Device(sites=own, why="slow"), "v100": Device()})


@pytest.mark.parametrize(
    ("common", "own", "expected"),
    [
        ({"*:weight": INT8}, {"head:weight": FLOAT}, "int8 int8 float"),
        ({"conv1:weight": INT8, "conv2:weight": INT8}, {"conv*:weight": INT4}, "int4 int4 -"),
        ({"*:weight": INT8, "conv*:weight": INT4}, {"*:weight": FLOAT}, "float float float"),
        ({"*:weight": INT8}, {"conv*:weight": FLOAT, "conv1:weight": INT4}, "int4 float int8"),
    ],
)
def test_a_devices_own_sites_come_first(graph: Graph, common: Any, own: Any, expected: str) -> None:
    plan = two_devices(common, own)
    for t4 in (plan.for_device("t4").resolve(graph), plan.resolve(graph).for_device("t4")):
        found = [t4.sites.get(f"{name}:weight") for name in ("conv1", "conv2", "head")]
        assert " ".join(spec.format.name if spec else "-" for spec in found) == expected
        assert t4.devices == {}
    assert plan.resolve(graph).for_device("v100").sites == Plan(sites=common).resolve(graph).sites


def test_a_device_may_share_a_common_site(graph: Graph) -> None:
    plan = two_devices({"/relu#0:output": INT8}, {"conv2:input": SiteSpec(share="/relu#0:output")})
    assert plan.resolve(graph).for_device("t4").sites["conv2:input"].share == "/relu#0:output"


def test_a_device_may_change_the_owner_of_a_tied_weight(tied: Graph) -> None:
    plan = two_devices({"*:weight": INT8}, {"embed:weight": FLOAT})
    for t4 in (plan.for_device("t4").resolve(tied), plan.resolve(tied).for_device("t4")):
        assert t4.sites["embed:weight"] == FLOAT
        assert t4.sites["head:weight"] == INT8


def test_an_unknown_device() -> None:
    with pytest.raises(PlanError) as caught:
        two_devices({}, {}).for_device("t5")
    assert "'t4'" in str(caught.value.problems[0].fix)
    assert caught.value.problems[0].value == "t5"


def test_problems_of_devices_say_which(graph: Graph) -> None:
    problems = two_devices({"*:weight": INT8}, {"conv9:weight": INT8, "convX*": INT8}).validate(graph)
    assert [problem.where for problem in problems] == ["devices.t4 conv9:weight", "devices.t4 convX*"]


# -- problems ------------------------------------------------------------------------------------------------


def spec(**changes: Any) -> SiteSpec:
    return SiteSpec(**{"format": Format.parse("int8"), **changes})


WRONG: list[tuple[str, SiteSpec, Any, str]] = [
    ("conv1:input", spec(observer="min-max"), "min-max", "'minmax'"),
    ("conv1:weight", spec(quantizer="plane"), "plane", "'plain'"),
    ("conv2:weight", spec(guard="int16-pair"), "int16-pair", "'int16-pairs'"),
    ("conv2:input", spec(format=Format.parse("fp8e4m3")), "fp8e4m3", "integer"),
    ("conv2:output", spec(share="conv1:inputt"), "conv1:inputt", "'conv1:input'"),
    (
        "bn1:output",
        spec(observer="percentile", observer_options={"percentil": 9}),
        {"percentil": 9},
        "option",
    ),
    (
        "bn1:input",
        spec(observer="percentile", observer_options={"percentile": 9}),
        {"percentile": 9},
        "option",
    ),
    ("head:output", spec(quantizer="plain", quantizer_options={"bitz": 9}), {"bitz": 9}, "option"),
    ("not a site", spec(), "not a site", "module.path:port"),
]
WRONG_FOR_A_MODEL: list[tuple[str, SiteSpec, Any, str]] = [
    ("conv7:weight", spec(), "conv7:weight", "conv"),
    ("conv1:wieght", spec(), "conv1:wieght", "'conv1:weight'"),
    ("x*:weight", spec(), "x*:weight", "weight"),
    ("head:weight", spec(format=Format.parse("int4/group7/sym")), "int4/group7/sym", "channel"),
    ("bn1:weight", spec(format=Format.parse("int8/channel/sym")), "int8/channel/sym", "tensor"),
]


@pytest.mark.parametrize(("site", "entry", "value", "fix"), WRONG)
def test_what_can_be_seen_without_the_model(site: str, entry: SiteSpec, value: Any, fix: str) -> None:
    (problem,) = Plan(sites={"conv1:input": INT8, site: entry}).validate()
    assert (problem.where, problem.value) == (site, value)
    assert fix in str(problem.fix)


@pytest.mark.parametrize(("site", "entry", "value", "fix"), WRONG_FOR_A_MODEL)
def test_what_only_the_model_shows(graph: Graph, site: str, entry: SiteSpec, value: Any, fix: str) -> None:
    plan = Plan(sites={site: entry})
    assert plan.validate() == []
    (problem,) = plan.validate(graph)
    assert (problem.where, problem.value) == (site, value)
    assert fix in str(problem.fix)


def test_all_problems_at_once(graph: Graph) -> None:
    wrong = [*WRONG, *WRONG_FOR_A_MODEL]
    plan = Plan(
        sites={site: entry for site, entry, _, _ in wrong},
        devices={"t4": Device(sites={site: entry for site, entry, _, _ in wrong})},
        backend="onnxruntim",
        fold={"bn1": "conv2", "bn9": "conv1"},
        float={"softmax": "why not"},
    )
    problems = plan.validate(graph)
    places = [str(problem.where) for problem in problems]
    assert set(places) == {
        "backend",
        "fold",
        "float",
        *(site for site, *_ in wrong),
        *(f"devices.t4 {site}" for site, *_ in wrong),
    }
    assert places.count("fold") == 2
    for problem in problems:
        assert problem.what
        assert problem.value is not None
        assert problem.fix
    with pytest.raises(PlanError) as caught:
        plan.resolve(graph)
    assert caught.value.problems == problems
    assert all(place in str(caught.value) for place in places)


@pytest.mark.parametrize(
    ("group", "ok"), [("int8/group8/sym", True), ("int8/group24/sym", True), ("int8/group16/sym", False)]
)
def test_groups_divide_the_reduction_axis(graph: Graph, group: str, ok: bool) -> None:
    assert (Plan(sites={"head:weight": spec(format=Format.parse(group))}).validate(graph) == []) is ok


def test_an_entry_that_is_overridden_everywhere_is_not_blamed(graph: Graph) -> None:
    grouped = spec(format=Format.parse("int8/group24/sym"))  # conv1 has 3 input channels, conv2 has 8
    plan = Plan(sites={"*:weight": grouped, "conv*:weight": INT8, "bn1:weight": FLOAT})
    assert plan.validate(graph) == []


def test_a_folded_norm(graph: Graph) -> None:
    assert Plan(fold={"bn1": "conv1"}).validate(graph) == []
    (problem,) = Plan(fold={"head": "conv2"}).validate(graph)
    assert problem.value == "head: conv2"
    # folding gives conv1 a bias that its module doesn't have
    bias = {"conv1:bias": spec(format=Format.parse("int32/channel/sym"))}
    assert Plan(sites=bias, fold={"bn1": "conv1"}).validate(graph) == []
    assert list(Plan(sites=bias, fold={"bn1": "conv1"}).resolve(graph).sites) == ["conv1:bias"]
    assert Plan(sites=bias).validate(graph) != []


def test_how_a_norm_is_folded(graph: Graph) -> None:
    plan = Plan(fold={"bn1": FoldSpec(into="conv1", strategy=2, sync=True)})
    assert plan.validate(graph) == []
    assert plan.resolve(graph) == plan
    assert Plan(fold={"bn1": FoldSpec(into="conv1")}) == Plan(fold={"bn1": "conv1"})
    assert Plan(fold={"bn1": "conv1"}).folds == {"bn1": FoldSpec(into="conv1", strategy=4)}
    wrong = {"bn1": FoldSpec(into="conv1", strategy=-1), "bn2": FoldSpec(into="conv2", strategy=1, sync=True)}
    unknown, nothing = Plan(fold=wrong).validate()
    assert (unknown.where, unknown.value) == ("fold.bn1", -1)
    assert "4 (folded for rounding" in str(unknown.fix)
    assert (nothing.where, nothing.code) == ("fold.bn2", "fold-without-statistics")


def test_a_backend_may_be_a_file_of_the_users_own() -> None:
    assert Plan(backend="mine.yaml").validate() == []
    assert [problem.where for problem in Plan(backend="mine").validate()] == ["backend"]


def test_a_good_plan_has_no_problems(graph: Graph) -> None:
    plan = Plan(sites={"*:weight": INT8, "*:input": INT8, "head:weight": INT4}, backend="academic")
    assert plan.validate() == []
    assert plan.validate(graph) == []


# -- differences ---------------------------------------------------------------------------------------------


def test_diff_of_folds() -> None:
    before = Plan(fold={"a": "conv", "b": FoldSpec(into="conv2", strategy=1)})
    after = Plan(fold={"a": FoldSpec(into="conv", strategy=2, sync=True), "b": "conv2"})
    assert [str(change) for change in before.diff(after)] == [
        "~ fold a: conv → conv, strategy=2, sync",
        "~ fold b: conv2, strategy=1 → conv2",
    ]
    assert before.diff(before) == []


def test_diff() -> None:
    before = Plan(
        model="a",
        sites={"a:weight": INT8, "b:weight": INT8, "c:weight": INT8},
        float={"x": "y"},
        devices={"t4": Device(sites={"a:weight": INT4}, why="old"), "gone": Device()},
    )
    after = Plan(
        model="a",
        backend="openvino",
        sites={"a:weight": INT8, "b:weight": INT4, "d:weight": SiteSpec(share="a:weight")},
        fold={"bn": "conv"},
        float={"x": "z"},
        devices={"t4": Device(sites={"a:weight": FLOAT}, why="new")},
    )
    changes = before.diff(after)
    assert [str(change) for change in changes] == [
        "+ backend: openvino",
        "+ fold bn: conv",
        "~ float x: y → z",
        "~ b:weight: int8/tensor/sym, why=eight → int4/tensor/sym, why=four",
        "- c:weight: int8/tensor/sym, why=eight",
        "+ d:weight: share=a:weight",
        "~ devices t4: why=old → why=new",
        "~ devices.t4 a:weight: int4/tensor/sym, why=four → float, why=float here",
        "- devices gone: present",
    ]
    assert (changes[3].where, changes[3].before) == ("b:weight", "int8/tensor/sym, why=eight")
    assert before.diff(before) == []
    # the way back has the same places
    assert sorted(c.where for c in after.diff(before)) == sorted(c.where for c in changes)


def test_with_sites_leaves_the_old_plan() -> None:
    plan = Plan(sites={"a:weight": INT8})
    changed = plan.with_sites({"a:weight": INT4, "b:weight": INT8})
    assert plan.sites == {"a:weight": INT8}
    assert list(changed.sites) == ["a:weight", "b:weight"]
    assert [change.where for change in plan.diff(changed)] == ["a:weight", "b:weight"]


def test_a_name_that_looks_like_a_pattern_is_a_name() -> None:
    assert matching("block[0]*:weight", ["block[0]*:weight", "block0x:weight"]) == ["block[0]*:weight"]
    assert matching("block[0]*", ["block[1]", "block0x"]) == ["block0x"]
