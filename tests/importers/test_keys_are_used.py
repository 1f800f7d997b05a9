"""Every key that a table calls honoured is read by the code that runs the file."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bitwright import GridConfig, Workload
from bitwright.core.documents import parse_yaml
from bitwright.core.registry import NETWORKS
from bitwright.importers.key_listing import TABLES
from bitwright.importers.key_table import Honoured, Named, Noted, Rejected, Section, _marker, _section
from bitwright.importers.lpot import Benchmark, experimental, read_lpot, tune_settings
from bitwright.importers.lpot.datasets import DATASETS
from bitwright.importers.lpot.metrics import METRICS
from bitwright.importers.lpot.reader import _notes
from bitwright.importers.lpot.schema import LpotConfig
from bitwright.importers.lpot.training import Train
from bitwright.importers.lpot.transforms import TRANSFORMS
from bitwright.importers.lpot.workload import LpotData
from bitwright.importers.mqbench import load_mqbench, mqbench_settings, run
from bitwright.importers.mqbench.toolkit import HuggingFaceConfig, ToolkitConfig
from bitwright.importers.mqbench.toolkit_workload import image_workload, text_workload
from bitwright.importers.mqbench.zoo import ZooConfig
from bitwright.workflows import mqbench as workflow

Key = tuple[type[Section], str]
CHECKED = {(LpotConfig, "version")}
"""Honoured by the check of their value alone."""


def honoured(table: type[Section], seen: set[type[Section]] | None = None) -> Iterator[Key]:
    """The keys that a table calls honoured, except those with one possible value."""
    seen = set() if seen is None else seen
    if table in seen:
        return
    seen.add(table)
    for name, info in table.model_fields.items():
        marker = _marker(info)
        single = get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1
        if isinstance(marker, Honoured) and not single and (table, name) not in CHECKED:
            yield table, name
        named = next((item for item in info.metadata if isinstance(item, Named)), None)
        inner, _ = _section(info.annotation)
        if named is not None:
            for option in named.options.values():
                if isinstance(option.about, Honoured | Noted):
                    yield from honoured(option, seen)
        elif inner is not None and not isinstance(marker, Rejected | Noted):
            yield from honoured(inner, seen)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[Key]:
    """The keys that code reads from now on, one by one or with `model_dump`."""
    found: set[Key] = set()

    def get(self: Section, name: str) -> Any:
        kind = type(self)
        if not name.startswith("_") and name in kind.__pydantic_fields__:
            found.add((kind, name))
        return object.__getattribute__(self, name)

    dump = Section.model_dump

    def dumped(self: Section, *, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, Any]:
        names = set(type(self).model_fields if include is None else include) - set(exclude or ())
        found.update((type(self), name) for name in names)
        return dump(self, include=include, exclude=exclude, **options)

    monkeypatch.setattr(Section, "__getattribute__", get, raising=False)
    monkeypatch.setattr(Section, "model_dump", dumped)
    return found


def unused(table: str, reads: set[Key]) -> list[str]:
    return [f"{kind.__name__}.{name}" for kind, name in honoured(TABLES[table][1]) if (kind, name) not in reads]


def stop(*_: Any, **options: Any) -> Any:
    """In place of a long computation, whose arguments are complete."""
    raise KeyboardInterrupt


# -- LPOT ------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "ImageFolder": {"root": "train"},
    "npz": {"root": "a.npz"},
    "CIFAR10": {"root": "."},
    "CIFAR100": {"root": "."},
    "MNIST": {"root": "."},
    "FashionMNIST": {"root": "."},
    "ImagenetRaw": {"data_path": ".", "image_list": "train.txt"},
    "dummy": {"shape": [4, 3, 8, 8], "low": 0, "high": 1, "dtype": "float32"},
    "dummy_v2": {"input_shape": [3, 8, 8], "label_shape": [1]},
    "sparse_dummy_v2": {"dense_shape": [3, 8, 8], "label_shape": [1], "sparse_ratio": 0.5},
    "GLUE": {"data_dir": "glue", "model_name_or_path": "bert", "task": "sst-2"},
    "Resize": {"size": [20, 30]},
    "CenterCrop": {"size": 16},
    "RandomResizedCrop": {"size": 16},
    "RandomCrop": {"size": 16},
    "Pad": {"padding": [1, 2]},
    "ColorJitter": {"brightness": 0.1, "hue": 0.1},
    "Transpose": {"perm": [2, 0, 1]},
    "Reshape": {"shape": [-1]},
    "CropToBoundingBox": {"offset_height": 1, "offset_width": 2, "target_height": 5, "target_width": 6},
    "CropResize": {"x": 1, "y": 2, "width": 8, "height": 9, "size": 7},
    "PaddedCenterCrop": {"size": 16, "crop_padding": 4},
    "ResizeWithRatio": {"min_dim": 20, "max_dim": 28, "padding": True},
    "ResizeWithAspectRatio": {"height": 16, "width": 20},
    "BilinearImagenet": {"height": 16, "width": 16},
    "ResizeCropImagenet": {"height": 16, "width": 18, "resize_side": 20},
    "Normalize": {"rescale": [1.0, 0.0]},
    "SGD": {"learning_rate": 0.01, "momentum": 0.9, "nesterov": True},
}
SEARCH = """\
model: {name: net, framework: pytorch}
quantization:
  approach: APPROACH
  calibration: {sampling_size: 4, iterations: ITERATIONS}
  advance: {bias_correction: weight_empirical}
  recipes: {fast_bias_correction: FAST, first_conv_or_matmul_quantization: false}
  model_wise: {weight: {bit: 7.0}, activation: {algorithm: kl, scheme: asym}}
  optype_wise: {Linear: {weight: {dtype: int8}, activation: {compute_dtype: [uint8], dtype: fp32}}}
  op_wise: {conv: fp32}
  train: {optimizer: {SGD: {learning_rate: 0.1}}, criterion: {CrossEntropyLoss: {}}, epoch: 1, dataloader: LOADER}
tuning:
  accuracy_criterion: {relative: 1%}
  multi_objectives: {objective: [performance, modelsize], weight: [1, 2]}
  exit_policy: {timeout: 60, max_trials: 3}
  workspace: {path: study, resume: study.db}
evaluation:
  accuracy: {METRICS, iteration: 1, dataloader: LOADER, postprocess: {transform: {LabelShift: 1}}}
  performance:
    {warmup: 1, iteration: 2, dataloader: LOADER, configs: {CONFIGS}}
"""
SEVERAL = "multi_metrics: {topk: 1, MSE: {}, RMSE: {}, MAE: {}}"
LOADER = "{batch_size: 2, shuffle: true, last_batch: discard, dataset: {dummy: {shape: [4, 6]}}, filter: {}}"


def write_data(folder: Path) -> None:
    """A small file in each format."""
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for index in range(4):
            place = folder / part / f"c{index % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (40, 48, 3), np.uint8)).save(place / f"{index}.png")
        (folder / f"{part}.txt").write_text("".join(f"{part}/c{i % 2}/{i}.png {i % 2}\n" for i in range(4)))
    np.savez(folder / "a.npz", inputs=np.zeros((4, 6), np.float32), targets=np.zeros(4, np.int64))
    for place, label in (("cifar-10-batches-py/test_batch", b"labels"), ("cifar-100-python/test", b"fine_labels")):
        (folder / place).parent.mkdir()
        (folder / place).write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), label: [0, 1]}))
    for name in ("MNIST", "FashionMNIST"):
        (folder / name / "raw").mkdir(parents=True)
        for kind, array in (("images-idx3", np.zeros((2, 28, 28), np.uint8)), ("labels-idx1", np.uint8([0, 1]))):
            raw = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
            (folder / name / "raw" / f"t10k-{kind}-ubyte.gz").write_bytes(gzip.compress(raw))


def write_text_model(folder: Path) -> None:
    """A tokenizer, a tiny classifier with sentences, and a tiny model that answers questions, with a question."""
    from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, BertTokenizer

    (folder / "bert").mkdir()
    (folder / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]))
    BertTokenizer(str(folder / "bert" / "vocab.txt")).save_pretrained(folder / "bert")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=11, max_position_embeddings=32, num_labels=2, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    (folder / "glue").mkdir()
    for part in ("train", "dev"):
        (folder / "glue" / f"{part}.tsv").write_text("sentence\tlabel\na b\t0\nc d\t1\n")
        rows = [{"question": "a", "context": "b c d", "answers": {"text": ["c"], "answer_start": [2]}}]
        (folder / "glue" / f"{part}.json").write_text(json.dumps(rows))
    BertForQuestionAnswering(config).save_pretrained(folder / "answers")
    BertTokenizer(str(folder / "bert" / "vocab.txt")).save_pretrained(folder / "answers")


def lpot(text: str) -> LpotConfig:
    return read_lpot(parse_yaml(text, where="a"), where="a").config


def search(**more: str) -> str:
    words = {
        "APPROACH": "quant_aware_training",
        "METRICS": "metric: {topk: 1}",
        "CONFIGS": "",
        "LOADER": LOADER,
        **more,
    }
    text = SEARCH
    for name, value in ({"ITERATIONS": "2", "FAST": "true"} | words).items():
        text = text.replace(name, value)
    return text


def test_every_honoured_key_of_lpot_is_read(tmp_path: Path, reads: set[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path)
    write_text_model(tmp_path)
    files = [
        lpot(search()),
        lpot(search(METRICS=SEVERAL, APPROACH="post_training_auto_quant", ITERATIONS="[]", FAST="false")),
    ]
    reads.clear()  # validation reads keys, too
    net = nn.Linear(6, 2)
    workload = Workload(name="net", model=net, inputs=(torch.zeros(1, 6),))
    for config in files:
        assert tune_settings(config)["name"] == "net"
        list(_notes(config))
        data = LpotData(config=config)
        evaluate = data.complete(workload).evaluate
        assert evaluate is None or evaluate(net)["n"] == 2
    training = LpotData(config=files[0]).training(workload)
    assert training is not None
    training(net)
    for name, kind in DATASETS.items():
        if isinstance(kind.about, Honoured):
            dataset = kind.model_validate(OPTIONS[name])
            samples = dataset.beside(tmp_path).samples(0)  # type: ignore[attr-defined]
            assert samples.get(0) is not None
    image = Image.fromarray(np.zeros((40, 48, 3), np.uint8))
    for name, kind in TRANSFORMS.items():
        if isinstance(kind.about, Honoured):
            step = kind.model_validate(OPTIONS.get(name, {}))
            step.apply(image, np.random.default_rng(0))  # type: ignore[attr-defined]
    for kind in METRICS.values():
        if isinstance(kind.about, Honoured):
            metric = kind()
            assert metric.counter()  # type: ignore[attr-defined]
    for name in ("SGD", "Adam", "AdamW"):
        options = {"optimizer": {name: OPTIONS.get(name, {})}, "criterion": {"SparseCategoricalCrossentropy": {}}}
        train = lpot(f"quantization: {{train: {options}}}").quantization.train
        assert isinstance(train, Train)
        train.run(nn.Linear(6, 2), lambda epoch: [(torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64))])
    monkeypatch.setattr(experimental, "benchmark", stop)
    for configs in ("num_of_instance: 1, cores_per_instance: 1", "intra_num_of_threads: 1"):
        timed = Benchmark(lpot(search(CONFIGS=configs)))
        timed.model = nn.Linear(6, 2)
        with pytest.raises(KeyboardInterrupt):
            timed("performance")
    assert unused("lpot", reads) == []


# -- MQBench ---------------------------------------------------------------------------------------------------

ZOO = """\
model: {type: keys-net, kwargs: {num_classes: 2, dropout: 0.1, bn: {use_sync_bn: true, kwargs: {momentum: 0.2}}}}
qparams: {w_method: lsq, a_method: pact, bit: 4, w_observer: MSEObserver, a_observer: EMAMSEObserver}
backend: fbgemm
bnfold: 2
optimizer: {type: SGD, kwargs: {momentum: 0.9}, pconfig: {bn_b: {weight_decay: 0.0}}, no_wd: true}
lr_scheduler: {type: Cosine, kwargs: {base_lr: 0.1}}
ema: {enable: true}
data:
  batch_size: 2
  max_iter: 2
  num_workers: 0
  input_size: 32
  test_resize: 36
  train: {root_dir: ., meta_file: train.txt, sampler: {type: distributed_iteration}, transforms: {type: STANDARD}}
  test: {root_dir: ., meta_file: val.txt, transforms: {type: ONECROP}, evaluator: {kwargs: {topk: [1, 2]}}}
saver: {print_freq: 1, val_freq: 2, pretrain: {path: weights.pth, ignore: {model: [fc.bias]}}}
"""
TOOLKIT = """\
extra_prepare_dict:
  extra_qconfig_dict:
    w_observer: MSEObserver
    a_observer: EMAMSEObserver
    w_fakequantize: AdaRoundFakeQuantize
    a_fakequantize: QDropFakeQuantize
    w_qscheme: {bit: 3}
    a_qscheme: {bit: 4}
  extra_quantizer_dict: {exclude_module_name: [conv]}
quantize:
  quantize_type: advanced_ptq
  backend: Tensorrt
  reconstruction: {scale_lr: 4.0e-5, prob: 0.5}
  deploy: {output_path: OUT, model_name: net, deploy_to_qlinear: true}
model: {type: keys-net, kwargs: {num_classes: 2}}
data: {path: DATA, batch_size: 2, input_size: 32, test_resize: 36}
"""
TEXT = """\
quant: {a_qconfig: {bit: 8}, w_qconfig: {bit: 8, per_channel: true}, calibrate: 2, backend: academic}
data: {task_name: sst2, max_seq_length: 12, max_train_samples: 2, max_eval_samples: 2, dataset_name: GLUE}
model: {model_name_or_path: BERT}
train: {seed: 3, output_dir: OUT}
"""


class Net(nn.Module):
    """A network with the arguments of the zoo's."""

    def __init__(self, *, classes: int, dropout: float = 0.0, norm: Any = nn.BatchNorm2d, image_size: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, 4), norm(4)
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.dropout(torch.relu(self.bn(self.conv(x))).mean((2, 3))))
        return logits


@pytest.fixture
def network() -> Iterator[None]:
    NETWORKS.register("keys-net", Net)
    yield
    NETWORKS.unregister("keys-net")


def test_every_honoured_key_of_the_zoo_is_read(
    tmp_path: Path, reads: set[Key], network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path)
    torch.save(Net(classes=2, image_size=32).state_dict(), tmp_path / "weights.pth")
    (tmp_path / "config.yaml").write_text(ZOO)
    config = load_mqbench(tmp_path / "config.yaml").config
    assert isinstance(config, ZooConfig)
    reads.clear()  # validation reads keys, too
    assert GridConfig.load(tmp_path / "config.yaml").training.batch == 2
    monkeypatch.setenv("WORLD_SIZE", "2")  # norms are only shared by several processes
    workload = run.file_workload(tmp_path / "config.yaml")
    assert workload.evaluate is not None
    assert workload.evaluate(workload.model.eval())["n"] == 4
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(run, "Trainer", stop)
    with pytest.raises(KeyboardInterrupt):
        run.train_mqbench(tmp_path / "config.yaml")
    assert unused("mqbench-zoo", reads) == []


def test_every_honoured_key_of_the_toolkit_is_read(
    tmp_path: Path, reads: set[Key], network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path)
    text = TOOLKIT.replace("DATA", str(tmp_path)).replace("OUT", str(tmp_path / "out"))
    (tmp_path / "config.yaml").write_text("root: base.yaml\n")
    (tmp_path / "base.yaml").write_text(text)
    config = load_mqbench(tmp_path / "config.yaml").config
    assert isinstance(config, ToolkitConfig)
    reads.clear()
    reads.add((ToolkitConfig, "root"))  # load_mqbench reads it before the table: the model above is in base.yaml
    assert mqbench_settings(config) is not None
    workload, _ = image_workload(config)
    assert workload.calibration is not None
    assert len(list(workload.calibration())) == 2

    class Deployed:
        """A quantized model that is not computed."""

        record = quantized = property(lambda self: self)
        accuracies = ()

        def export(self, path: Path, artefact: str) -> Any:
            assert (path.name, artefact) == ("net_deploy_model.onnx", "qdq")
            return stop()

    monkeypatch.setattr(workflow, "quantize_workload", lambda *_, **options: Deployed())
    with pytest.raises(KeyboardInterrupt):
        workflow.quantize_mqbench(tmp_path / "config.yaml", iterations=1)
    assert unused("mqbench-toolkit", reads) == []


def test_every_honoured_key_of_the_text_example_is_read(tmp_path: Path, reads: set[Key]) -> None:
    write_text_model(tmp_path)
    words = {"GLUE": str(tmp_path / "glue"), "BERT": str(tmp_path / "bert"), "OUT": str(tmp_path / "out")}
    text = TEXT
    for name, value in words.items():
        text = text.replace(name, value)
    (tmp_path / "config.yaml").write_text(text)
    config = load_mqbench(tmp_path / "config.yaml").config
    assert isinstance(config, HuggingFaceConfig)
    reads.clear()
    assert mqbench_settings(config) is not None
    assert config.output == str(tmp_path / "out")
    workload, _ = text_workload(config)
    assert workload.evaluate is not None
    assert workload.evaluate(workload.model)["n"] == 2
    asks = text.replace("task_name: sst2", "doc_stride: 2, version_2_with_negative: true").replace("/bert", "/answers")
    (tmp_path / "config.yaml").write_text(asks)
    workload, _ = text_workload(load_mqbench(tmp_path / "config.yaml").config)
    assert workload.evaluate is not None
    assert workload.evaluate(workload.model)["n"] == 1
    assert unused("mqbench-text", reads) == []


def test_a_key_that_nothing_reads_is_found(reads: set[Key]) -> None:
    everything = {key for name in TABLES for key in honoured(TABLES[name][1])}
    assert len(everything) > 200
    assert unused("lpot", everything) == []
    assert unused("lpot", everything - {(LpotConfig, "model")}) == []  # a section, which has no handling of its own
    missing = next(honoured(LpotConfig))
    assert unused("lpot", everything - {missing}) == [f"{missing[0].__name__}.{missing[1]}"]
