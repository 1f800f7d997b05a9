"""Errors in a user's loss and training data are reported as errors of user code, by every verb."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from bitwright import Workload

DATA, LABELS = torch.randn(64, 6), torch.randint(0, 3, (64,))


class Items(Dataset):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.item(index)


def good(model=None, **changes):
    torch.manual_seed(0)
    fields = dict(
        name="mine",
        model=model or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        inputs=(DATA[:1],),
        calibration=lambda: [DATA],
        evaluation=lambda: [(DATA, LABELS)],
        training=lambda: TensorDataset(DATA, LABELS),
        loss=F.cross_entropy,
    )
    return Workload(**{**fields, **changes})


def raises():
    def loss(output, target):
        raise ValueError("no such class")  # here: raises
    return good(loss=loss)


class PerSample(nn.Module):
    def forward(self, output, target):  # here: many
        return F.cross_entropy(output, target, reduction="none")


def many():
    return good(loss=PerSample())


def number():
    return good(loss=lambda output, target: F.cross_entropy(output, target).item())  # here: number


def detached():
    return good(loss=lambda output, target: F.cross_entropy(output.detach(), target))  # here: detached


def frozen():
    return good(model=nn.Linear(6, 3).requires_grad_(False))


def inputs_alone():
    return good(training=lambda: TensorDataset(DATA))


def item_raises():
    def item(index):
        raise KeyError("image")  # here: item
    return good(training=lambda: Items(item))


def unequal():
    return good(training=lambda: Items(lambda index: (DATA[index, : 3 + index % 2], LABELS[index])))


def too_short():
    return good(training=lambda: Items(lambda index: (DATA[index, :3], LABELS[index])))


def no_training():
    def training():
        raise RuntimeError("no disk")  # here: training
    return good(training=training)


def nothing():
    return good(training=lambda: TensorDataset(DATA[:0], LABELS[:0]))
"""
CLUSTER = """
bitwright_cluster: 1
link: {latency_us: 50, gbit_per_s: 10}
devices:
  one: {profile: here.json, count: 1}
  other: {profile: here.json, count: 1}
"""


def at(name: str) -> str:
    """The place in the file with this mark."""
    lines = OWN.lstrip("\n").splitlines()
    return f"own.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# here: {name}'))}"


STEPS = {
    "profile": ["--rounds", "3", "-o", "other.json"],
    "profile from a data sheet": ["--published", "nvidia-t4", "-o", "other.json"],
    "predict": ["--profile", "here.json", "--compare", "3"],
    "plan-cluster": ["--cluster", "cluster.yaml", "--scores", "scores.json", "-o", "plan.yaml"],
    "train": ["--epochs", "1", "-o", "run"],
    "train quantized": ["--epochs", "1", "--precision", "int8", "-o", "run"],
}


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload file, and what verbs made of its good workload."""
    folder = tmp_path_factory.mktemp("owners")
    (folder / "own.py").write_text(OWN.lstrip("\n"))
    (folder / "cluster.yaml").write_text(CLUSTER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        profile = run("profile", "own.py:good", "--kernel", "int8", "--rounds", "3", "--cache", "c", "-o", "here.json")
        assert profile.code == 0, profile.err
        assert run("score", "own.py:good", "--indicator", "random", "-o", "scores.json").code == 0
    return folder


def refused(run, verb: str, function: str, *words: str, options: list[str] | None = None) -> None:
    ran = run(verb.split()[0], f"own.py:{function}", *(STEPS[verb] if options is None else options))
    assert ran.code == 2, ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in " ".join(ran.err.split()), ran.err
    assert not Path("run", "checkpoint.safetensors").exists()


LOSSES = {
    "raises": [f"workload 'mine': loss raised ValueError: no such class, at {at('raises')}", "output: tensor ("],
    "many": [f"loss returned an invalid value, at {at('many')}", ",)')", "return the mean over samples"],
    "number": [f"loss returned an invalid value, at {at('number')}", "got 'float'", "without .item()"],
    "detached": [
        f"loss has no gradient, at {at('detached')}",
        "got 'tensor () of float32'",
        "without .item(), .detach()",
    ],
}


@pytest.mark.parametrize("verb", STEPS)
@pytest.mark.parametrize("function", LOSSES)
def test_errors_in_a_loss_are_user_errors(
    run, folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, function: str
) -> None:
    monkeypatch.chdir(folder)
    refused(run, verb, function, *LOSSES[function])


@pytest.mark.parametrize("function", LOSSES)
def test_errors_in_a_loss_are_user_errors_of_score(
    run, folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.chdir(folder)
    for indicator in ("gradient-variance", "hessian"):
        refused(run, "score", function, *LOSSES[function], options=["--indicator", indicator])


DATA = {
    "inputs_alone": ["workload 'mine': a training batch is not (inputs, target)", "got 'list of 1'"],
    "item_raises": [f"the training set raised KeyError: 'image', at {at('item')}", "items (inputs, target)"],
    "unequal": ["the training set raised RuntimeError: stack expects each tensor to be equal size", "collate=…"],
    "too_short": ["RuntimeError: mat1 and mat2 shapes cannot be multiplied", "got 'tensor (64, 3)'"],
    "no_training": [f"training raised RuntimeError: no disk, at {at('training')}"],
    "nothing": ["the training set is empty"],
}


@pytest.mark.parametrize("verb", ["profile", "plan-cluster", "train", "train quantized"])
@pytest.mark.parametrize("function", DATA)
def test_errors_in_training_data_are_user_errors(
    run, folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, function: str
) -> None:
    monkeypatch.chdir(folder)
    refused(run, verb, function, *DATA[function])


@pytest.mark.parametrize("verb", ["profile", "predict", "train"])
def test_a_model_without_trainable_parameters_is_rejected(
    run, folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(folder)
    refused(run, verb, "frozen", "call requires_grad_(True) on the parameters to train")


def test_profiles_know_the_loss_by_its_own_name(folder: Path) -> None:
    assert '"loss:cross_entropy(output=' in (folder / "here.json").read_text()
