"""QSync's four models run from its published mappers: plan, profile, predict, train and the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bitwright import Plan

WORKLOADS = '''\
"""ResNet-50, VGG-16, BERT-base and RoBERTa-base with QSync's tasks: all layers, small images, narrow encoders."""

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from bitwright import Workload
from bitwright.zoo.imagenet import resnet50, vgg16

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 12, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 24,
}


class Tokens(Dataset):
    """Random tokens with keyword arguments as inputs."""

    def __init__(self, shape, choices):
        self.ids, self.labels = torch.randint(5, 50, shape), torch.randint(0, choices, shape[:1])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index]}, self.labels[index]


def images(name, model):
    torch.manual_seed(0)
    pixels, labels = torch.randn(8, 3, 64, 64), torch.arange(8) % 4
    return Workload(name=name, model=model, inputs=(pixels[:2],), calibration=lambda: [pixels],
                    evaluation=lambda: [(pixels, labels)], training=lambda: TensorDataset(pixels, labels),
                    loss=F.cross_entropy)


def texts(name, model, shape, choices, loss):
    torch.manual_seed(0)
    data = Tokens(shape, choices)
    return Workload(name=name, model=model, inputs={"input_ids": data.ids[:2]},
                    calibration=lambda: [{"input_ids": data.ids}], training=lambda: data, loss=loss,
                    evaluate=lambda predict: {"loss": float(loss(predict(input_ids=data.ids), data.labels))},
                    metric="loss", lower_is_better=True)


def resnet():
    torch.manual_seed(0)
    return images("resnet50", resnet50(classes=4, image_size=64))


def vgg():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = vgg16(classes=4)
    first, second, last = (index for index, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear))
    model.classifier[first] = nn.Linear(model.classifier[first].in_features, 16, device="meta")
    model.classifier[second], model.classifier[last] = nn.Linear(16, 16), nn.Linear(16, 4)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.kaiming_normal_(p) if p.ndim > 1 else nn.init.zeros_(p)
    return images("vgg16", model)


def bert():
    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES))

    def loss(output, target):
        return F.cross_entropy(output.start_logits, target) + F.cross_entropy(output.end_logits, target)

    return texts("bert", model, (8, 12), 12, loss)


def roberta():
    torch.manual_seed(0)
    model = transformers.RobertaForMultipleChoice(transformers.RobertaConfig(**SIZES))
    return texts("roberta", model, (8, 3, 12), 3, lambda output, target: F.cross_entropy(output.logits, target))
'''
MAPPERS = {
    "resnet": "60_ind__resnet50_GVAR_bitplan.npy",
    "vgg": "vgg__vgg16_HESS_bitplan.npy",
    "bert": "bert__bert_WVAR_bitplan.npy",
    "roberta": "roberta__roberta_HESS_bitplan.npy",
}


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", MAPPERS)
def test_a_published_mapper_trains_its_model(name: str, tmp_path: Path, data_dir: Path) -> None:
    mapper = data_dir / "peers" / "qsync" / MAPPERS[name]
    if not mapper.exists():
        pytest.skip("no published mappers")
    (tmp_path / "models.py").write_text(WORKLOADS)
    workload = f"models.py:{name}"

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "bitwright", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = run("plan", workload, "--mapper", str(mapper), "-o", "plan.yaml")
    assert "8 bit:" in said
    formats = [spec.format for spec in Plan.load(tmp_path / "plan.yaml").compute.values()]
    assert formats.count("int8") >= 2
    assert formats.count("fp16") >= 10
    run("profile", workload, "--plan", "plan.yaml", "--batch", "4", "--rounds", "3", "--no-casts", "--cache", "samples",
        "-o", "device.json")  # fmt: skip
    predicted = run("predict", workload, "--profile", "device.json", "--plan", "plan.yaml", "--batch", "4",
                    "--compare", "3", "--report", "forecast")  # fmt: skip
    assert "ms" in predicted
    run("train", workload, "--plan", "plan.yaml", "--batch", "4", "--epochs", "1", "--lr", "0.0001",
        "--no-tensorboard", "-o", "run")  # fmt: skip
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 2 if "steps" in result else result["metrics"]
    run("report", "run", "forecast", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "fp16" in page
    assert "int8" in page
