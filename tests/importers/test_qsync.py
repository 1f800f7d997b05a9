"""QSync's .npy mappers become plans, and no byte of them is run."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, randn
from typer.testing import CliRunner

import bitwright as bw
from bitwright.cli import app
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.graph import capture
from bitwright.importers.qsync import load_mapper, load_npy, plan_of_mapper, read_pickle, summarize_mapper
from bitwright.plan import Plan


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4))


GRAPH = capture(net(), randn(1, 3, 6, 6))


def saved(path: Path, value: Any) -> Path:
    np.save(path, value, allow_pickle=True)
    return path


def test_a_mapper_becomes_a_plan(tmp_path: Path) -> None:
    graph = capture(net(), randn(1, 3, 6, 6))
    path = saved(tmp_path / "a.npy", {"0": 8, "module.2": np.int64(16), "linear_0": 32})
    plan = plan_of_mapper(load_mapper(path), graph)
    assert {name: spec.format for name, spec in plan.compute.items()} == {"0": "int8", "2": "fp16", "4": "float"}
    assert plan.compute["2"].why == "module.2: 16 bits in QSync's mapper"
    section = plan_of_mapper({"conv_1": 8}, graph, kind="t4")
    assert section.devices["t4"].compute["2"].format == "int8"


def test_all_that_does_not_fit_is_told_at_once() -> None:
    graph = capture(net(), randn(1, 3, 6, 6))
    with pytest.raises(PlanError) as error:
        plan_of_mapper({"fc9": 8, "conv_7": 8, "0": 4}, graph)
    assert [problem.value for problem in error.value.problems] == ["fc9", "conv_7", 4]


class Block(nn.Module):
    """Defines its layers in another order than it runs them, and one that it doesn't run."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.positions = nn.Embedding(4, 8)
        self.kinds = nn.Embedding(2, 8)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4)
        total: Tensor = self.tokens(x) + self.kinds(torch.zeros_like(x)) + self.positions(places)
        return self.last(self.first(self.norm(total)))


MIXED = {"embedding_1": 16, "embedding_2": 8, "layernorm_0": 8, "linear_0": 8, "linear_1": 16, "linear_2": 8}


def test_numbers_count_modules_in_the_order_of_definition(caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    plan = plan_of_mapper(MIXED, capture(model, torch.zeros(1, 4, dtype=torch.int64)), model=model)
    formats = {name: spec.format for name, spec in plan.compute.items()}
    assert formats == {"positions": "fp16", "kinds": "fp16", "norm": "fp16", "last": "fp16", "first": "int8"}
    assert plan.compute["kinds"].why == "embedding_2: 8 bits in QSync's mapper"
    assert plan.compute["norm"].why == "layernorm_0: 8 bits in QSync's mapper"
    assert "linear_0" in caplog.text  # the model doesn't run it


def test_the_order_of_parameters_replaces_that_of_modules() -> None:
    plan = plan_of_mapper({"embedding_1": 16, "linear_0": 8}, capture(Block(), torch.zeros(1, 4, dtype=torch.int64)))
    assert {name: spec.format for name, spec in plan.compute.items()} == {"positions": "fp16", "last": "int8"}


def test_excluded_modules_are_not_counted() -> None:
    model = Block()
    graph = capture(model, torch.zeros(1, 4, dtype=torch.int64))
    plan = plan_of_mapper({"linear_0": 8}, graph, model=model, exclude=["unused", "la*"])
    assert list(plan.compute) == ["first"]


def test_excluded_patterns_must_match() -> None:
    with pytest.raises(PlanError) as error:
        plan_of_mapper({"conv_0": 8}, GRAPH, exclude=["classifier*"])
    assert [(problem.where, problem.value) for problem in error.value.problems] == [("exclude", "classifier*")]


@pytest.mark.parametrize(
    ("key", "code", "hint"),
    [
        ("conv_2", "unknown-name", "conv_0 to conv_1"),
        ("layernorm_0", "unknown-name", "2 conv2d"),
        ("lienar_0", "unknown-kind", "linear"),
        ("lstm_3", "unknown-kind", "2 conv2d"),
        ("layers.9", "unknown-name", "known"),
        ("", "unknown-name", "known"),
        ("linear_²", "unknown-name", "known"),
    ],
)
def test_a_key_without_a_layer_is_told_with_the_nearest_ones(key: str, code: str, hint: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_of_mapper({key: 8}, GRAPH, model=net())
    (problem,) = error.value.problems
    assert (problem.code, problem.value) == (code, key)
    assert hint in str(problem.fix)


def test_two_spellings_of_one_layer_must_agree() -> None:
    assert list(plan_of_mapper({"conv_0": 8, "conv2d_0": 8}, GRAPH).compute) == ["0"]
    with pytest.raises(PlanError) as error:
        plan_of_mapper({"conv_0": 8, "conv2d_0": 16}, GRAPH)
    assert error.value.codes == ["ambiguous-name"]


@pytest.mark.parametrize(
    "value",
    [
        {"conv_0": np.int64(8), "linear_0": np.float32(16)},
        {np.str_("conv_0"): np.array(8), "linear_0": np.array([16])},
        OrderedDict(conv_0=8, linear_0=16),
        defaultdict(int, conv_0=8, linear_0=16),
        Counter(conv_0=8, linear_0=16),
        {"conv_0": "8", "linear_0": 16.0},
    ],
)
@pytest.mark.parametrize("how", ["object", "list", "pickle"])
def test_files_that_hold_a_mapper_in_other_ways(tmp_path: Path, value: Any, how: str) -> None:
    path = tmp_path / "a.npy"
    if how == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        saved(path, np.array(value if how == "object" else [value], dtype=object))
    assert load_mapper(path) == {"conv_0": 8, "linear_0": 16}


def test_a_table_of_keys_and_bits_is_a_mapper(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.array([["conv_0", 8], ["linear_0", 16]], dtype=object))
    assert load_mapper(path) == {"conv_0": 8, "linear_0": 16}


class Activations(nn.Module):
    """Calls a function before a module of the same kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        return self.pool(self.relu(y) + self.relu(-y))


def test_modules_without_parameters_are_counted_before_functions() -> None:
    model, x = Activations(), randn(2, 3, 8, 8)
    graph = capture(model, x)
    plan = plan_of_mapper({"relu_0": 8, "maxpool2d_0": 16, "relu_1": 32}, graph, model=model)
    formats = {name: spec.format for name, spec in plan.compute.items()}
    assert formats == {"relu": "fp16", "relu#1": "fp16", "pool": "fp16", "/relu#0": "float"}
    with torch.no_grad():
        expected = model(x)
        bw.prepare(model, plan, inputs=x)
        found = model(x)
    assert not torch.equal(found, expected)
    assert torch.allclose(found, expected, atol=1e-2)


def test_both_spellings_are_the_same_layer() -> None:
    for name in ("conv", "conv2d"):
        assert list(plan_of_mapper({f"{name}_1": 8}, GRAPH).compute) == ["2"]


def test_a_summary_counts_what_runs_in_which_precision() -> None:
    summary = summarize_mapper({**MIXED, "conv_0": 19, "features.0": 8})
    assert summary.counts == {
        8: {"linear": 2, "module": 1},
        16: {"embedding": 2, "layer_norm": 1, "linear": 1},
        32: {"conv2d": 1},
    }
    assert summary.raised == ("embedding_2", "layernorm_0")
    assert summary.to_dict()["counts"]["32"] == {"conv2d": 1}
    assert "8 bit: 2 linear" in str(summary)
    with pytest.raises(PlanError) as error:
        summarize_mapper({"conv_0": 7})
    assert error.value.codes == ["invalid-value"]


@pytest.mark.realdata
def test_published_mappers_fit_models_with_their_layers(data_dir: Path) -> None:
    """Each mapper numbers its layers from 0 without gaps, so a model with as many layers takes it."""
    files = sorted((data_dir / "peers" / "qsync").glob("*.npy"))
    if not files:
        pytest.skip("no published mappers")
    mappers = list(map(load_mapper, files))
    assert all({8, 16} & set(mapper.values()) for mapper in mappers)
    for mapper in mappers:
        model = _Layers(Counter(key.rpartition("_")[0] for key in mapper))
        graph = capture(model, torch.zeros(1, 1, dtype=torch.int64))
        plan = plan_of_mapper(mapper, graph, model=model)
        assert len(plan.compute) == len(mapper)
        counts = summarize_mapper(mapper).counts
        assert sum(sum(kinds.values()) for kinds in counts.values()) == len(mapper)
        low = Counter(spec.format for spec in plan.compute.values())
        assert low["int8"] == sum(counts.get(8, {}).values())


class _Layers(nn.Module):
    """As many layers of each kind as a mapper has."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(2, 4) for _ in range(counts["embedding"]))
        self.convolutions = nn.ModuleList(nn.Conv2d(1, 1, 1) for _ in range(counts["conv"] + counts["conv2d"]))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(counts["layernorm"]))
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(counts["linear"]))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float().expand(1, 4)
        for embedding in self.embeddings:
            y = y + embedding(x)[:, 0]
        for layer in [*self.norms, *self.linears]:
            y = layer(y)
        for layer in self.convolutions:
            y = layer(y.view(1, 1, 2, 2)).view(1, 4)
        return y


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(values, st.integers(0, 4))
@settings(max_examples=80)
def test_data_is_read_as_pickle_would(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "test") == value


@given(values, st.data())
@settings(max_examples=80)
def test_frames_change_nothing(value: Any, draw: st.DataObject) -> None:
    """pickletools ignores frames. In wrong ones, the unpickler would execute opcodes that nothing has verified."""
    data = pickle.dumps(value, 3)
    starts = [start for _, _, start in pickletools.genops(data) if start is not None]
    for start in sorted(draw.draw(st.sets(st.sampled_from(starts))), reverse=True):
        length = draw.draw(st.integers(0, len(data)))
        data = data[:start] + b"\x95" + length.to_bytes(8, "little") + data[start:]
    assert read_pickle(data, "test") == value


@given(st.dictionaries(st.text(), st.integers(0, 32)))
@settings(max_examples=20)
def test_numpys_object_files_are_read(tmp_path_factory: pytest.TempPathFactory, value: dict[str, int]) -> None:
    path = saved(tmp_path_factory.mktemp("npy") / "a.npy", {k: np.int32(v) for k, v in value.items()})
    assert load_npy(path) == value


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_functions_are_not_called(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"a": Evil(tmp_path / "hacked")}, protocol)
    with pytest.raises(BitwrightError) as error:
        read_pickle(data, "a.npy")
    assert error.value.codes == ["unsafe-pickle"]
    assert error.value.problems[0].value in ("posix.mkdir", "nt.mkdir")
    assert not (tmp_path / "hacked").exists()


_SCALAR = b"cnumpy._core.multiarray\nscalar\n"
HOSTILE = {
    "os.system": b"cos\nsystem\n(S'true'\ntR.",
    "eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "eval, stack": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "getattr": b"cbuiltins\ngetattr\n.",
    "numpy.load": b"cnumpy\nload\n.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.",
    "instance": b"(S'x'\nios\nsystem\n.",
    "new object": b"\x80\x02cnumpy\ndtype\n)\x81.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"Pabc\n.",
    "byte array": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.",
    "memo index": b"\x80\x02K\x01r\xff\xff\xff\xff.",
    "memo of nested tuples": b"\x80\x02}" + b")" + b"".join(b"\x85q%ch%c\x86" % (n, n) for n in range(60)) + b"K\x01s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.npy"
    np.save(path, {"a": 1}, allow_pickle=True)
    header = path.read_bytes().partition(b"\n")[0] + b"\n"
    path.write_bytes(header + HOSTILE[name])
    with pytest.raises(BitwrightError) as error:
        load_npy(path)
    assert error.value.codes in (["unsafe-pickle"], ["damaged-file"])


def test_the_state_of_a_function_cannot_be_set() -> None:
    with pytest.raises(pickle.UnpicklingError, match="state of a function"):
        read_pickle(_SCALAR + b"(NI1\ntb.", "a.npy")


@pytest.mark.parametrize("dtype", ["O", "V8", "c16", "M8[s]"])
def test_scalars_of_other_types_are_refused(dtype: str) -> None:
    text = dtype.encode()
    data = _SCALAR + b"(cnumpy\ndtype\n(S'" + text + b"'\nI0\nI1\ntRc_codecs\nencode\n(S'12345678'\ntRtR."
    with pytest.raises(pickle.UnpicklingError, match="scalar of type"):
        read_pickle(data, "a.npy")


def test_truncated_files_are_one_error(tmp_path: Path) -> None:
    raw = saved(tmp_path / "whole.npy", {"linear_0": np.int64(8)}).read_bytes()
    path = tmp_path / "a.npy"
    assert len(raw) > 100
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(BitwrightError):
            load_npy(path)


def test_a_file_that_is_no_npy_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"nothing")
    with pytest.raises(BitwrightError) as error:
        load_mapper(tmp_path / "a.npy")
    assert error.value.codes == ["damaged-file"]
    with pytest.raises(BitwrightError) as error:
        load_mapper(saved(tmp_path / "b.npy", np.zeros(3)))
    assert error.value.codes == ["invalid-value"]


def test_bits_that_are_no_number_are_told(tmp_path: Path) -> None:
    graph = capture(net(), randn(1, 3, 6, 6))
    path = saved(tmp_path / "a.npy", {"0": float("nan"), "2": float("inf"), "4": [8]})
    with pytest.raises(PlanError) as error:
        plan_of_mapper(load_mapper(path), graph)
    assert [problem.where for problem in error.value.problems] == ["mapper.0", "mapper.2", "mapper.4"]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3), st.integers(0, 400))
@settings(max_examples=400, deadline=None)
def test_damaged_files_are_one_error_that_names_them(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.npy"
    raw = bytearray(saved(path, {"linear_0": 8, "x": [1, (2, 3)], "n": np.int64(3)}).read_bytes())
    for place, value in changes:
        raw[place % len(raw)] = value
    path.write_bytes(bytes(raw[: len(raw) - cut if cut < 40 else None]))
    told = ""
    try:
        plan_of_mapper(load_mapper(path), GRAPH)
    except PlanError:
        return  # it could be read, and is another one
    except BitwrightError as error:
        told = str(error)
    assert not told or str(path) in told


def test_the_command_line_takes_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", {"conv_1": 8, "linear_0": 8})
    target = tmp_path / "plan.yaml"
    done = CliRunner().invoke(app, ["plan", "digits-untrained", "--mapper", str(path), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert sum(spec.is_low_precision for spec in Plan.load(target).compute.values()) == 2
    assert "8 bit: 1 conv2d, 1 linear" in done.output
    command = ["plan", "digits-untrained", "--mapper", str(path), "-o", str(target)]
    done = CliRunner().invoke(app, [*command, "--keep-float", "head"])
    assert done.exit_code != 0
    assert "linear_0" in done.output
    assert CliRunner().invoke(app, [*command, "--weights", "int4/channel/sym"]).exit_code != 0
