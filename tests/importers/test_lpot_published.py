"""LPOT's published files run: on images, on tokens or on loaders in code, with few samples and two candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from bitwright.core.documents import read_yaml
from bitwright.importers.lpot import Benchmark, Quantization

pytestmark = [pytest.mark.slow, pytest.mark.realdata, pytest.mark.timeout(900)]
IMAGES = {
    "image_recognition__imagenet__conf@v1.0b-3585c3": "static",
    "image_recognition__resnest__conf@v1.0b-736cb2": "static",
    "image_recognition__se_resnext__conf@v1.2-96f8b0": "static",
    "image_recognition__efficientnet__conf_mobilenetv3_rw@v1.1-007421": "static",
    "image_recognition__imagenet__cpu__ptq__conf_ipex@v1.3-48b40d": "static",
    "image_recognition__torchvision_models__quantization__ptq__cpu__fx__conf@v1.10-d1dab0": "static",
    "image_recognition__torchvision_models__quantization__ptq__cpu__eager__conf_dump_tensors@v1.10-c1defd": "static",
    "eager__image_recognition__imagenet__cpu__qat__conf_buildin@v1.7-d50cdb": "trained by the file",
    "image_recognition__torchvision_models__quantization__qat__eager__conf_buildin@v1.10-e7feb0": "trained by the file",
    "image_recognition__imagenet__cpu__qat__conf@v1.3-953b2c": "trained by q_func",
}
OTHERS = {
    "nlp__huggingface_models__text-classification__quantization__ptq_dynamic__fx__conf@v1.14-f14a50": "dynamic",
    "speech_recognition__rnnt__quantization__ptq_dynamic__eager__conf@v1.10-873571": "dynamic",
    "nlp__huggingface_models__text-classification__quantization__qat__fx__conf_qat@v1.11-d0183b": "trained by q_func",
    "language_translation__conf@v1.3-933192": "static",
    "dlrm__conf@v1.0a-611c27": "static",
    "object_detection__ssd_resnet34__quantization__ptq__fx__conf@v1.10-d55d54": "static",
    "nlp__huggingface_models__question-answering__quantization__ptq_static__fx__conf@v1.10-cba682": "static",
}
FEW = {"sampling_size": 8, "iterations": 1, "batch_size": 4, "num_of_instance": 1, "cores_per_instance": 1}
"""Smaller values of keys, where a file has them."""


class Pictures(nn.Module):
    """A network for pictures of any size that takes milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 4, 4, 8), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.bn(self.conv1(x)))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class Numbers(nn.Module):
    """Linear layers and a sum, which is an operator without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        logits: Tensor = self.last(x + torch.relu(self.middle(x)))
        return logits


def small(value: Any, folder: Path) -> Any:
    """The same file with the paths of this test, smaller numbers and two candidates."""
    if isinstance(value, list):
        return [small(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: FEW.get(key, small(item, folder)) for key, item in value.items()}
    if "root" in made and not isinstance(made["root"], dict):
        made["root"] = str(folder)
    if "end_epoch" in made and "optimizer" in made:
        made |= {"end_epoch": made.get("start_epoch", 0) + 1, "iteration": 2}
    return made


def config_of(name: str, folder: Path, data_dir: Path) -> dict[str, Any]:
    file = data_dir / "peers" / "lpot" / f"{name}.yaml"
    if not file.exists():
        pytest.skip("no published files")
    config: dict[str, Any] = small(read_yaml(file, what="an LPOT file"), folder)
    tuning = config["tuning"]
    tuning.pop("timeout", None)
    tuning["exit_policy"] = {"timeout": 0, "max_trials": 2}
    return config


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images of two classes."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(8):
        (folder / f"c{number % 2}").mkdir(exist_ok=True)
        pixels = random.integers(0, 256, (240, 260, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"c{number % 2}" / f"{number}.jpg")
    return folder


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.001)
    model.train()
    for x, target in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()


def checked(quantizer: Quantization, kind: str) -> Any:
    """Run the search. The best model agrees with its artefact."""
    model = quantizer()
    tuned = quantizer.tuned
    assert tuned is not None
    assert 1 <= len(tuned.history) <= 2
    assert tuned.on_runtime is not None
    quantized = model.quantized
    formats = [str(spec.format) for spec in quantized.plan.sites.values() if spec.quantizes]
    assert any("dynamic" in text for text in formats) == (kind == "dynamic")
    return model


@pytest.mark.parametrize("name", IMAGES)
def test_files_on_a_folder_of_images(name: str, pictures: Path, data_dir: Path) -> None:
    config = config_of(name, pictures, data_dir)
    torch.manual_seed(0)
    quantizer = Quantization(config)
    quantizer.model = Pictures().eval()
    if IMAGES[name] == "trained by q_func":
        quantizer.q_func = lambda model: train(model, [(torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 0, 1]))])
        quantizer.calib_dataloader = [torch.randn(4, 3, 64, 64)]
    if IMAGES[name] == "trained by the file" and "dataloader" not in config["quantization"]["train"]:
        quantizer.train_dataloader = [(torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 0, 1]))] * 2
    if "evaluation" not in config or "dataloader" not in str(config["evaluation"]):
        quantizer.eval_dataloader = [(torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 0, 1]))]
    model = checked(quantizer, IMAGES[name])
    if "performance" in config.get("evaluation", {}):
        benchmark = Benchmark(config)
        benchmark.model = model
        seconds = benchmark("performance")["performance"][2]
        assert len(seconds) == 1
        assert seconds[0] > 0


@pytest.mark.parametrize(
    ("name", "approach"),
    [
        *((name, None) for name in OTHERS),
        *((name, "post_training_auto_quant") for name, kind in OTHERS.items() if kind == "dynamic"),
    ],
)
def test_files_with_loaders_and_eval_func_in_code(
    name: str, approach: str | None, pictures: Path, data_dir: Path
) -> None:
    config = config_of(name, pictures, data_dir)
    if approach is not None:
        config["quantization"]["approach"] = approach
    torch.manual_seed(0)
    net = Numbers().eval()
    x = torch.randn(512, 16)
    with torch.no_grad():
        first, second = net(x).topk(2).values.T
        x = x[(first - second).topk(64).indices]  # clear decisions, which INT8 doesn't change
        labels = net(x).argmax(1)
    quantizer = Quantization(config)
    quantizer.model = net
    quantizer.calib_dataloader = [(x[:32], labels[:32])]
    quantizer.eval_func = lambda model: float((model(x).argmax(1) == labels).float().mean())
    if OTHERS[name] == "trained by q_func":
        quantizer.q_func = lambda model: train(model, [(x, labels)])
    kind = OTHERS[name]
    model = quantizer() if approach is not None else checked(quantizer, kind)
    assert quantizer.tuned is not None
    assert quantizer.tuned.met_goal
    assert float((model(x).argmax(1) == labels).float().mean()) >= 0.9
