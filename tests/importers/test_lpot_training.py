"""`quant_aware_training`: the training section of LPOT files runs, in the search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitwright import TuneConfig, Workload, tune_workload
from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError, PlanError, TrainError
from bitwright.importers.lpot import read_lpot
from bitwright.importers.lpot.training import Train
from bitwright.tuning import Tuned

FILE = """\
model: {name: small, framework: pytorch_fx}
quantization:
  approach: quant_aware_training
  train:
    start_epoch: 1
    end_epoch: 3
    iteration: 4
    frequency: 2
    dataloader: {batch_size: 16, shuffle: true, dataset: {npz: {root: train.npz}}}
    optimizer: {SGD: {learning_rate: 0.002, momentum: 0.9, nesterov: true, weight_decay: 0.0001}}
    criterion: {CrossEntropyLoss: {reduction: mean}}
evaluation:
  accuracy: {metric: {topk: 1}, dataloader: {batch_size: 50, dataset: {npz: {root: test.npz}}}}
tuning: {accuracy_criterion: {relative: 0.05}, exit_policy: {timeout: 0, max_trials: 2}, random_seed: 3}
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()


def written(folder: Path, text: str = FILE) -> tuple[Path, Workload]:
    """The file with its data, and the model."""
    model = network()
    data = torch.randn(300, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        targets = model(data).argmax(1).numpy()
    for name, part in (("train", slice(200)), ("test", slice(200, None))):
        np.savez(folder / f"{name}.npz", inputs=data[part].numpy(), targets=targets[part])
    (folder / "qat.yaml").write_text(text)
    return folder / "qat.yaml", Workload(name="small", model=model, inputs=(data[:1],))


def run(folder: Path, text: str = FILE, **others: Any) -> Tuned:
    file, work = written(folder, text)
    return TuneConfig.load(file).tune(work, backend="tensorrt", **others)


def test_a_file_trains_and_meets_its_goal(tmp_path: Path) -> None:
    file, work = written(tmp_path)
    before = {name: tensor.clone() for name, tensor in work.model.state_dict().items()}
    config = TuneConfig.load(file).updated({"backend": "tensorrt"})
    tuned = tune_workload(config, tmp_path / "out", workload=work)
    assert tuned.met_goal
    assert tuned.quantized is not None
    after = tuned.quantized.model.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in ("0.weight", "1.running_mean", "3.weight"))
    saved = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert saved["history"][0]["passed"]
    assert (tmp_path / "out" / "report.html").exists()
    assert after.keys() > before.keys()


def test_training_is_as_long_as_the_file_says_and_runs_once_per_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    real = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *a, **k: (steps.append(1), real(self, *a, **k))[1])
    tuned = run(tmp_path)
    assert len(tuned.history) == 1
    assert len(steps) == 2 * 4  # epochs 1 and 2, of 4 batches


def test_training_is_deterministic_and_part_of_the_study(tmp_path: Path) -> None:
    models = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tuned = run(tmp_path / name, output=tmp_path / name / "out")
        assert tuned.quantized is not None
        models.append(tuned.quantized.model.state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    other = FILE.replace("learning_rate: 0.002", "learning_rate: 0.001")
    (tmp_path / "other").mkdir()
    with pytest.raises(BitwrightError) as caught:
        run(tmp_path / "other", other, store=tmp_path / "a" / "out" / "study.db", resume=True)
    assert "training" in str(caught.value)


def test_training_equals_an_independent_loop() -> None:
    """Learning rate, momentum and weight decay as PyTorch's optimizer on all parameters of a float model."""
    text = FILE.replace("root: train.npz", "root: x.npz")
    train = read_lpot(parse_yaml(text, where="a"), where="a").config.quantization.train
    assert isinstance(train, Train)
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(16, 6, generator=generator), torch.arange(16) % 3) for _ in range(6)]
    ours, theirs = network(), network()
    train.run(ours, lambda epoch: batches)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.002, momentum=0.9, nesterov=True, weight_decay=1e-4)
    theirs.train()
    for _ in range(2):
        for x, target in batches[:4]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(x), target).backward()
            optimizer.step()
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Adam: {learning_rate: 0.01, beta_1: 0.8, beta_2: 0.95, epsilon: 0.001, amsgrad: true}", torch.optim.Adam),
        ("AdamW: {learning_rate: 0.01, weight_decay: 0.1}", torch.optim.AdamW),
        ("SGD: {learning_rate: 0.01}", torch.optim.SGD),
    ],
)
@pytest.mark.parametrize("criterion", ["CrossEntropyLoss: {reduction: sum}", "SparseCategoricalCrossentropy: {}"])
def test_every_optimizer_and_loss_trains(text: str, kind: type[Any], criterion: str) -> None:
    train = Train.model_validate(
        read_lpot(
            {"quantization": parse_yaml(f"train: {{optimizer: {{{text}}}, criterion: {{{criterion}}}}}", where="a")},
            where="a",
        ).config.quantization.train
    )
    model = network()
    x, target = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
    before = float(nn.functional.cross_entropy(model.train()(x), target).detach())
    train.run(model, lambda epoch: [(x, target)] * 20)
    assert float(nn.functional.cross_entropy(model(x), target).detach()) < before
    assert type(train.optimizer[0].make([{"params": model.parameters()}])) is kind


def test_a_candidate_that_fails_is_trained_again_from_float(tmp_path: Path) -> None:
    """All candidates start from the float weights, and the model is float again after an error."""
    text = FILE.replace("learning_rate: 0.002", "learning_rate: 1.0e-12").replace("relative: 0.05", "absolute: 0.0")
    tuned = run(tmp_path, text.replace("max_trials: 2", "max_trials: 3"))
    assert 1 <= len(tuned.history) <= 3
    assert tuned.quantized is not None
    weights = tuned.quantized.model.state_dict()
    assert torch.allclose(weights["0.weight"], network().state_dict()["0.weight"], atol=1e-6)


def test_a_training_that_diverges_is_an_error_and_restores_the_model(tmp_path: Path) -> None:
    calibration = "quantization:\n  calibration: {dataloader: {batch_size: 50, dataset: {npz: {root: test.npz}}}}"
    file, work = written(tmp_path, FILE.replace("quantization:", calibration))
    broken = np.full((200, 6), np.inf, np.float32)
    np.savez(tmp_path / "train.npz", inputs=broken, targets=np.zeros(200, np.int64))
    before = {name: tensor.clone() for name, tensor in work.model.state_dict().items()}
    with pytest.raises(TrainError) as caught:
        TuneConfig.load(file).tune(work, backend="tensorrt")
    assert caught.value.problems[0].where == "0:input"
    assert before.keys() == work.model.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in work.model.state_dict().items())


def test_the_workloads_training_data_replaces_the_files(tmp_path: Path) -> None:
    text = FILE.replace("dataset: {npz: {root: train.npz}}", "last_batch: rollover")
    file, work = written(tmp_path, text)
    x = torch.randn(64, 6)
    given = replace(work, training=lambda: torch.utils.data.TensorDataset(x, torch.arange(64) % 3))
    tuned = TuneConfig.load(file).tune(given, backend="tensorrt")
    assert tuned.quantized is not None


def test_a_file_without_its_training_says_what_is_missing(tmp_path: Path) -> None:
    text = "model: {name: a, framework: pytorch}\nquantization: {approach: quant_aware_training}\n"
    file, work = written(tmp_path, text)
    with pytest.raises(PlanError) as caught:
        TuneConfig.load(file).tune(work)
    assert {problem.where for problem in caught.value.problems} == {
        "quantization.train.optimizer",
        "quantization.train.criterion",
        "quantization.train.dataloader",
    }
    assert set(caught.value.codes) == {"training-required"}
