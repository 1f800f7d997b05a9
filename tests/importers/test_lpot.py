"""LPOT's files of all versions become one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from bitwright import Workload, tune
from bitwright.core.documents import parse_yaml, read_yaml
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.formats import Format
from bitwright.importers.key_table import rows
from bitwright.importers.lpot import LpotConfig, is_lpot, read_lpot, tune_settings
from bitwright.tuning import TuneConfig
from bitwright.tuning.evaluation import Measuring

STRATEGY_NAMES = (
    "basic",
    "mse",
    "mse_v2",
    "hawq_v2",
    "bayesian",
    "tpe",
    "random",
    "exhaustive",
    "conservative",
    "auto",
)
STATIC = """\
version: 1.0
model: {name: "net ", framework: pytorch_ipex, inputs: input, outputs: "a, b"}
device: gpu
quantization:
  approach: post_training_static_quant
  calibration:
    sampling_size: 50 100 500
    dataloader:
      batch_size: 30
      dataset: {ImageFolder: {root: /data/train}}
      transform:
        RandomResizedCrop: {size: 224}
        RandomHorizontalFlip:
        ToTensor: {}
        Normalize: {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}
  recipes: {scale_propagation_concat: false}
  model_wise: {weight: {bit: 7.0}, activation: {algorithm: kl, dtype: [uint8, fp32]}}
  op_wise:
    layer1.0.conv1: {weight: {dtype: [fp32]}, activation: {dtype: [fp32]}}
    "module.dense[1-3].cat": fp32
    default_qconfig: {activation: {dtype: fp32}, weight: {dtype: fp32}}
tuning:
  accuracy_criterion: {absolute: 0.5}
  tensorboard: true
  diagnosis: {diagnosis_after_tuning: true}
evaluation:
  accuracy:
    metric: {topk: 1}
    dataloader:
      batch_size: 30
      dataset: {ImageFolder: {root: /data/val}}
      transform: {Resize: {size: 256}, CenterCrop: {size: 224}, ToTensor: , Normalize: {mean: [0.5], std: [0.5]}}
  performance:
    warmup: 10
    iteration: 100
    configs: {cores_per_instance: 4, num_of_instance: 7, kmp_blocktime: 1}
    dataloader: {batch_size: 1, dataset: {dummy: {shape: [128, 3, 8, 8], label: true}}}
"""
FIRST = """\
framework:
  - name: pytorch
  - inputs: x
device: cpu
quantization: {weight: {granularity: per_channel}, activation: {scheme: asym}}
calibration:
  iterations: 10
  algorithm: {activation: kl}
  dataloader:
    batch_size: 30
    dataset: [{type: ImageFolder}, {root: data/train}]
    transform: {Resize: [{size: 64}], CenterCrop: [{size: 48}], ToTensor: ,
                Normalize: [{mean: [0.5]}, {std: [0.5]}]}
tuning:
  strategy: mse
  metric: {topk: 5}
  accuracy_criterion:
    - relative: 2%
  timeout: 60
  random_seed: 9527
  ops: {conv1: {weight: {dtype: [fp32]}}}
evaluation:
  dataloader:
    batch_size: 20
    dataset: [{type: ImageFolder}, {root: data/val}]
snapshot: {path: history}
"""
TRAINING = """\
model: {name: imagenet_qat, framework: pytorch_fx}
quantization:
  approach: quant_aware_training
  train:
    start_epoch: 2
    end_epoch: 8
    iteration: 30
    frequency: 2
    dataloader: {batch_size: 256, shuffle: true, dataset: {ImageFolder: {root: /train}}}
    optimizer: {SGD: {learning_rate: 0.0001, momentum: 0.9, nesterov: true, weight_decay: 1e-4}}
    criterion: {CrossEntropyLoss: {reduction: mean}}
"""


def config_of(text: str) -> LpotConfig:
    return read_lpot(parse_yaml(text, where="a.yaml"), where="a.yaml").config


def problems_of(text: str) -> dict[str | None, str | None]:
    with pytest.raises(PlanError) as caught:
        read_lpot(parse_yaml(text, where="a.yaml"), where="a.yaml")
    return {problem.where: problem.code for problem in caught.value.problems}


def cannot_run(text: str) -> dict[str | None, Any]:
    with pytest.raises(PlanError) as caught:
        tune_settings(config_of(text))
    assert set(caught.value.codes) == {"cannot-run"}
    return {problem.where: problem.value for problem in caught.value.problems}


def test_a_file_with_all_kinds_of_keys() -> None:
    config = config_of(STATIC)
    calibration = config.quantization.calibration
    assert calibration.sampling_size == (50, 100, 500)
    assert calibration.dataloader is not None
    assert calibration.dataloader.dataset[0].model_dump() == {"root": "/data/train"}
    steps = calibration.dataloader.transform
    assert [step.name for step in steps] == ["RandomResizedCrop", "RandomHorizontalFlip", "ToTensor", "Normalize"]
    assert steps[0].model_dump() == {
        "size": (224, 224),
        "scale": (0.08, 1.0),
        "ratio": (3 / 4, 4 / 3),
        "interpolation": "bilinear",
    }
    performance = config.evaluation.performance
    assert performance is not None
    assert (performance.warmup, performance.iteration) == (10, 100)
    assert (performance.configs.cores_per_instance, performance.configs.num_of_instance) == (4, 7)
    assert performance.dataloader is not None
    assert performance.dataloader.dataset[0].model_dump()["shape"] == ((128, 3, 8, 8),)


def test_keys_without_effect_are_noted_with_their_paths() -> None:
    found = read_lpot(parse_yaml(STATIC, where="a.yaml"), where="a.yaml")
    places = {where for note in found.notes for where in str(note.where).split(", ")}
    assert places == {
        "model.inputs",
        "model.outputs",
        "model.framework",
        "device",
        "quantization.recipes.scale_propagation_concat",
        "quantization.calibration.dataloader.transform",
        "tuning.tensorboard",
        "tuning.diagnosis.diagnosis_after_tuning",
        "evaluation.performance.configs.kmp_blocktime",
        "evaluation.performance.dataloader.dataset.dummy.label",
    }


def test_names_of_operators_keep_their_meaning() -> None:
    space = tune_settings(config_of(STATIC))["space"]
    assert space["operators"] == {
        "layer1.0.conv1": {"keep": "float"},
        r"re:(?:module\.)?(?:dense[1-3].cat).*": {"keep": "float"},
        "*#*": {"keep": "float"},
    }
    assert space["weights"] == ["int8/channel/sym"]  # 7 bits and a sign
    assert space["activations"] == ["uint8/tensor/asym"]


def test_the_first_layout_means_the_same_as_the_later_one() -> None:
    config = config_of(FIRST)
    assert config.model.framework == "pytorch"
    assert config.tuning.exit_policy.timeout == 60
    assert config.evaluation.accuracy.metric[0].model_dump() == {"k": 5}
    settings = tune_settings(config)
    assert settings["strategy"] == "mse"
    assert settings["goal"]["drop"] == {"relative": 0.02}
    assert settings["store"] == "history/study.db"
    assert settings["space"]["samples"] == [300]  # 10 batches of 30
    assert settings["space"]["observer"] == ["kl"]
    assert settings["space"]["weights"] == ["int8/channel/sym"]
    assert settings["space"]["operators"] == {"conv1": {"keep": "float"}}
    loaders = settings["data"].config.loaders
    assert {role: loader.dataset[0].model_dump() for role, loader in loaders.items()} == {
        "calibration": {"root": "data/train"},
        "evaluation": {"root": "data/val"},
    }
    assert [step.name for step in loaders["calibration"].transform] == ["Resize", "CenterCrop", "ToTensor", "Normalize"]


def test_problems_in_the_first_layout_have_the_paths_of_the_file() -> None:
    text = FIRST.replace("iterations: 10", "iterations: 0").replace("size: 48", "sise: 48").replace("timeout", "timout")
    assert problems_of(text) == {
        "calibration.iterations.0": "invalid-value",
        "calibration.dataloader.transform.CenterCrop.sise": "unknown-key",
        "calibration.dataloader.transform.CenterCrop.size": "missing-key",
        "tuning.timout": "unknown-key",
    }


def test_training_is_read_completely() -> None:
    train = config_of(TRAINING).quantization.train
    assert train is not None
    assert (train.epochs, train.iteration) == (range(2, 8), 30)
    assert train.optimizer[0].name == "SGD"
    assert train.optimizer[0].model_dump() == {
        "learning_rate": 1e-4,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
    }
    assert train.criterion[0].name == "CrossEntropyLoss"
    assert train.dataloader is not None
    assert train.dataloader.shuffle


@pytest.mark.parametrize(
    ("approach", "formats"),
    [
        ("post_training_dynamic_quant", ["uint8/tensor/asym/dynamic"]),
        ("post_training_auto_quant", ["uint8/tensor/asym", "uint8/tensor/asym/dynamic"]),
    ],
)
def test_dynamic_and_automatic_approaches(approach: str, formats: list[str]) -> None:
    text = f"model: {{name: a, framework: pytorch}}\nquantization: {{approach: {approach}}}\n"
    assert tune_settings(config_of(text))["space"]["activations"] == formats


def test_rules_of_a_dynamic_file() -> None:
    text = """
model: {name: a, framework: pytorch}
quantization:
  approach: post_training_dynamic_quant
  op_wise:
    head: fp32
    body: {activation: {dtype: [fp32], compute_dtype: [int8]}, weight: {dtype: [int8]}}
"""
    rules = tune_settings(config_of(text))["space"]["operators"]
    assert rules["head"] == {"keep": "float"}
    assert rules["body"]["activations"] == ["int8/tensor/sym/dynamic"]


def test_a_dynamic_file_is_searched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    x = torch.randn(256, 16)
    labels = model(x).argmax(1)
    work = Workload(
        name="a",
        model=model,
        inputs=(x[:1],),
        calibration=lambda: x.split(64),
        evaluation=lambda: zip(x.split(64), labels.split(64), strict=True),
    )
    text = """
model: {name: a, framework: pytorch}
quantization: {approach: post_training_dynamic_quant}
tuning: {accuracy_criterion: {relative: 0.05}, exit_policy: {max_trials: 2, timeout: 0}}
"""
    config = TuneConfig.model_validate(tune_settings(config_of(text)))
    found = tune(work, config.goal, config.budget, space=config.space, measuring=Measuring(runs=5))
    assert found.met_goal
    assert found.quantized is not None
    sites = found.quantized.plan.quantized
    formats = {str(spec.format) for site, spec in sites if spec.share is None and not site.endswith(":weight")}
    assert formats == {"uint8/tensor/asym/dynamic"}


@pytest.mark.parametrize("key", ["pruning", "distillation", "auto_distillation", "nas"])
def test_other_tasks_are_rejected_in_one_sentence(key: str) -> None:
    text = f"model: {{name: a, framework: pytorch}}\n{key}: {{anything: 1}}\ntuning: {{unknown: 1}}\n"
    assert is_lpot(parse_yaml(text, where="a"))
    assert problems_of(text) == {key: "unsupported-key"}


@pytest.mark.parametrize(
    ("text", "where", "code"),
    [
        ("version: 2.0", "version", "invalid-value"),
        ("model: {framework: tensorflow}", "model.framework", "invalid-value"),
        ("tuning: {strategy: {name: sigopt}}", "tuning.strategy.name", "invalid-value"),
        ("tuning: {strategy: {name: tpe, sigopt_api_token: x}}", "tuning.strategy.sigopt_api_token", "unsupported-key"),
        ("quantization: {model_wise: {weight: {bit: 6.5}}}", "quantization.model_wise.weight.bit.0", "invalid-value"),
        ("quantization: {op_wise: {'a[': fp32}}", "quantization", "invalid-value"),
        (
            "quantization: {train: {optimizer: {SGD: {}}}}",
            "quantization.train.optimizer.SGD.learning_rate",
            "missing-key",
        ),
        (
            "quantization: {train: {criterion: {KnowledgeDistillationLoss: {}}}}",
            "quantization.train.criterion.KnowledgeDistillationLoss",
            "unsupported-key",
        ),
        ("mixed_precision: {precisions: bf16}", "mixed_precision.precisions", "unsupported-key"),
        ("evaluation: {accuracy: {metric: {topk: 1, F1: {}}}}", "evaluation.accuracy.metric", "invalid-value"),
        ("evaluation: {accuracy: {metric: {top_k: 1}}}", "evaluation.accuracy.metric.top_k", "unknown-name"),
        (
            "evaluation: {accuracy: {multi_metrics: {topk: 1, MSE: , weight: [0.5]}}}",
            "evaluation.accuracy",
            "invalid-value",
        ),
        (
            "evaluation: {accuracy: {dataloader: {dataset: {ImageFolders: {root: a}}}}}",
            "evaluation.accuracy.dataloader.dataset.ImageFolders",
            "unknown-name",
        ),
    ],
)
def test_wrong_values_have_their_path(text: str, where: str, code: str) -> None:
    assert problems_of(text) == {where: code}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("quantization: {recipes: {weight_correction: true}}", "quantization.recipes.weight_correction"),
        (
            "quantization: {recipes: {last_conv_or_matmul_quantization: false}}",
            "quantization.recipes.last_conv_or_matmul_quantization",
        ),
        ("tuning: {strategy: {name: tpe, accuracy_weight: 0.5}}", "tuning.strategy.accuracy_weight"),
        ("tuning: {objective: accuracy}", "tuning.objective"),
        ("evaluation: {accuracy: {metric: {MSE: {compare_label: false}}}}", "evaluation.accuracy.metric"),
        ("evaluation: {accuracy: {multi_metrics: {topk: 1, weight: 1.0}}}", "evaluation.accuracy.multi_metrics"),
        (
            "quantization: {train: {criterion: {CrossEntropyLoss: {reduction: none}}}}",
            "quantization.train.criterion.reduction",
        ),
    ],
)
def test_what_the_search_cannot_apply_is_not_dropped(text: str, where: str) -> None:
    assert list(cannot_run(text)) == [where]


_FORMATS = {"int8 sym": "int8", "int8 asym": "int8", "uint8 sym": "int8", "uint8 asym": "uint8"}


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("kind", _FORMATS)
@pytest.mark.parametrize("role", ["weight", "activation"])
def test_formats_keep_their_meaning(role: str, kind: str, granularity: str) -> None:
    dtype, scheme = kind.split()
    rule = f"{{dtype: [{dtype}, fp32], scheme: [{scheme}], granularity: {granularity}, algorithm: [minmax, kl]}}"
    space = tune_settings(config_of(f"quantization: {{op_wise: {{conv1: {{{role}: {rule}}}}}}}"))["space"]
    found = space["operators"]["conv1"][f"{role}s"]
    assert found == [f"{_FORMATS[kind]}/{granularity.removeprefix('per_')}/{scheme}"]
    assert all(str(Format.parse(text)) == text for text in found)


@pytest.mark.parametrize(
    "section",
    [
        *(f"tuning: {{strategy: {{name: {name}}}}}" for name in STRATEGY_NAMES),
        *(f"tuning: {{objective: {name}}}" for name in ("performance", "modelsize", "footprint")),
        "tuning: {multi_objectives: {objective: [performance, footprint], weight: [0.7, 0.3]}}",
        *(f"model: {{name: a, framework: {name}}}" for name in ("pytorch", "pytorch_fx", "pytorch_ipex")),
        *(f"version: {number}" for number in ("1.0", "'1.0'", "1", "1.14")),
        *(f"quantization: {{approach: post_training_{name}_quant}}" for name in ("static", "dynamic", "auto")),
        "quantization: {optype_wise: {Conv2d: {weight: {dtype: [fp32]}}, Linear: {activation: {algorithm: kl}}}}",
        "quantization: {calibration: {sampling_size: '50, 100'}}",
        "tuning: {accuracy_criterion: {relative: 0.01, higher_is_better: false}, exit_policy: {timeout: 3600}}",
        "evaluation: {performance: {configs: {cores_per_instance: 7, inter_num_of_threads: 1, kmp_blocktime: 1}}}",
    ],
)
def test_every_value_becomes_a_search(section: str) -> None:
    search = TuneConfig(**tune_settings(config_of(section)))
    assert search.space is not None


def test_every_strategy_of_the_table_is_tried() -> None:
    (named,) = [row for row in rows(LpotConfig) if row.key == "tuning.strategy.name"]
    assert named.handling == "honoured"
    strategy = LpotConfig().tuning.strategy
    assert set(STRATEGY_NAMES) == set(get_args(type(strategy).model_fields["name"].annotation))


def test_several_metrics_have_weights_and_directions() -> None:
    metrics = "{topk: 1, MSE: {compare_label: false}, weight: 0.7 0.3, higher_is_better: 'True, False'}"
    text = f"evaluation: {{accuracy: {{multi_metrics: {metrics}}}}}"
    accuracy = config_of(text).evaluation.accuracy
    assert [metric.name for metric in accuracy.metrics] == ["topk", "MSE"]
    assert [option.model_dump()["values"] for option in accuracy.multi_metrics[2:]] == [(0.7, 0.3), (True, False)]


def test_every_key_of_the_table_has_a_handling() -> None:
    found = {row.key: row.handling for row in rows(LpotConfig)}
    assert found["evaluation.performance.configs.cores_per_instance"] == "honoured"
    assert found["quantization.op_wise.*.weight.dtype"] == "honoured"
    assert found["tuning.tensorboard"] == "noted"
    assert found["pruning"] == "rejected"


@pytest.mark.realdata
def test_published_files_are_read(data_dir: Path) -> None:
    """All quantization files are accepted; those that prune are rejected in one sentence."""
    files = sorted((data_dir / "peers" / "lpot").glob("*.yaml"))
    if not files:
        pytest.skip("no published files")
    rejected: dict[str, list[str]] = {}
    for file in files:
        try:
            read_lpot(read_yaml(file, what="the file"), where=file.name)
        except BitwrightError as error:
            rejected[file.name] = [str(problem.where) for problem in error.problems]
    assert set(map(tuple, rejected.values())) <= {("pruning",), ("distillation",)}
    assert len(rejected) <= 0.05 * len(files)
