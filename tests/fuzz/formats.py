"""Every format that Bitwright reads: how a valid file is made (with our own functions) and how it is read."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # records and leaderboards of the tests
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "blendcnn_mrpc"))

from mrpc import read_pairs

import bitwright
from bitwright.backends.table import backend, load_table
from bitwright.bench import GridConfig, Leaderboard
from bitwright.cluster import Cluster, Predictor
from bitwright.core.files import file_fingerprint
from bitwright.core.registry import ARTEFACTS, RUNTIMES
from bitwright.deployment import export, open_runtime, read_artefact
from bitwright.deployment.artefacts.base import Sidecar, StoredGrid, TensorGrid, read_sidecar
from bitwright.deployment.checkpoint import load_checkpoint, save_checkpoint
from bitwright.graph import Graph, capture
from bitwright.importers.qsync import load_mapper, plan_of_mapper
from bitwright.importers.trace import import_trace
from bitwright.plan import Plan
from bitwright.profiling import DeviceProfile, StepGraph, record_step
from bitwright.profiling.device_profile import CollectiveCost, Host, OperatorCost, OperatorTime, TensorsCost
from bitwright.profiling.sample_store import SampleStore
from bitwright.quantizers import prepare
from bitwright.reports import read_json, write_html, write_json, write_markdown
from bitwright.reports.leaderboard import leaderboard_markdown, write_leaderboard_page
from bitwright.reports.sections import training_record
from bitwright.sensitivity import OperatorScores
from bitwright.training.callbacks import History
from bitwright.training.checkpoints import STATE, Checkpoints, TrainerState
from bitwright.tuning.config import TuneConfig
from bitwright.workload.datasets import Dataset
from bitwright.zoo import data as zoo_data

SAVED = "checkpoints/step-00000004"
TENSORS = ("sgd/loop", "sgd/foreach", "zero_grad", "accumulate", "clip")


@dataclass(frozen=True)
class Format:
    """One format. `mutated` are the files of the folder that may be changed."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    mutated: tuple[str, ...]


def model() -> nn.Module:
    """A small network with a norm and a tied weight."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3)
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5))


class Tied(nn.Module):
    """Two names for one weight: a checkpoint stores it once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        y: torch.Tensor = self.second(self.first(x))
        return y


def inputs() -> torch.Tensor:
    """One batch."""
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def _graph() -> Graph:
    return capture(model(), inputs())


def _step() -> StepGraph:
    return record_step(model(), (inputs(), torch.zeros(2, dtype=torch.int64)), F.cross_entropy)


def _profile() -> DeviceProfile:
    step = _step()
    cost = OperatorTime(seconds=1e-4, low=9e-5, high=1.1e-4, repetitions=9)
    return DeviceProfile(
        bitwright_profile=1,
        device="made up",
        operators=[
            OperatorCost(operator=call.key(), format="float32", forward=cost, backward=cost)
            for call in (*(op.call for op in step.ops), step.loss)
        ],
        tensors=[TensorsCost(name=name, per_element=1e-9, per_tensor=1e-6) for name in TENSORS],
        collectives=[CollectiveCost(operation="all_reduce", backend="gloo", world=2, latency=1e-4, per_byte=1e-9)],
        host=Host(gap=1e-6, step=1e-5),
    )


# plans and what planners read


def _make_plan(folder: Path) -> None:
    plan = bitwright.make_plan(_graph(), "onnxruntime", model="small")
    text = plan.to_yaml() + "compute:\n  '*': {format: int8, backward: [input], stochastic: true}\n"
    text += "devices:\n  t4: {batch: 4, sites: {}, compute: {'4': bf16}, why: small}\n"
    (folder / "plan.yaml").write_text(text)


def _read_plan(folder: Path) -> None:
    plan = Plan.load(folder / "plan.yaml")
    plan.validate(_graph())
    Plan.load(plan.save(folder / "again.yaml"))


def _make_cluster(folder: Path) -> None:
    text = "bitwright_cluster: 1\nlink: {latency_us: 50, gbit_per_s: 10}\nmemory_reserve: 0.1\nbackend: gloo\n"
    text += "devices:\n  a: {profile: profile.json, count: 2, memory_gb: 4}\n  b: {profile: profile.json, count: 1}\n"
    (folder / "cluster.yaml").write_text(text)
    _profile().save(folder / "profile.json")


def _read_cluster(folder: Path) -> None:
    cluster = Cluster.load(folder / "cluster.yaml")
    profiles = cluster.profiles(folder)
    for name, profile in profiles.items():
        cluster.memory_limit(name, profile)
    if cluster.world <= 8:
        Predictor.make(_step(), Plan(), profiles, cluster).predict()


def _make_step(folder: Path) -> None:
    _step().save(folder / "step.json")


def _read_step(folder: Path) -> None:
    step = StepGraph.load(folder / "step.json")
    Predictor.make(step, Plan(), {"device": _profile()}).predict()


def _make_graph(folder: Path) -> None:
    (folder / "graph.json").write_text(_graph().to_json())


def _read_graph(folder: Path) -> None:
    graph = Graph.from_json((folder / "graph.json").read_text(encoding="utf-8", errors="replace"))
    bitwright.make_plan(graph, "onnxruntime")


def _make_scores(folder: Path) -> None:
    values = {op.name: {"float": 0.0, "int8": 0.5} for op in _graph().ops}
    OperatorScores(indicator="gradient-variance", values=values, samples=4, seconds=1.0).save(folder / "scores.json")


def _read_scores(folder: Path) -> None:
    found = OperatorScores.load(folder / "scores.json")
    found.sorted("int8")
    found.to_json()


def _make_mapper(folder: Path) -> None:
    np.save(folder / "mapper.npy", np.array({"conv2d_0": 8, "linear_0": np.int64(16)}, dtype=object))


def _read_mapper(folder: Path) -> None:
    plan_of_mapper(load_mapper(folder / "mapper.npy"), _graph())


def _make_table(folder: Path) -> None:
    from bitwright.core.files import yaml_text

    data = backend("tensorrt").model_dump(mode="json", by_alias=True)
    (folder / "table.yaml").write_text(yaml_text(data))


def _read_table(folder: Path) -> None:
    bitwright.make_plan(_graph(), load_table(folder / "table.yaml"))


# searches and grids


def _make_tune(folder: Path) -> None:
    (folder / "tune.yaml").write_text(
        "bitwright-tune: 1\nmodel: net.py:small\nname: search\ngoal: {drop: 1%, size: 2 MB, objective: size}\n"
        "budget: {minutes: 1, trials: 3}\nmetric: {topk: {k: 1}}\nseed: 1\nsamples: 8\nstore: study.db\n"
        "space: {weights: [int8/channel/sym], observer: [minmax, kl], samples: [8], steps: [[], [bias-correction]]}\n"
        "calibration: {npz: data.npz, batch_size: 4, mean: [0.5], std: [0.2]}\n"
        "evaluation: {random: [4, 3, 6, 6], batch_size: 2}\nmeasuring: {runs: 3}\nkeep_float: ['0']\n"
    )
    _make_npz(folder)


def _read_tune(folder: Path) -> None:
    config = TuneConfig.load(folder / "tune.yaml")
    for data in (config.calibration, config.evaluation):
        if data is not None:
            next(iter(data.labelled()), None)


def _make_lpot(folder: Path) -> None:
    (folder / "lpot.yaml").write_text(
        "model: {name: resnet, framework: pytorch}\n"
        "quantization:\n  approach: post_training_static_quant\n"
        "  calibration:\n    sampling_size: 50, 100\n    dataloader:\n      batch_size: 4\n"
        "      dataset: {dummy: {shape: [8, 3, 6, 6]}}\n"
        "      transform: {Resize: {size: 8}, CenterCrop: {size: 6}, Normalize: {mean: [0.5], std: [0.2]}}\n"
        "  model_wise: {weight: {granularity: per_channel, bit: 7.0}, activation: {algorithm: minmax}}\n"
        "  op_wise: {'conv.*': {activation: {dtype: fp32}}}\n"
        "evaluation: {accuracy: {metric: {topk: 1}, dataloader: {dataset: {ImageFolder: {root: pictures}}}},\n"
        "  performance: {warmup: 1, iteration: 3}}\n"
        "tuning:\n  strategy: {name: bayesian}\n  accuracy_criterion: {relative: 0.01}\n"
        "  multi_objectives: {objective: [performance, modelsize], weight: [0.5, 0.5]}\n"
        "  exit_policy: {timeout: 0, max_trials: 4}\n  random_seed: 9527\n  workspace: {path: out}\n"
    )


def _read_lpot(folder: Path) -> None:
    TuneConfig.load(folder / "lpot.yaml")


def _make_grid(folder: Path) -> None:
    (folder / "grid.yaml").write_text(
        "bitwright-grid: 1\nname: small\ntitle: A grid\nmodels: [digits, {workload: digits-untrained, name: other}]\n"
        "algorithms: [lsq, {a_method: pact, quantizer_decay: 0.0001, observer: mse}]\nbackends: [academic, tensorrt]\n"
        "bits: [8, 4]\nseeds: [0, 1]\nbnfold: 4\ntraining: {epochs: 2, lr: 0.01, warmup: 0.5, ema: 0.9}\n"
        "start: {epochs: 1}\nruntimes: first-seed\nthreads: 1\nattempts: 2\nnotes: [made up]\n"
    )


def _make_mqbench(folder: Path) -> None:
    (folder / "grid.yaml").write_text(
        "qparams: {w_method: lsq, a_method: lsq, bit: 8, a_observer: EMAMinMaxObserver}\nbackend: academic\nbnfold: 4\n"
        "model: {type: digits, kwargs: {num_classes: 10}}\nseed: 1000\n"
        "optimizer: {type: SGD, kwargs: {lr: 0.004, momentum: 0.9, weight_decay: 0.0001, nesterov: true}}\n"
        "lr_scheduler: {type: Cosine, kwargs: {base_lr: 0.004, max_epoch: 2, min_lr: 0.0}}\nlabel_smooth: 0.1\n"
        "ema: {enable: true, kwargs: {decay: 0.99}}\ndata: {batch_size: 64, max_epoch: 2, num_workers: 4}\n"
        "saver: {print_freq: 10}\n"
    )


def _read_grid(folder: Path) -> None:
    config = GridConfig.load(folder / "grid.yaml")
    if len(config.seeds) * len(config.bits) < 1000:
        for task in config.tasks():
            task.grid()
        _ = config.digest


def _make_board(folder: Path) -> None:
    import leaderboards

    leaderboards.made_up(("lsq", "pact"), ("academic",)).save(folder / "board.json")


def _read_board(folder: Path) -> None:
    board = Leaderboard.load(folder / "board.json")
    write_leaderboard_page(board, folder / "page.html")
    leaderboard_markdown(board)


def _make_report(folder: Path) -> None:
    import records

    write_json(records.record(), folder / "report.json")


def _read_report(folder: Path) -> None:
    record = read_json(folder / "report.json")
    write_html(record, folder / "report.html")
    write_markdown(record, folder / "report.md")


# profiles and traces


def _make_profile(folder: Path) -> None:
    _profile().save(folder / "profile.json")


def _read_profile(folder: Path) -> None:
    profile = DeviceProfile.load(folder / "profile.json")
    Predictor.make(_step(), Plan(), {"device": profile}).predict()


def _make_samples(folder: Path) -> None:
    store = SampleStore(folder / "samples.jsonl", circumstances={"device": "x"})
    for number in range(3):
        rows = [["conv2d(input=f32[1])", "float32", 1e-3, 2e-3], ["loss:x", "float32", 1e-4, 1e-4 * number]]
        store.add({"round": rows, "total": 4e-3, "engine": 1e-5, "beyond": [1e-6, 1e-6, 0.0], "yardstick": 1e-3})
    store.add({"saved": [["conv2d(input=f32[1])", "float32", ["input"], 12]], "facts": {"gap": 1e-6}})


def _read_samples(folder: Path) -> None:
    SampleStore(folder / "samples.jsonl", circumstances={"device": "x"}).costs()


def _make_trace(folder: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    net, batch, target = model(), inputs(), torch.zeros(2, dtype=torch.int64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as run:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(batch), target).backward()
            optimizer.step()
    run.export_chrome_trace(str(folder / "trace.json"))
    (folder / "trace.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))
    _step().save(folder / "graph.json")


def _read_trace(folder: Path) -> None:
    graph = StepGraph.load(folder / "graph.json")
    try:
        import_trace(folder / "trace.json", graph)
    finally:
        import_trace(folder / "trace.json.gz", graph)


# tensors and artefacts


def _make_checkpoint(folder: Path) -> None:
    save_checkpoint(_prepared(), folder / "model.safetensors")
    save_checkpoint(Tied(), folder / "tied.safetensors")


def _prepared() -> nn.Module:
    net = model()
    plan = bitwright.make_plan(capture(net, inputs()), "onnxruntime")
    prepare(net, plan, graph=capture(net, inputs()))
    return net


def _read_checkpoint(folder: Path) -> None:
    try:
        load_checkpoint(_prepared(), folder / "model.safetensors")
    finally:
        load_checkpoint(Tied(), folder / "tied.safetensors")


def _make_onnx(folder: Path) -> None:
    quantized = bitwright.quantize(model(), [inputs()])
    export(quantized.model, folder / "seed.onnx", inputs())


def _read_onnx(folder: Path) -> None:
    """Each way to read it by itself: the first error must not hide what another one does."""
    path = folder / "seed.onnx"
    readers = [lambda: read_artefact(path)]
    for name in ("reference", "onnxruntime"):
        readers += [
            lambda name=name: open_runtime(name, path, threads=1),
            lambda name=name: RUNTIMES.get(name).stored(path),
        ]
    wrong = None
    for read in readers:
        try:
            read()
        except bitwright.BitwrightError as error:
            wrong = error
    if wrong is not None:
        raise wrong


def _make_litert(folder: Path) -> None:
    quantized = bitwright.quantize(model(), [inputs()], backend="tflitemicro", measure=False)
    RUNTIMES.get("litert").write(quantized.model, folder / "seed.tflite", inputs())


def _read_litert(folder: Path) -> None:
    """Open the file and run it: its tensors have places in memory."""
    path = folder / "seed.tflite"
    runtime = RUNTIMES.get("litert_reference")
    runtime.stored(path)
    runtime.damages(path)
    opened = open_runtime("litert_reference", path, threads=1)
    opened(inputs())


_SIDECARS = [name for name in ARTEFACTS.names() if issubclass(ARTEFACTS.get(name), Sidecar)]


def _make_sidecars(folder: Path) -> None:
    fine = StoredGrid(scale=np.float32([0.5, 0.25]), zero_point=np.zeros(2, np.int64), qmin=-127, qmax=127)
    coarse = StoredGrid(scale=np.array(0.5, np.float32), zero_point=np.array(0), qmin=-127, qmax=127)
    for name in _SIDECARS:
        grids = [
            TensorGrid(tensor="x", grid=coarse, weight=False, axis=None, layers=("conv",)),
            TensorGrid(tensor="w", grid=coarse, weight=True, axis=None, layers=("conv",)),
            TensorGrid(tensor="v", grid=fine, weight=True, axis=0, layers=("fc",)),
        ]
        sidecar = ARTEFACTS.get(name)()
        (folder / _sidecar(name)).write_text(sidecar.write([one for one in grids if sidecar.refusal(one) is None]))


def _sidecar(name: str) -> str:
    return f"model.{name}{'.json' if ARTEFACTS.get(name).document else '.txt'}"


def _read_sidecars(folder: Path) -> None:
    wrong = None
    for name in _SIDECARS:
        try:
            read_sidecar(name, folder / _sidecar(name))
        except bitwright.BitwrightError as error:
            wrong = error
    if wrong is not None:
        raise wrong


# data


def _make_npz(folder: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {"inputs": draw.random((8, 1, 4, 4), dtype=np.float32), "targets": np.arange(8)}
    np.savez_compressed(folder / "data.npz", **arrays)


def _read_npz(folder: Path) -> None:
    for _ in Dataset(npz=folder / "data.npz", batch_size=3, mean=(0.5,), std=(0.2,)).labelled():
        pass


def _make_archive(folder: Path) -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (4, 6, 6, 3), dtype=np.uint8)
    np.savez_compressed(folder / "images.npz", images=images, labels=np.arange(4))


def _read_archive(folder: Path) -> None:
    zoo_data.npz_images.cache_clear()
    zoo_data.npz_images(folder / "images.npz")


def _make_idx(folder: Path) -> None:
    images = b"\x00\x00\x08\x03" + np.array([3, 4, 4], ">u4").tobytes() + bytes(range(48))
    labels = b"\x00\x00\x08\x01" + np.array([3], ">u4").tobytes() + bytes(range(3))
    (folder / "images.gz").write_bytes(gzip.compress(images))
    (folder / "labels.gz").write_bytes(gzip.compress(labels))


def _read_idx(folder: Path) -> None:
    zoo_data.idx_images.cache_clear()
    zoo_data.idx_images(folder / "images.gz", folder / "labels.gz")


def _make_pictures(folder: Path) -> None:
    from PIL import Image

    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir()
        Image.fromarray(draw.integers(0, 255, (9, 8, 3), dtype=np.uint8)).save(folder / name / "1.png")
        Image.fromarray(draw.integers(0, 255, (9, 8, 3), dtype=np.uint8)).save(folder / name / "2.jpg")
    Image.fromarray(draw.integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(folder / "0001_0003.jpg")


def _read_pictures(folder: Path) -> None:
    zoo_data.image_folder.cache_clear()
    try:
        for _ in Dataset(images=folder, resize=8, crop=6, batch_size=2).labelled():
            pass
    finally:
        zoo_data.image_folder(folder, 9)


def _make_pairs(folder: Path) -> None:
    heads = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    rows = [heads, ["1", "1", "2", "one sentence", "another sentence"], ["0", "3", "4", "this", "that"]]
    (folder / "pairs.tsv").write_text("\n".join("\t".join(row) for row in rows) + "\n")


def _read_pairs_of(folder: Path) -> None:
    read_pairs.cache_clear()
    read_pairs(folder / "pairs.tsv")


def _make_training(folder: Path) -> None:
    step = folder / SAVED
    step.mkdir(parents=True)
    for name in ("model.safetensors", "state.safetensors"):
        save_file({"weight": torch.arange(4.0)}, step / name)
    state = TrainerState(
        version=2,
        identity={"workload": "x"},
        step=4,
        epoch=1,
        stale=0,
        stopped_early=False,
        best=None,
        metrics=[],
        scaler={},
        optimizer={},
        ema=None,
        observers=None,
        files={file.name: file_fingerprint(file) for file in step.iterdir()},
    )
    (step / STATE).write_text(state.model_dump_json())
    rows = [{"step": 1, "epoch": 0, "loss": 1.5}, {"step": 4, "epoch": 1, "metrics": {"top1": 50.0}}]
    (folder / "history.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    facts = {
        "metric": "top1",
        "quantize": "int8",
        "compute": None,
        "metrics": [{"top1": 50.0}],
        "best": {"epoch": 1},
        "steps": 4,
        "processes": 1,
        "config_hash": "ab",
        "config": {"epochs": 1},
        "init": None,
        "notes": [],
    }
    (folder / "result.json").write_text(json.dumps(facts))


class _At:
    step = 4


def _read_training(folder: Path) -> None:
    History(folder).on_start(_At())  # type: ignore[arg-type]
    try:
        training_record(folder)
    finally:
        for saved in Checkpoints(folder).all():
            saved.state()


FORMATS: dict[str, Format] = {
    "plan": Format(_make_plan, _read_plan, ("plan.yaml",)),
    "cluster": Format(_make_cluster, _read_cluster, ("cluster.yaml", "profile.json")),
    "step graph": Format(_make_step, _read_step, ("step.json",)),
    "graph": Format(_make_graph, _read_graph, ("graph.json",)),
    "sensitivity scores": Format(_make_scores, _read_scores, ("scores.json",)),
    "QSync mapper": Format(_make_mapper, _read_mapper, ("mapper.npy",)),
    "backend table": Format(_make_table, _read_table, ("table.yaml",)),
    "search": Format(_make_tune, _read_tune, ("tune.yaml", "tune.yaml", "data.npz")),
    "LPOT configuration": Format(_make_lpot, _read_lpot, ("lpot.yaml",)),
    "grid": Format(_make_grid, _read_grid, ("grid.yaml",)),
    "MQBench configuration": Format(_make_mqbench, _read_grid, ("grid.yaml",)),
    "leaderboard": Format(_make_board, _read_board, ("board.json",)),
    "report": Format(_make_report, _read_report, ("report.json",)),
    "device profile": Format(_make_profile, _read_profile, ("profile.json",)),
    "samples": Format(_make_samples, _read_samples, ("samples.jsonl",)),
    "trace": Format(_make_trace, _read_trace, ("trace.json", "trace.json.gz", "graph.json")),
    "checkpoint": Format(_make_checkpoint, _read_checkpoint, ("model.safetensors", "tied.safetensors")),
    "ONNX artefact": Format(_make_onnx, _read_onnx, ("seed.onnx",)),
    "LiteRT artefact": Format(_make_litert, _read_litert, ("seed.tflite",)),
    "sidecars": Format(_make_sidecars, _read_sidecars, tuple(_sidecar(name) for name in _SIDECARS)),
    "npz data": Format(_make_npz, _read_npz, ("data.npz",)),
    "image archive": Format(_make_archive, _read_archive, ("images.npz",)),
    "IDX data": Format(_make_idx, _read_idx, ("images.gz", "labels.gz")),
    "pictures": Format(_make_pictures, _read_pictures, ("a/1.png", "b/2.jpg", "0001_0003.jpg")),
    "MRPC pairs": Format(_make_pairs, _read_pairs_of, ("pairs.tsv",)),
    "training run": Format(
        _make_training,
        _read_training,
        (
            "history.jsonl",
            "result.json",
            *(f"checkpoints/step-00000004/{name}" for name in (STATE, "state.safetensors")),
        ),
    ),
}
