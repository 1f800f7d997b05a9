"""Scripts for `lpot.experimental` run with another import line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitwright.core.errors import BitwrightError, PlanError
from bitwright.importers.lpot import Benchmark, Quantization, common

SEED = """\
model:                                               # mandatory
  name: blendcnn
  framework: pytorch

tuning:
  accuracy_criterion:
    relative:  0.01
  exit_policy:
    timeout: 0
  random_seed: 9527
"""
DATA = """\
model: {name: small, framework: pytorch}
quantization: {calibration: {sampling_size: 64, dataloader: {batch_size: 32, dataset: {npz: {root: train.npz}}}}}
evaluation:
  accuracy: {metric: {topk: 1}, dataloader: {batch_size: 32, dataset: {npz: {root: test.npz}}}}
  performance: {warmup: 1, iteration: 4, configs: {cores_per_instance: 4, num_of_instance: 7},
                dataloader: {batch_size: 2, dataset: {npz: {root: test.npz}}}}
tuning: {accuracy_criterion: {relative: 0.1}, exit_policy: {timeout: 0, max_trials: 2}}
"""
METRIC = """\
model: {name: small, framework: pytorch}
tuning: {accuracy_criterion: {relative: 0.1}, exit_policy: {timeout: 0, max_trials: 2}}
evaluation: {accuracy: {metric: {topk: 1}}}
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def samples(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return x, model(x).argmax(1)


def written(folder: Path, text: str) -> str:
    x, labels = samples(network())
    for name, part in (("train", slice(128)), ("test", slice(128, None))):
        np.savez(folder / f"{name}.npz", inputs=x[part].numpy(), targets=labels[part].numpy())
    (folder / "conf.yaml").write_text(text)
    return str(folder / "conf.yaml")


@pytest.mark.slow
def test_the_seeds_snippet(tmp_path: Path) -> None:
    """Usage 3: the loader and eval_func in code. Only the import line differs."""
    model = network()
    x, labels = samples(model)
    dataloader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=32)
    seen: list[bool] = []

    def eval_func(model: Any) -> float:
        seen.append(isinstance(model, nn.Module))
        model.eval()
        return float((model(x).argmax(1) == labels).float().mean())

    quantizer = Quantization(written(tmp_path, SEED))
    quantizer.model = model
    quantizer.calib_dataloader = dataloader
    quantizer.eval_func = eval_func
    q_model = quantizer()

    assert all(seen)
    assert quantizer.tuned is not None
    assert quantizer.tuned.met_goal
    assert quantizer.tuned.on_runtime is not None  # eval_func also runs on the runtime
    folder = q_model.save(tmp_path / "saved")
    assert {"plan.yaml", "checkpoint.safetensors", "model.onnx", "tuning.json"} <= {p.name for p in folder.iterdir()}
    assert float((q_model(x).argmax(1) == labels).float().mean()) >= 0.99


@pytest.mark.slow
def test_everything_from_the_file_and_its_benchmark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Usage 1, and `Benchmark` with more instances than this machine has cores."""
    conf = written(tmp_path, DATA)
    quantizer = Quantization(conf)
    quantizer.model = common.Model(network())
    q_model = quantizer.fit()
    assert quantizer.tuned is not None
    assert quantizer.tuned.met_goal

    evaluator = Benchmark(conf)
    evaluator.model = q_model
    results = evaluator()
    accuracy, batch, _ = results["accuracy"]
    assert accuracy >= 90
    assert batch == 32
    none, batch, times = results["performance"]
    assert none is None
    assert batch == 2
    assert evaluator.comparison is not None
    (row,) = [row for row in evaluator.comparison.together if row.variant == "quantized"]
    assert len(times) == len(row.instances) >= 1
    if row.pinned and len(row.instances) * 4 < 28:
        assert "7 instances × 4 cores" in evaluator.notes[0]


def test_loaders_in_code_and_the_metric_of_the_file(tmp_path: Path) -> None:
    """Usage 2."""
    x, labels = samples(network())
    quantizer = Quantization(written(tmp_path, METRIC))
    quantizer.model = network()
    quantizer.calib_dataloader = [(x[:128], labels[:128])]
    quantizer.eval_dataloader = common.DataLoader(torch.utils.data.TensorDataset(x[128:], labels[128:]), batch_size=50)
    quantizer(backend="tensorrt")
    assert quantizer.tuned is not None
    assert quantizer.tuned.metric == "top1"
    assert quantizer.tuned.met_goal


def test_a_metric_class_and_postprocess(tmp_path: Path) -> None:
    class Mine:
        def __init__(self, scale: float = 1.0) -> None:
            self.scale = scale
            self.reset()

        def reset(self) -> None:
            self.hits, self.n = 0, 0

        def update(self, preds: Tensor, labels: Tensor) -> None:
            self.hits += int((preds == labels).sum())
            self.n += len(labels)

        def result(self) -> float:
            return self.scale * self.hits / self.n

    x, labels = samples(network())
    quantizer = Quantization(written(tmp_path, METRIC))
    quantizer.model = network()
    quantizer.calib_dataloader = [x]
    quantizer.eval_dataloader = [(x, labels)]
    quantizer.metric = common.Metric(Mine, scale=10.0)
    quantizer.postprocess = common.Postprocess(lambda: lambda pair: (pair[0].argmax(1), pair[1]))
    quantizer(backend="tensorrt")
    assert quantizer.tuned is not None
    assert quantizer.tuned.baseline is not None
    assert quantizer.tuned.baseline.metrics["mine"] == 10.0


def test_q_func_trains(tmp_path: Path) -> None:
    x, labels = samples(network())
    text = METRIC.replace("tuning:", "quantization: {approach: quant_aware_training}\ntuning:")
    calls: list[int] = []

    def training_func(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model.train()
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            calls.append(1)

    quantizer = Quantization(written(tmp_path, text))
    quantizer.model = network()
    quantizer.eval_dataloader = [(x, labels)]
    quantizer.calib_dataloader = [(x, labels)]
    quantizer.q_func = training_func
    q_model = quantizer(backend="tensorrt")
    assert quantizer.tuned is not None
    assert len(calls) == 3 * len(quantizer.tuned.history)
    assert not torch.equal(q_model.model.state_dict()["0.weight"], network().state_dict()["0.weight"])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    quantizer = Quantization(written(tmp_path, SEED))
    with pytest.raises(BitwrightError) as caught:
        quantizer()
    assert caught.value.codes == ["workload-required"]
    quantizer.model = network()
    with pytest.raises(PlanError) as missing:
        quantizer()
    assert missing.value.codes == ["no-calibration-data"]
    with pytest.raises(BitwrightError) as wrong:
        quantizer.model = "model.pt"
    assert wrong.value.codes == ["not-a-module"]
    with pytest.raises(BitwrightError) as loader:
        quantizer.calib_dataloader = 3  # type: ignore[assignment]
    assert loader.value.codes == ["not-a-loader"]
    with pytest.raises(BitwrightError) as mode:
        Benchmark()("speed")
    assert mode.value.codes == ["invalid-value"]


def test_a_missed_goal_returns_the_best_model(tmp_path: Path) -> None:
    x, labels = samples(network())
    text = METRIC.replace("relative: 0.1", "absolute: 0.0")
    quantizer = Quantization(written(tmp_path, text))
    quantizer.model = network()
    quantizer.calib_dataloader = [x * 1e-3]  # ranges that are far too small
    quantizer.eval_dataloader = [(x, labels)]
    q_model = quantizer(backend="tensorrt")
    assert quantizer.tuned is not None
    assert q_model(x).shape == (256, 3)
