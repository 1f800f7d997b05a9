"""Files that nobody should have written: each is one clear error, in little time and few words."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leaderboards import made_up
from pydantic import BaseModel
from records import EVIL, record
from torch import nn

import bitwright
from bitwright.backends.table import load_table
from bitwright.bench import GridConfig, Leaderboard
from bitwright.cluster import Cluster
from bitwright.core.documents import (
    gunzip,
    name_problem,
    parse_json,
    parse_yaml,
    read_npz,
    read_picture,
    read_tensors,
    read_text,
    read_yaml,
)
from bitwright.core.errors import BitwrightError, FormatError
from bitwright.core.formats import Format
from bitwright.core.task_store import is_address, message_without_secrets, open_study
from bitwright.deployment import export, open_runtime, read_artefact
from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
from bitwright.importers.qsync import plan_of_mapper
from bitwright.importers.trace_events import read_trace
from bitwright.plan import Plan
from bitwright.profiling import DeviceProfile, StepGraph
from bitwright.reports import write_markdown
from bitwright.reports.leaderboard import leaderboard_markdown
from bitwright.sensitivity import OperatorScores
from bitwright.tuning.config import TuneConfig
from bitwright.workload.datasets import Dataset
from bitwright.workload.metrics import make_evaluate

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_READERS = {
    "plan": Plan.load,
    "cluster": Cluster.load,
    "table": load_table,
    "grid": GridConfig.load,
    "search": TuneConfig.load,
}


def refused(call: Any, *arguments: Any, **options: Any) -> BitwrightError:
    """The error of a call that must be ours, short, and soon there."""
    begin = time.process_time()
    with pytest.raises(BitwrightError) as caught:
        call(*arguments, **options)
    assert time.process_time() - begin < 2
    assert len(str(caught.value)) < 20_000
    return caught.value


@pytest.mark.parametrize("reader", YAML_READERS)
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (LAUGHS, "document-limit"),
        ("a: &a [*a]", "invalid-yaml"),
        ("a: 2026-13-99", "invalid-yaml"),
        ("[" * 10_000, "document-limit"),
        ("a: " + "9" * 401, "invalid-yaml"),
        ("1: x\nb: y", "invalid-yaml"),
        ('a: "\\ud800"', "invalid-text"),
        ("a: 1\na: 2", "duplicate-key"),
    ],
)
def test_yaml_is_limited_in_every_reader(tmp_path: Path, reader: str, text: str, code: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert refused(YAML_READERS[reader], path).codes == [code]


def test_invalid_utf8_and_large_values_are_short_errors(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"bitwright: 1\nmodel: \xff\n")
    assert refused(Plan.load, path).codes == ["not-utf8"]
    path.write_text("bitwright: 1\nsites: {a: [" + "x, " * 100_000 + "x]}")
    assert len(str(refused_slowly(path))) < 2000


def refused_slowly(path: Path) -> BitwrightError:
    """A large document takes as long as it is large; its error is short."""
    with pytest.raises(BitwrightError) as caught:
        Plan.load(path)
    return caught.value


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[" * 100_000, "document-limit"),
        ('{"a": 1, "a": 2}', "invalid-json"),
        ("1" + "0" * 400, "invalid-json"),
        ("[1e999]", "not-finite"),
        ("[NaN]", "not-finite"),
        ('["\\ud800"]', "invalid-text"),
        ("[" * 100 + "]" * 100, "document-limit"),
    ],
)
def test_json_is_limited(text: str, code: str) -> None:
    assert refused(parse_json, text, where="file").codes == [code]
    assert refused(OperatorScores.from_json, text).codes == [code]
    assert refused(DeviceProfile.from_json, text).codes == [code]
    assert refused(StepGraph.from_json, text).codes == [code]


def test_good_documents_are_read() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: [1.5, null, yes]}", where="file") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": [1.5, None, "yes"]},
    }
    assert parse_json('{"a": [1, 2.5, "ü", null]}', where="file") == {"a": [1, 2.5, "ü", None]}


def test_yaml_bombs_are_not_expanded(tmp_path: Path) -> None:
    bomb = gzip.compress(b" " * (20 << 20), 9) * 50  # a gigabyte
    assert refused(gunzip, bomb, where="file", most=2 << 30).codes == ["file-too-large"]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(bomb)
    assert refused(read_trace, path).codes == ["file-too-large"]
    path.write_bytes(bytes((1 << 20) + 1))
    assert refused(read_text, path, most=1 << 20).codes == ["file-too-large"]


@pytest.mark.parametrize("event", [{"ph": "X", "cat": "cpu_op", "name": "x"}, {"ph": "X", "cat": "kernel", "dur": "x"}])
def test_events_of_a_trace_must_be_whole(tmp_path: Path, event: dict[str, Any]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event]}))
    error = refused(read_trace, path)
    assert error.codes == ["invalid-value"]
    assert "event 0" in str(error.problems[0].where)


@pytest.mark.parametrize("value", ["-0.5", "1e300", "1e999"])
def test_invalid_sensitivity_values_are_rejected(value: str) -> None:
    text = '{"bitwright-operator-scores": 1, "indicator": "x", "samples": 1, "values": {"a": {"int8": VALUE}}}'
    error = refused(OperatorScores.from_json, text.replace("VALUE", value))
    assert error.codes in (["invalid-value"], ["not-finite"])


def test_out_of_range_numbers_in_clusters_and_profiles_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"bitwright_cluster: 1\nlink: {{gbit_per_s: 1.0e300}}\ndevices: {{a: {{count: {2**63}}}}}\n")
    assert {problem.where for problem in refused(Cluster.load, path).problems} == {"link.gbit_per_s", "devices.a.count"}
    cost = {"operator": "x", "format": "float32", "forward": {"seconds": 1e300}}
    text = json.dumps({"bitwright_profile": 1, "device": "x", "operators": [cost]})
    assert "operators.0.forward.seconds" in str(refused(DeviceProfile.from_json, text).problems[0].where)


def test_data_is_not_divided_by_zero() -> None:
    with pytest.raises(ValueError, match="std"):
        Dataset(npz=Path("x.npz"), mean=(0.5,), std=(0.0,))


LPOT = "model: {name: x}\nevaluation: {accuracy: {dataloader: {dataset: DATASET}}}\ntuning: {accuracy_criterion: C}\n"


@pytest.mark.parametrize(
    ("dataset", "criterion", "where"),
    [
        ("{ImageFolder: {}}", "{relative: 0.01}", "evaluation.accuracy.dataloader.dataset.ImageFolder.root"),
        ("{dummy: {shape: [1]}}", "{relative: abc}", "tuning.accuracy_criterion.relative"),
        ("{dummy: {shape: [1]}}", "{relative: -1%}", "tuning.accuracy_criterion.relative"),
    ],
)
def test_lpot_values_are_checked(tmp_path: Path, dataset: str, criterion: str, where: str) -> None:
    path = tmp_path / "lpot.yaml"
    path.write_text(LPOT.replace("DATASET", dataset).replace("C}", f"{criterion}}}"))
    assert where in [problem.where for problem in refused(TuneConfig.load, path).problems]


def test_superscript_digits_are_not_layer_numbers() -> None:
    graph = bitwright.capture(nn.Sequential(nn.Conv2d(1, 1, 1)), torch.zeros(1, 1, 2, 2))
    assert refused(plan_of_mapper, {"conv2d_²": 8}, graph).problems[0].value == "conv2d_²"


def test_a_leaderboard_that_contradicts_itself(tmp_path: Path) -> None:
    path = made_up(("lsq", "pact"), ("academic",)).save(tmp_path / "board.json")
    Leaderboard.load(path)
    data = json.loads(path.read_text())
    data["rows"][0]["algorithm"] = "tqt"
    path.write_text(json.dumps(data))
    assert set(refused(Leaderboard.load, path).codes) == {"contradiction"}


@pytest.mark.parametrize(
    "aliases", ["[]", '{"a": "b", "b": "a"}', '{"a": 1}', '{"0.weight": "0.weight"}', "[" * 10_000]
)
def test_tied_names_of_a_checkpoint(tmp_path: Path, aliases: str) -> None:
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(2, 2))
    path = save_checkpoint(model, tmp_path / "model.safetensors")
    load_checkpoint(model, path)
    save_file(dict(model.state_dict()), path, metadata={"bitwright": "1", "aliases": aliases})
    assert refused(load_checkpoint, model, path).codes[0] in ("damaged-checkpoint", "document-limit")


@pytest.mark.parametrize("name", ["../../escaped", "a/b", "..", ".hidden", "x\x00", "", "x" * 300, "a\\b", "-rf"])
def test_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    assert name_problem(name) is not None
    grid = {"algorithms": ["lsq"], "backends": ["academic"], "bits": [8]}
    for where, data in (
        ("name", {**grid, "name": name, "models": ["digits"]}),
        ("models.0.name", {**grid, "models": [{"workload": "digits", "name": name}]}),
    ):
        if name or where == "name":
            error = refused(GridConfig.parse, data, where="grid", folder=tmp_path)
            assert where in [problem.where for problem in error.problems]


@pytest.mark.parametrize("name", ["grid", "residual 20", "ResNet-18_v1.5", "größe"])
def test_ordinary_names(name: str) -> None:
    assert name_problem(name) is None


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, inputs = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    path = tmp_path_factory.mktemp("artefact") / "model.onnx"
    export(bitwright.quantize(model, [inputs]).model, path, inputs)
    return path


@pytest.mark.parametrize("location", ["../../etc/passwd", "/etc/passwd", "..\\x", "", "link"])
def test_weights_outside_the_folder_are_not_read(artefact: Path, tmp_path: Path, location: str) -> None:
    import onnx

    (tmp_path / "link").symlink_to("/etc/passwd")
    model = onnx.load(artefact)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for read in (read_artefact, lambda file: open_runtime("onnxruntime", file)):
        assert set(refused(read, path).codes) <= {"outside-folder", "damaged-artefact"}


def test_an_onnx_file_without_nodes(artefact: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(artefact)
    del model.graph.node[:]
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for name in ("onnxruntime", "reference"):
        assert refused(open_runtime, name, path).codes == ["empty-artefact"]


def test_arrays_and_pictures(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, a=np.zeros(10**8, np.uint8), b=np.array([{}], dtype=object), c=np.arange(3, dtype=">i4"))
    assert refused(read_npz, path, ["a"]).codes == ["damaged-file"]
    assert refused(read_npz, path, ["b"]).codes == ["damaged-file"]
    assert refused(read_npz, path, ["x"]).codes == ["missing-array"]
    assert read_npz(path, ["c"])[0].tolist() == [0, 1, 2]
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    assert refused(read_picture, tmp_path / "x.png").codes == ["damaged-file"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("postgresql://u:hunter2@host:port/db", "invalid-store"),
        ("postgresql://u:hunter2@[::1/db", "invalid-store"),
        ("://hunter2@x", "invalid-store"),
        ("nosuch://u:hunter2@host/db", "store-unreachable"),
        ("postgresql://127.0.0.1:1/db?password=hunter2", "store-unreachable"),
        ("postgresql://u:hunter2@127.0.0.1:1/db?sslpassword=hunter2", "store-unreachable"),
        ("postgresql://u:hunter%32@127.0.0.1:1/db?Pwd=hunter2&x=1", "store-unreachable"),
    ],
)
def test_store_passwords_are_not_printed(url: str, code: str) -> None:
    import traceback

    with pytest.raises(BitwrightError) as caught:
        open_study(url, "x", {}, resume=False, kind=Any, gave_up=lambda _: None)  # type: ignore[arg-type]
    assert caught.value.codes == [code]
    assert "hunter" not in "".join(traceback.format_exception(caught.value))


def test_markdown_has_no_markup_of_names(tmp_path: Path) -> None:
    for text in (write_markdown(record(EVIL), tmp_path / "r.md").read_text(), leaderboard_markdown(made_up(evil=EVIL))):
        assert "<script" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text


@pytest.mark.parametrize("change", [{"dims": [7]}, {"dims": [2**62]}, {"data_type": 0}, {"data_type": 11}])
def test_tensors_of_an_onnx_file_that_are_not_whole(artefact: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    import onnx

    model = onnx.load(artefact)
    tensor = model.graph.initializer[0]
    tensor.dims.extend(change.get("dims", []))
    tensor.data_type = change.get("data_type", tensor.data_type)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert set(refused(read_artefact, path).codes) == {"damaged-artefact"}


def test_mapper_sizes_are_checked_before_allocation(tmp_path: Path) -> None:
    from bitwright.importers.qsync import load_npy

    path = tmp_path / "mapper.npy"
    np.save(path, np.zeros(3))
    path.write_bytes(path.read_bytes().replace(b"(3,)", b"(9" + b"9" * 11 + b",)").replace(b" " * 11 + b"\n", b"\n"))
    error = refused(load_npy, path)
    assert not isinstance(error.__cause__, MemoryError)


def test_a_graph_whose_parameter_has_no_name() -> None:
    graph = bitwright.capture(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2))
    data = json.loads(graph.to_json())
    data["parameters"][0]["names"] = []
    assert refused(type(graph).from_json, json.dumps(data)).problems[0].where == "parameters.0"


READERS: dict[str, Callable[[Path], Any]] = {
    "plan": Plan.load,
    "arrays": lambda path: read_npz(path, ["a"]),
    "picture": read_picture,
    "tensors": lambda path: read_tensors(path, fix="give another"),
    "ONNX": read_artefact,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_pipes_and_devices_are_rejected_without_blocking(tmp_path: Path, reader: str, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert set(refused(READERS[reader], path).codes) == {"not-a-file"}


def test_a_pipe_with_a_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("w") as file:
            for part in ("a: [1,", " 2]\n"):
                file.write(part)
                file.flush()
                time.sleep(0.1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert read_yaml(path, what="the file") == {"a": [1, 2]}
    finally:
        thread.join()


def test_the_mark_of_the_best_checkpoint_is_text(tmp_path: Path) -> None:
    from bitwright.training.checkpoints import Checkpoints

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").write_bytes(b"\xff\xfe")
    assert refused(Checkpoints(tmp_path).best).codes == ["not-utf8"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("postgresql://u:hun@ter2hunter2@127.0.0.1:1/db", "store-unreachable"),
        ("postgresql://u:hunter2?x@127.0.0.1:1/db", "store-unreachable"),
        ("postgresql://127.0.0.1:1/db?password=a@hunter2", "store-unreachable"),
        ("postgresql://127.0.0.1:1/db?password=x'hunter2", "store-unreachable"),
        ("postgresql://127.0.0.1:1/db?options=-c%20x%3Dhunter2", "store-unreachable"),
        ("postgresql://u:p@127.0.0.1:1/db?password=a&amp;hunter2", "store-unreachable"),
        ("postgresql:u:hunter2@host/db", "invalid-store"),
        ("postgresql//u:hunter2@host/db", "invalid-store"),
        ("u:hunter2@host/db", "invalid-store"),
        ("sqlite:///file:x?mode=memory&uri=true", "invalid-store"),
        ("/dev/null", "invalid-store"),
        (".", "is-a-folder"),
    ],
)
def test_unusual_addresses_of_stores(url: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import traceback

    monkeypatch.chdir(tmp_path)
    with pytest.raises(BitwrightError) as caught:
        open_study(url, "x", {}, resume=False, kind=Any, gave_up=lambda _: None)  # type: ignore[arg-type]
    assert caught.value.codes == [code]
    assert "hunter" not in "".join(traceback.format_exception(caught.value))
    assert list(tmp_path.iterdir()) == []


def test_a_short_password_does_not_garble_the_message() -> None:
    words = message_without_secrets("(psycopg.Error) password p is wrong", "postgresql://u:p@host/db")
    assert words == "(psycopg.Error) password … is wrong"


def test_file_names_that_resemble_store_addresses() -> None:
    assert not any(map(is_address, ("out//study.db", "/tmp//x.db", "a@b.db", "C:\\x.db", "sql.db", "./mysql.db")))


@pytest.mark.parametrize("address", ["postgresql:u:hunter2@host/db", "postgresql://u:hunter2@host/db"])
def test_an_address_in_a_file_is_not_a_path(tmp_path: Path, address: str) -> None:
    (tmp_path / "tune.yaml").write_text(f"bitwright-tune: 1\nmodel: digits\nstore: '{address}'\n")
    assert TuneConfig.load(tmp_path / "tune.yaml").store == address


@pytest.mark.parametrize(
    "change",
    [
        "update study_user_attributes set value_json = '[1, {}]'",
        "update trial_user_attributes set value_json = '{'",
        """update trial_user_attributes set value_json = '{"objective": "x"}' where key = 'outcome'""",
        "update trials set state = 'UNKNOWN'",
    ],
)
def test_a_damaged_study_is_a_clear_error(tmp_path: Path, change: str) -> None:
    class Outcome(BaseModel):
        objective: float

    class Task:
        key = "a"

        def to_json(self) -> dict[str, Any]:
            return {}

    def use(*, resume: bool) -> None:
        study = open_study(
            tmp_path / "study.db", "x", {"a": 1}, resume=resume, kind=Outcome, gave_up=lambda _: Outcome(objective=0)
        )
        try:
            study.keep("name", 1)
            if study.known(Task()) is None:
                claim = study.claim(Task())
                assert claim is not None
                study.finish(claim, Outcome(objective=1.0))
            study.spent()
        finally:
            study.close()

    use(resume=False)
    use(resume=True)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute(change)
    connection.close()
    refused(use, resume=True)


def test_markdown_has_no_control_characters(tmp_path: Path) -> None:
    name = "a\x1b[31mb\x9b0m\u202ec"
    for text in (
        write_markdown(record(name).model_copy(update={"created": "<script>"}), tmp_path / "r.md").read_text(),
        leaderboard_markdown(made_up(evil=name)),
    ):
        assert not set("\x1b\x9b\u202e") & set(text)
        assert "<script" not in text


@pytest.mark.parametrize("line", ["name: ''", "model: ' '", "store: ''", "keep_float: ['']"])
def test_settings_of_a_search_are_not_empty(tmp_path: Path, line: str) -> None:
    (tmp_path / "tune.yaml").write_text(f"bitwright-tune: 1\nworkload: digits\n{line}\n")
    assert refused(TuneConfig.load, tmp_path / "tune.yaml").codes == ["invalid-value"]


@pytest.mark.parametrize("name", ["''", "../x", "'a\\b'"])
def test_names_of_devices(name: str) -> None:
    error = refused(Cluster.from_yaml, f"bitwright_cluster: 1\ndevices: {{{name}: {{count: 1}}}}\n")
    assert error.codes == ["invalid-name"]


@pytest.mark.parametrize("format", ["int8/group" + "9" * 5000, "int" + "8" * 5000, "int8/group99999999999999/sym"])
def test_formats_with_long_numbers(format: str) -> None:
    assert type(refused(Format.parse, format)) is FormatError


@pytest.mark.parametrize("options", [{"k": 0}, {"k": -1}, {"k": True}, {"k": 1.5}, {"nonsense": 1}])
def test_options_of_a_metric_are_checked_at_once(options: dict[str, Any]) -> None:
    assert "topk" in str(refused(make_evaluate, {"topk": options}, list))


def test_topk_of_more_classes_than_there_are() -> None:
    evaluate = make_evaluate({"topk": {"k": 2**63}}, lambda: [(torch.zeros(2, 3), torch.zeros(2))])
    assert "smaller k" in str(refused(evaluate, lambda x: x))
