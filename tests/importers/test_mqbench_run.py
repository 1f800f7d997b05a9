"""Files of MQBench's zoo run: the record of the run has the settings of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from bitwright import GridConfig, TrainConfig, load_workload, run_grid
from bitwright.backends import backend
from bitwright.bench.grid_row import plan_of
from bitwright.cli import app
from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError
from bitwright.core.registry import NETWORKS
from bitwright.graph import capture
from bitwright.importers.mqbench import read_mqbench, train_mqbench
from bitwright.importers.mqbench.zoo_workload import zoo_network, zoo_workload

CONFIG = """\
model: {type: tiny-images, kwargs: {num_classes: 4, bn: {use_sync_bn: false, kwargs: {}}}}
dist: {sync: true}
qparams: {w_method: lsq, a_method: lsq, bit: 4}
backend: fbgemm
bnfold: 2
optimizer:
  type: SGD
  kwargs: {nesterov: true, momentum: 0.9, weight_decay: 0.0001}
  pconfig: {bn_b: {weight_decay: 0.0}, bn_w: {weight_decay: 0.0}}
lr_scheduler: {type: Cosine, kwargs: {base_lr: 0.0001, warmup_lr: 0.004, warmup_steps: 3, max_iter: 4, min_lr: 0.0}}
label_smooth: 0.1
ema: {enable: false}
data:
  type: imagenet
  read_from: mc
  batch_size: 4
  num_workers: 0
  input_size: 32
  test_resize: 36
  train:
    {root_dir: train, meta_file: train.txt, sampler: {type: distributed_iteration}, transforms: {type: STANDARD}}
  test:
    root_dir: val
    meta_file: val.txt
    transforms: {type: ONECROP}
    evaluator: {type: imagenet, kwargs: {topk: [1, 2]}}
saver: {print_freq: 1, val_freq: 3, pretrain: {path: ckpt.pth.tar}}
"""


class Tiny(nn.Module):
    """A network that trains in milliseconds, with the arguments of the zoo's."""

    def __init__(self, *, classes: int, dropout: float = 0.0, norm: Any = nn.BatchNorm2d, image_size: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 4, bias=False), norm(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, bias=False), norm(8)
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        logits: torch.Tensor = self.fc(self.dropout(x.mean((2, 3))))
        return logits


@pytest.fixture(autouse=True)
def tiny_network() -> Iterator[None]:
    NETWORKS.register("tiny-images", Tiny)
    yield
    NETWORKS.unregister("tiny-images")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file with its images: eight for training, four for the test, with lists."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 4)):
        lines = []
        for number in range(count):
            place = tmp_path / part / f"c{number % 4}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(place / f"{number}.png")
            lines.append(f"c{number % 4}/{number}.png {number % 4}\n")
        (tmp_path / f"{part}.txt").write_text("".join(lines))
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def network_of(text: str) -> nn.Module:
    return zoo_network(read_mqbench(parse_yaml(text, where="a"), where="a").config)


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_a_file_with_its_own_images_trains_with_its_settings(folder: Path) -> None:
    result = train_mqbench(folder / "config.yaml", out=folder / "run")
    lines = history(folder / "run")
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx([0.0001, 0.00205, 0.004, 0.0])
    measured = [(line["step"], line["metrics"].keys()) for line in lines if "metrics" in line]
    assert measured == [(3, {"top1", "top2", "n"}), (4, {"top1", "top2", "n"})]
    assert result.metrics[0]["n"] == 4
    notes = " ".join(result.notes)
    assert "starts untrained (ckpt.pth.tar of saver.pretrain doesn't exist)" in notes
    record = json.loads((folder / "run" / "result.json").read_text())
    assert record["config"]["recipe"]["groups"].keys() == {"bn_b", "bn_w"}
    assert record["config"]["label_smoothing"] == 0.1
    assert record["config"]["seed"] == 1000
    assert result.quantized is not None
    assert {fold.strategy for fold in result.quantized.plan.folds.values()} == {2}
    assert result.quantized.plan.sites["conv1:weight"].format.bits == 8
    assert result.quantized.plan.sites["conv2:weight"].format.bits == 4


def test_grid_and_train_have_the_same_result(folder: Path) -> None:
    text = CONFIG.replace("max_iter: 4", "max_iter: 2").replace("fbgemm", "academic")
    (folder / "config.yaml").write_text(text)
    trained = train_mqbench(folder / "config.yaml")
    assert trained.quantized is not None
    config = GridConfig.load(folder / "config.yaml")
    (task,) = config.tasks()
    assert task.training.config(seed=1000).recipe == config.training.recipe
    board = run_grid(config)
    (row,) = board.rows
    assert (row.status, row.reason) == ("done", None)
    assert row.accuracy == trained.metrics[-1]["top1"]
    assert row.config["training"]["recipe"]["optimizer"]["nesterov"]


def test_the_command_takes_the_file_and_a_folder(folder: Path) -> None:
    torch.save({"state_dict": {f"module.{k}": v for k, v in network_of(CONFIG).state_dict().items()}}, folder / "w.pth")
    options = ["--data", folder, "--iterations", "1", "--checkpoint", folder / "w.pth", "--no-tensorboard", "-o"]
    arguments = ["train", "--config", folder / "config.yaml", *options, folder / "run"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    record = json.loads((folder / "run" / "result.json").read_text())
    assert record["steps"] == 1
    notes = " ".join(record["notes"])
    assert "1 iterations instead of max_iter (the file has 4): the run ends within the warm-up" in notes
    assert "w.pth" in notes
    assert record["init"].endswith("w.pth")
    wrong = CliRunner().invoke(app, [*map(str, arguments), "--lr", "0.5"])
    assert wrong.exit_code == 2
    assert "the file has this setting" in wrong.output
    wrong = CliRunner().invoke(app, ["train", "digits", "--data", str(folder), "-o", str(folder / "other")])
    assert wrong.exit_code == 2


def test_the_files_checkpoint_is_continued(folder: Path) -> None:
    weights = {name: value for name, value in network_of(CONFIG).state_dict().items() if "num_batches" not in name}
    weights["conv2.weight"] = torch.full_like(weights["conv2.weight"], 0.25)
    weights["fc.bias"] = torch.full_like(weights["fc.bias"], 9.0)
    torch.save({"model": weights}, folder / "ckpt.pth.tar")
    text = CONFIG.replace("path: ckpt.pth.tar", "path: ckpt.pth.tar, ignore: {key: {}, model: [fc.bias]}")
    (folder / "config.yaml").write_text(text)
    model: Any = load_workload(f"{folder}/config.yaml").model
    assert (model.conv2.weight == 0.25).all()
    assert not (model.fc.bias == 9).any()
    torch.save({"model": {"conv1.weight": torch.zeros(1)}}, folder / "ckpt.pth.tar")
    with pytest.raises(BitwrightError) as caught:
        load_workload(f"{folder}/config.yaml")
    assert "missing-tensor" in caught.value.codes


def test_unusable_images_are_reported_together(folder: Path) -> None:
    (folder / "config.yaml").write_text(CONFIG.replace("root_dir: train", "root_dir: /nowhere"))
    (folder / "val.txt").write_text("c0/0.png 4\n")
    with pytest.raises(BitwrightError) as caught:
        load_workload(f"{folder}/config.yaml")
    found = {(problem.where, problem.code) for problem in caught.value.problems}
    assert found == {("data.train", "no-data"), ("labels of test", "label-too-large")}


def test_a_folder_with_classes_only_serves_both_parts(folder: Path) -> None:
    workload = load_workload(f"{folder / 'config.yaml'}:{folder / 'train'}")
    assert workload.training is not None
    assert workload.evaluation is not None
    assert len(workload.training()) == sum(len(labels) for _, labels in workload.evaluation()) == 8


def test_files_of_the_toolkit_do_not_train(folder: Path) -> None:
    (folder / "toolkit.yaml").write_text("model: {type: resnet18}\ndata: {path: /d}\nprocess: {seed: 1}\n")
    with pytest.raises(BitwrightError) as caught:
        train_mqbench(folder / "toolkit.yaml")
    assert caught.value.codes == ["not-a-zoo-file"]
    with pytest.raises(BitwrightError) as caught:
        train_mqbench(folder / "config.yaml", config=TrainConfig(epochs=3, workers=1))
    assert [(p.where, p.code) for p in caught.value.problems] == [("epochs", "ignored-argument")]


def test_norms_have_the_files_options(monkeypatch: pytest.MonkeyPatch) -> None:
    text = CONFIG.replace("kwargs: {}}}}", "kwargs: {momentum: 0.2, eps: 0.01}}, dropout: 0.5}}")
    network: Any = network_of(text)
    assert (network.bn1.momentum, network.bn1.eps, network.dropout.p) == (0.2, 0.01, 0.5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = CONFIG.replace("use_sync_bn: false", "use_sync_bn: true")
    norms = [one for one in network_of(text).modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 2
    assert all(isinstance(one, nn.SyncBatchNorm) for one in norms)
    with pytest.raises(BitwrightError) as caught:
        network_of(text.replace("kwargs: {}", "kwargs: {group_size: 3}"))
    assert caught.value.codes == ["cannot-run"]


def zoo_files(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "peers" / "mqbench" / "zoo").glob("*.yaml"))


BACKENDS = ("academic", "acl", "fbgemm", "snpe", "tensorrt", "tvm", "tflitemicro", "bnfold_ablation")


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_every_method_and_bit_width_has_a_plan(folder: Path, backend_name: str) -> None:
    network = Tiny(classes=4, image_size=32)
    graph = capture(network, torch.zeros(1, 3, 32, 32))
    for method in ("lsq", "qil", "dsq", "dorefa", "pact", "apot"):
        for bits in (2, 3, 4, 8):
            text = CONFIG.replace(
                "w_method: lsq, a_method: lsq, bit: 4", f"w_method: {method}, a_method: {method}, bit: {bits}"
            )
            (folder / "config.yaml").write_text(text.replace("fbgemm", backend_name))
            (task,) = GridConfig.load(folder / "config.yaml").tasks()
            table = backend(task.backend)
            plan, _ = plan_of(task, table, graph, "tiny")
            spec = plan.sites["conv2:weight"]
            assert (spec.quantizer, spec.format.bits) == ("dorefa" if method == "pact" else method, bits)


@pytest.mark.parametrize("sampler", ["distributed_iteration", "distributed_epoch", "distributed"])
@pytest.mark.parametrize("transforms", ["STANDARD", "LINEAR", "ONECROP"])
def test_every_sampler_and_transform_reads_the_images(folder: Path, sampler: str, transforms: str) -> None:
    text = CONFIG.replace("{type: distributed_iteration}", f"{{type: {sampler}}}").replace(
        "type: STANDARD", f"type: {transforms}"
    )
    (folder / "config.yaml").write_text(text)
    (task,) = GridConfig.load(folder / "config.yaml").tasks()
    assert task.training.recipe is not None
    assert task.training.recipe.sampler == ("iterations" if sampler == "distributed_iteration" else "epochs")
    workload = zoo_workload(read_mqbench(parse_yaml(text, where="a"), where="a").config, folder=folder)
    assert workload.training is not None
    pixels, label = workload.training()[0]
    assert (pixels.shape, label) == ((3, 32, 32), 0)


@cache
def traits(file: Path) -> frozenset[tuple[str, str]]:
    """What a file covers. Parsing 100 files takes half a minute, so the keys are searched as text."""
    text = file.read_text()
    kinds = dict(
        zip(("model", "optimizer"), re.findall(r"^(?:model|optimizer):\s+type: *(\w+)", text, re.M), strict=True)
    )
    found = {
        (key, re.findall(rf"^ *{key}: *(\S+)", text, re.M)[0]) for key in ("backend", "w_method", "a_method", "bit")
    }
    if ("backend", "bnfold_ablation") in found:
        found |= set(re.findall(r"^(bnfold): *(\S+)", text, re.M))
    return frozenset(found | set(kinds.items()))


def chosen(files: list[Path], count: int) -> list[Path]:
    """Files that cover all traits of all files, and at least `count`."""
    left = set().union(*map(traits, files))
    found: list[Path] = []
    while left or len(found) < count:
        best = max((file for file in files if file not in found), key=lambda file: len(traits(file) & left))
        found.append(best)
        left -= traits(best)
    return found


COUNT = 14


@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT))
def test_published_files_run(data_dir: Path, tmp_path: Path, number: int) -> None:
    files = zoo_files(data_dir)
    picked = chosen(files, COUNT)
    assert len(picked) == COUNT
    file = picked[number]
    text = file.read_text()
    data: Any = parse_yaml(text, where=file.name)
    for key, value in (("input_size", 64), ("test_resize", 72), ("batch_size", 4), ("print_freq", 1), ("val_freq", 2)):
        place = data["saver"] if key in data["saver"] else data["data"]
        text = text.replace(f"{key}: {place[key]}", f"{key}: {value}")
    (tmp_path / "config.yaml").write_text(text)
    images = sorted((data_dir / "imagenet-val" / "images").glob("*.jpg"))[:6]
    for part in ("train", "val"):
        listing = "".join(f"{image} {int(image.stem.rpartition('_')[2])}\n" for image in images)
        (tmp_path / f"{part}.txt").write_text(listing)
    run = tmp_path / "run"
    result = train_mqbench(tmp_path / "config.yaml", data=tmp_path, iterations=3, out=run)
    record, own = json.loads((run / "result.json").read_text()), data["lr_scheduler"]["kwargs"]
    recipe, settings = record["config"]["recipe"], data["optimizer"]
    assert (record["steps"], record["config"]["seed"], record["config"]["batch"]) == (3, data.get("seed", 1000), 4)
    assert record["config"]["label_smoothing"] == data["label_smooth"]
    assert record["config"]["ema"] is None
    assert recipe["optimizer"]["name"] == settings["type"]
    assert {k: v for k, v in recipe["optimizer"].items() if k != "name" and v is not None} == settings["kwargs"]
    groups = {kind: one["weight_decay"] for kind, one in recipe["groups"].items()}
    assert groups == {kind: one["weight_decay"] for kind, one in (settings.get("pconfig") or {}).items()}
    rise = (own["warmup_lr"] - own["base_lr"]) / (own["warmup_steps"] - 1) if own.get("warmup_steps") else 0.0
    lines = history(run)
    if rise:
        assert [line["lr"] for line in lines if "lr" in line] == pytest.approx(
            [own["base_lr"] + rise * i for i in range(3)]
        )
    assert [line["step"] for line in lines if "metrics" in line] == [2, 3]
    assert all(line["loss"] > 0 for line in lines if "loss" in line)
    assert result.quantized is not None
    plan = result.quantized.plan
    assert plan.backend == {"bnfold_ablation": "academic_fold"}.get(data["backend"], data["backend"])
    folds = {fold.strategy for fold in plan.folds.values()}
    unfolded = data["backend"] == "academic" or data.get("bnfold", 1) == -1
    assert folds == (set() if unfolded else {data.get("bnfold", 1)})
    wanted = "dorefa" if data["qparams"]["w_method"] == "pact" else data["qparams"]["w_method"]
    weights = [spec for site, spec in plan.sites.items() if site.endswith(":weight")]
    assert {spec.quantizer for spec in weights} == {wanted}
    bits = [spec.format.bits for spec in weights]
    assert (bits[0], bits[-1], set(bits[1:-1])) == (8, 8, {data["qparams"]["bit"]})


@pytest.mark.realdata
@pytest.mark.slow
def test_all_published_files_become_valid_rows(data_dir: Path, tmp_path: Path) -> None:
    files = zoo_files(data_dir)
    assert len(files) > 100
    for file in files:
        (task,) = GridConfig.load(file, data=tmp_path).tasks()
        assert task.model.name in NETWORKS
        assert task.training.recipe is not None
        data: Any = parse_yaml(file.read_text(), where=file.name)
        assert task.training.recipe.iterations == data["lr_scheduler"]["kwargs"]["max_iter"]
