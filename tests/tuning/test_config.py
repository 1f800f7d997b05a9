"""Searches as files: ours, and LPOT's as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from planted import workload
from schemas import json_schema

from bitwright import BitwrightError, Budget, PlanError, evaluate
from bitwright.importers.lpot.workload import LpotData
from bitwright.tuning import Drop, TuneConfig
from bitwright.tuning.space import SpaceRule

SEED = """\
model:                       # mandatory. lpot uses this model name and framework name
  name: blendcnn
  framework: pytorch

tuning:
  accuracy_criterion:
    relative:  0.01          # optional. default value is relative, other value is absolute
  exit_policy:
    timeout: 0               # optional. tuning timeout (seconds)
  random_seed: 9527          # optional. random seed for deterministic tuning.
"""
FULL = """\
model: {name: net, framework: pytorch_fx}
quantization:
  approach: post_training_static_quant
  calibration:
    sampling_size: 20, 40
    dataloader: {batch_size: 8, dataset: {dummy: {shape: [40, 3, 8, 8]}}}
  recipes: {first_conv_or_matmul_quantization: false, fast_bias_correction: true}
  model_wise:
    weight: {granularity: [per_channel, per_tensor], scheme: sym, dtype: int8, algorithm: minmax}
    activation: {granularity: per_tensor, scheme: asym, dtype: uint8, algorithm: [minmax, kl]}
  optype_wise:
    Linear: {weight: {dtype: fp32}, activation: {dtype: fp32}}
  op_wise:
    "layer1.*": {activation: {algorithm: kl}}
tuning:
  strategy: {name: mse_v2}
  accuracy_criterion: {relative: "2%", higher_is_better: false}
  multi_objectives: {objective: [performance, modelsize], weight: [0.7, 0.3]}
  exit_policy: {timeout: 600, max_trials: 50}
  workspace: {path: ./history}
evaluation:
  accuracy:
    metric: {topk: 5}
    dataloader: {batch_size: 4, dataset: {npz: {root: test.npz}}, transform: {Normalize: {mean: [0.5], std: [0.2]}}}
  performance: {warmup: 5, iteration: 30}
"""


def written(folder: Path, text: str, name: str = "tune.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_the_seeds_file_means_what_it_meant(tmp_path: Path) -> None:
    config = TuneConfig.load(written(tmp_path, SEED))
    assert config.name == "blendcnn"
    assert config.goal.drop == Drop(relative=0.01)
    assert config.goal.higher_is_better("top1")
    assert config.budget == Budget(trials=100, stop="first")  # timeout 0: the first model that passes
    assert (config.strategy, config.seed, config.space.samples) == ("basic", 9527, (100,))


def test_the_seeds_file_runs_unchanged_with_a_loader_and_an_eval_func(tmp_path: Path) -> None:
    """The seed's own way: model and calibration loader in code, and a function that evaluates."""
    work = workload(5, ())

    def eval_func(model: object) -> dict[str, float]:
        return evaluate(replace(work, evaluate=None), model)  # type: ignore[arg-type]

    config = TuneConfig.load(written(tmp_path, SEED))
    tuned = config.tune(replace(work, evaluate=eval_func, evaluation=None), backend="tensorrt")
    assert tuned.strategy == "basic"
    assert tuned.history[-1].outcome.passed == bool(tuned.met_goal)


def test_every_key_of_a_full_file(tmp_path: Path) -> None:
    config = TuneConfig.load(written(tmp_path, FULL))
    assert config.space.weights == ("int8/channel/sym", "int8/tensor/sym")
    assert config.space.activations == ("uint8/tensor/asym",)
    assert config.space.observer == ("minmax", "kl")
    assert config.space.samples == (20, 40)
    assert config.space.steps == (("bias-correction",),)
    assert config.space.first == "float"
    assert config.space.types == {"linear": SpaceRule(keep="float")}
    assert config.space.operators == {"re:layer1.*": SpaceRule(observer=("kl",))}
    assert config.goal.drop == Drop(relative=0.02)
    assert not config.goal.higher_is_better("top5")
    assert config.goal.weights == {"latency": 0.7, "size": 0.3}
    assert config.budget == Budget(minutes=10, trials=50)
    assert config.strategy == "mse_v2"
    assert config.seed == 1978  # the reference's default
    assert config.measuring.runs == 30
    assert config.store == str(tmp_path / "history/study.db")
    assert isinstance(config.data, LpotData)
    assert config.data.config.loaders["evaluation"].dataset[0].model_dump() == {"root": str(tmp_path / "test.npz")}


def test_accuracy_does_not_count_if_only_performance_does(tmp_path: Path) -> None:
    text = SEED.replace("timeout: 0 ", "performance_only: true ")
    assert TuneConfig.load(written(tmp_path, text)).goal.margin("top1", 90.0, 0.0) > 0


@pytest.mark.parametrize(
    ("old", "new", "where", "near"),
    [
        ("tuning:", "tunning:", "tunning", "tuning"),
        ("timeout:", "time_out:", "tuning.exit_policy.time_out", "timeout"),
        ("accuracy_criterion:", "accuracy_criteria:", "tuning.accuracy_criteria", "accuracy_criterion"),
        ("framework: pytorch", "frame: pytorch", "model.frame", "framework"),
    ],
)
def test_what_we_do_not_have_is_an_error_with_its_path(
    tmp_path: Path, old: str, new: str, where: str, near: str
) -> None:
    with pytest.raises(PlanError) as caught:
        TuneConfig.load(written(tmp_path, SEED.replace(old, new)))
    problem = next(p for p in caught.value.problems if p.where == where)
    assert near in str(problem.fix)


def test_dynamic_activations_are_searched(tmp_path: Path) -> None:
    config = TuneConfig.load(written(tmp_path, SEED + "quantization: {approach: post_training_dynamic_quant}\n"))
    assert config.space.activations == ("uint8/tensor/asym/dynamic",)


def test_everything_in_one_file(tmp_path: Path) -> None:
    """Model, data, metric and goal: nothing in code but the model itself."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\ndef net():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()\n"
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    data = torch.randn(300, 6)
    with torch.no_grad():
        targets = model(data).argmax(1).numpy()
    np.savez(tmp_path / "train.npz", inputs=data[:100].numpy(), targets=targets[:100])
    np.savez(tmp_path / "test.npz", inputs=data[100:].numpy(), targets=targets[100:])
    text = """\
bitwright-tune: 1
model: net.py:net
calibration: {npz: train.npz}
evaluation: {npz: test.npz, batch_size: 100}
metric: {topk: {k: 1}, f1: {positive: 2}}
goal: {drop: {top1: 5%, f1: 10}}
budget: {trials: 2}
backend: tensorrt
"""
    tuned = TuneConfig.load(written(tmp_path, text)).tune()
    assert tuned.baseline is not None
    assert tuned.baseline.metrics["top1"] == 100.0
    assert set(tuned.outcome.metrics) == {"top1", "f1", "n"}
    assert tuned.met_goal


def test_loaders_in_code_and_the_metric_in_the_file(tmp_path: Path) -> None:
    config = TuneConfig.load(written(tmp_path, "metric: {topk: {k: 3}}\nbackend: tensorrt\nbudget: {trials: 1}\n"))
    tuned = config.tune(workload(4, ()))
    assert "top3" in tuned.outcome.metrics


def test_of_an_error_less_is_better_without_saying_so(tmp_path: Path) -> None:
    config = TuneConfig.load(written(tmp_path, "metric: mse\nbackend: tensorrt\nbudget: {trials: 1}\n"))
    work = workload(4, ())
    outputs = [(data, work.model(data).detach()) for data, _ in work.evaluation()]  # type: ignore[misc]
    tuned = config.tune(replace(work, evaluation=lambda: outputs))
    assert tuned.goal.lower_is_better == ("mse",)
    assert not tuned.met_goal  # float's error is 0: any is too much


def test_a_file_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BitwrightError) as caught:
        TuneConfig.load(written(tmp_path, "goal: {drop: 1%}\n")).tune()
    assert "workload-required" in caught.value.codes


def test_the_schema_accepts_and_rejects_what_the_code_does() -> None:
    jsonschema.validate({"workload": "digits", "budget": {"minutes": 5}}, json_schema("tune-1"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"budged": {}}, json_schema("tune-1"))
