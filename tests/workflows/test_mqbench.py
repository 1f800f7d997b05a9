"""Files of MQBench's toolkit run from the model and the data to the deployed artefact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError
from bitwright.core.registry import NETWORKS, OBSERVERS, QUANTIZERS
from bitwright.importers.mqbench import load_mqbench, mqbench_settings, read_mqbench
from bitwright.importers.mqbench.settings import _OBSERVERS, _QUANTIZERS
from bitwright.importers.mqbench.toolkit import BACKENDS
from bitwright.importers.mqbench.toolkit_workload import image_workload
from bitwright.ptq import read_steps
from bitwright.quantizers import quantizers_of
from bitwright.workflows import MqbenchRun, quantize_mqbench
from bitwright.workflows.mqbench import _plan

FILE = """\
extra_prepare_dict:
  extra_qconfig_dict:
    w_observer: MSEObserver
    a_observer: EMAMSEObserver
    w_fakequantize: AdaRoundFakeQuantize
    a_fakequantize: QDropFakeQuantize
    w_qscheme: {bit: 3, symmetry: false, per_channel: true, pot_scale: false, p: 2.4}
    a_qscheme: {bit: 4, symmetry: false, per_channel: false, pot_scale: false, p: 2.5}
quantize:
  quantize_type: advanced_ptq
  cali_batchsize: 3
  reconstruction:
    {pattern: block, scale_lr: 4.0e-5, warm_up: 0.2, weight: 0.01, max_count: 500, b_range: [20, 2], prob: 0.5,
     keep_gpu: true, round_mode: learned_hard_sigmoid}
model: {type: tiny, kwargs: {num_classes: 3}, path: /nowhere}
data: {path: /nowhere, batch_size: 4, num_workers: 4, pin_memory: true, input_size: 12, test_resize: 14}
process: {seed: 1005}
"""
NAIVE = FILE.replace("advanced_ptq", "naive_ptq")


class Tiny(nn.Module):
    """A stem, a residual block and a head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.block(x))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def tiny(*, classes: int = 1000, dropout: float = 0.0, norm: Any = None, image_size: int = 224) -> Tiny:
    return Tiny(classes)


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    NETWORKS.register("tiny", tiny)
    yield
    NETWORKS.unregister("tiny")


def write_images(folder: Path, *, size: int = 16) -> Path:
    """Images of three classes with different colours."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 3)):
        for index in range(3):
            place = folder / part / f"n{index}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 120, (size, size, 3), dtype=np.uint8)
                pixels[..., index] += 120
                Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def run(text: str, folder: Path, data: Path, **options: Any) -> MqbenchRun:
    file = folder / "config.yaml"
    file.write_text(text)
    return quantize_mqbench(file, folder / "out", data=data, **options)


def read(text: str) -> Any:
    return read_mqbench(parse_yaml(text, where="a"), where="a").config


def code_of(text: str, folder: Path, data: Path, **options: Any) -> list[str | None]:
    with pytest.raises(BitwrightError) as caught:
        run(text, folder, data, **options)
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, "qdrop"),
        pytest.param(
            {"pattern: block": "pattern: layer", "prob: 0.5": "prob: 1.0"}, "adaround", marks=pytest.mark.slow
        ),
        pytest.param({"prob: 0.5": "prob: 1.0"}, "brecq", marks=pytest.mark.slow),
        pytest.param({"pattern: block": "pattern: layer"}, "qdrop", marks=pytest.mark.slow),
    ],
)
def test_reconstruction_runs(changes: dict[str, str], step: str, tmp_path: Path, images: Path) -> None:
    text = FILE
    for old, new in changes.items():
        text = text.replace(old, new)
    result = run(text, tmp_path, images, iterations=2)
    assert [one.where for one in result.accuracies] == ["float", "simulated", "onnxruntime"]
    assert result.deployment is not None
    (ran,) = result.deployment.quantized.steps
    assert ran.step.startswith(f"{step}:iterations=2,")
    assert ran.units == (4 if "layer" in text else ran.units)
    sites = result.deployment.quantized.plan.sites
    assert str(sites["block.0:weight"].format) == "uint3/channel/asym"
    assert str(sites["block.1:output"].format) == "uint4/tensor/asym"
    assert sites["stem:weight"].format.bits == sites["fc:weight"].format.bits == 8
    assert (sites["block.0:weight"].observer, sites["block.0:weight"].observer_options) == ("mse", {"p": 2.4})
    assert (sites["block.1:output"].observer, sites["block.1:output"].observer_options) == ("ema-mse", {"p": 2.5})
    assert result.failures() == []
    assert any("untrained" in note for note in result.notes)
    assert any("2 iterations instead of 500" in note for note in result.notes)
    json.dumps(result.to_dict(), default=str)


def test_a_float_run_only_evaluates(tmp_path: Path, images: Path) -> None:
    text = FILE[FILE.index("model:") :]
    result = run(text, tmp_path, images)
    assert [one.where for one in result.accuracies] == ["float"]
    assert result.accuracies[0].samples == 9
    assert not (tmp_path / "out").exists()


def test_norms_are_merged_and_the_checkpoint_is_loaded(tmp_path: Path, images: Path) -> None:
    torch.manual_seed(3)
    trained = Tiny(3).eval()
    nn.init.uniform_(trained.norm.running_var, 0.5, 2.0)
    nn.init.normal_(trained.norm.running_mean)
    nn.init.normal_(trained.norm.weight)
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in trained.state_dict().items()}}, tmp_path / "a"
    )
    workload, notes = image_workload(read(FILE), data=images, checkpoint=tmp_path / "a")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in workload.model.modules())
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(workload.model(x), trained(x))
    assert notes == []


def test_calibration_takes_batches_of_random_training_images(images: Path) -> None:
    def batches(seed: int) -> list[Tensor]:
        workload, _ = image_workload(read(FILE.replace("1005", str(seed))), data=images)
        assert workload.calibration is not None
        return list(workload.calibration())

    first, again, other = batches(1), batches(1), batches(2)
    assert [len(batch) for batch in first] == [4, 4, 4]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_one_folder_serves_calibration_and_evaluation(tmp_path: Path, images: Path) -> None:
    flat = tmp_path / "images"
    flat.mkdir()
    for index, file in enumerate(sorted((images / "val").rglob("*.png"))):
        (flat / f"{index:04d}_{index % 3:04d}.png").write_bytes(file.read_bytes())
    workload, notes = image_workload(read(FILE), data=tmp_path)
    assert workload.evaluation is not None
    assert torch.cat([labels for _, labels in workload.evaluation()]).tolist() == [0, 1, 2] * 3
    assert any("the same images" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize(("integer", "kind"), [("true", "qdq"), ("false", "clip-ranges")])
def test_deploy_writes_and_checks_the_artefact(integer: str, kind: str, tmp_path: Path, images: Path) -> None:
    text = (
        NAIVE.replace("bit: 3, symmetry: false", "bit: 8, symmetry: true")
        .replace("bit: 4, symmetry: false", "bit: 8, symmetry: true")
        .replace("cali_batchsize: 3", "cali_batchsize: 1\n  backend: Tensorrt")
        .replace(
            "model: {type",
            f"  deploy: {{output_path: /none, model_name: net, deploy_to_qlinear: {integer}}}\nmodel: {{type",
        )
    )
    result = run(text, tmp_path, images)
    assert result.artefact is not None
    assert result.artefact.kind == kind
    assert (tmp_path / "out" / "net_deploy_model.onnx").is_file()
    assert result.failures() == []
    assert any("not in /none" in note for note in result.notes)
    if kind == "qdq":
        assert result.check is not None
        assert result.check.passed
    else:
        assert result.artefact.sidecar is not None
        assert result.artefact.sidecar.is_file()
        assert any("isn't checked" in note for note in result.notes)


@pytest.mark.parametrize(
    ("section", "left"),
    [
        ("extra_quantizer_dict: {exclude_module_name: [block]}", {"block.0", "block.2"}),
        ("extra_quantizer_dict: {exclude_node_name: [block_2]}", {"block.2"}),
        ("extra_quantizer_dict: {exclude_function_type: [torch.nn.functional.linear]}", {"fc"}),
        ("leaf_module: [Sequential]", {"block.0", "block.2"}),
    ],
)
def test_named_parts_stay_in_float(section: str, left: set[str], images: Path) -> None:
    config = read(NAIVE.replace("\nquantize:", f"\n  {section}\nquantize:"))
    settings = mqbench_settings(config)
    assert settings is not None
    workload, _ = image_workload(config, data=images)
    plan, _ = _plan(workload, settings, [])
    assert {name.rpartition(":")[0] for name in plan.sites if name.endswith(":weight")} == (
        {"stem", "block.0", "block.2", "fc"} - left
    )


def test_problems_come_before_the_work(tmp_path: Path, images: Path) -> None:
    wrong = FILE.replace("type: tiny", "type: tinny")
    assert code_of(wrong, tmp_path, tmp_path / "none") == ["unknown-name", "no-data"]
    assert code_of(FILE, tmp_path, images, checkpoint=tmp_path / "none") == ["no-such-checkpoint"]
    assert code_of(FILE.replace("num_classes: 3", "num_classes: 2"), tmp_path, images) == ["invalid-data"]
    (tmp_path / "bad.pth").write_bytes(b"not a checkpoint")
    assert code_of(FILE, tmp_path, images, checkpoint=tmp_path / "bad.pth") == ["damaged-checkpoint"]
    torch.save({"fc.weight": torch.zeros(3, 8)}, tmp_path / "part.pth")
    assert code_of(FILE, tmp_path, images, checkpoint=tmp_path / "part.pth") == ["checkpoint-mismatch"]
    excluded = FILE.replace("\nquantize:", "\n  extra_quantizer_dict: {exclude_module_name: [blok]}\nquantize:")
    assert code_of(excluded, tmp_path, images) == ["unknown-operator"]
    with pytest.raises(BitwrightError) as caught:
        quantize_mqbench(tmp_path / "config.yaml", data=images)
    assert caught.value.codes == ["option-missing"]
    zoo = "qparams: {w_method: lsq, a_method: lsq, bit: 4}\nbackend: academic\n"
    assert code_of(zoo, tmp_path, images) == ["not-a-toolkit-file"]
    assert not (tmp_path / "out").exists()


def test_options_of_quantizers_are_honoured_or_refused(tmp_path: Path, images: Path) -> None:
    pact = NAIVE.replace("QDropFakeQuantize", "PACTFakeQuantize").replace(
        "    w_qscheme", "    a_fakeq_params: {alpha: 0.25, use_grad_scaling: true}\n    w_qscheme"
    )
    result = run(pact, tmp_path, images)
    assert result.deployment is not None
    quantizer = quantizers_of(result.deployment.quantized.model)["block.1:output"]
    assert float(quantizer.grid().scale * 15) == pytest.approx(0.25, rel=0.1)
    assert any("use_grad_scaling" in note for note in result.notes)
    assert code_of(pact.replace("alpha", "beta"), tmp_path, images) == ["unknown-key"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_runs(name: str, tmp_path: Path, images: Path) -> None:
    text = NAIVE.replace("  cali_batchsize: 3", f"  cali_batchsize: 1\n  backend: {name}")
    text = text.replace("AdaRoundFakeQuantize", "FixedFakeQuantize").replace("QDropFakeQuantize", "FixedFakeQuantize")
    result = run(text, tmp_path, images)
    assert result.failures() == []
    assert len(result.accuracies) >= 2


@pytest.mark.slow
def test_every_observer_and_quantizer_runs_or_is_refused(tmp_path: Path, images: Path) -> None:
    refused = []
    for index, observer in enumerate(_OBSERVERS):
        for quantizer in _QUANTIZERS:
            text = NAIVE.replace("EMAMSEObserver", observer).replace(
                "w_observer: MSEObserver", f"w_observer: {observer}"
            )
            text = text.replace("AdaRoundFakeQuantize", quantizer).replace("QDropFakeQuantize", quantizer)
            text = (
                text.replace("symmetry: false", "symmetry: true")
                .replace("bit: 3", "bit: 8")
                .replace("bit: 4", "bit: 8")
            )
            settings = mqbench_settings(read(text))
            assert settings is not None
            assert settings.observer in OBSERVERS
            assert settings.activations in QUANTIZERS
            if index % 4 and quantizer != "FixedFakeQuantize":
                continue  # each observer with one quantizer, and each quantizer with several observers
            try:
                run(text, tmp_path, images)
            except BitwrightError as error:
                refused.append((quantizer, error.codes))
    assert {quantizer for quantizer, _ in refused} <= {"NNIEFakeQuantize", "DoReFaFakeQuantize", "PACTFakeQuantize"}


@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "min_max__mbv2_8_8",
        "mse__reg800_4_8",
        "adaround__r18_8_8_trt",
        "adaround__r18_2_4",
        "brecq__r18_2_4",
        "qdrop__mbv2_2_4",
        "fp32__mbv2",
        "fp32__r50",
    ],
)
@pytest.mark.timeout(1200)
def test_published_files_run_unchanged(name: str, data_dir: Path, tmp_path: Path, images: Path) -> None:
    file = data_dir / "peers" / "mqbench" / "application" / f"imagenet_example__PTQ__configs__{name}.yaml"
    if not file.is_file():
        pytest.skip("no published files")
    few = tmp_path / "images"
    for part in ("train", "val"):
        (few / part / "n0").mkdir(parents=True)
        for number, source in enumerate(sorted((images / part).rglob("*.png"))[:2]):
            (few / part / "n0" / f"{number}.png").write_bytes(source.read_bytes())
    result = quantize_mqbench(file, tmp_path / "out", data=few, iterations=1)
    assert result.failures() == []
    assert len(result.accuracies) == (1 if name.startswith("fp32") else 3)
    assert (result.artefact is not None) == name.endswith("trt")


@pytest.mark.realdata
@pytest.mark.slow
def test_published_files_have_a_plan(data_dir: Path, images: Path) -> None:
    files = sorted((data_dir / "peers" / "mqbench" / "application").glob("*.yaml"))
    if not files:
        pytest.skip("no published files")
    plans = 0
    for file in files:
        config = load_mqbench(file).config
        small = config.data.model_copy(update={"input_size": 64, "test_resize": 72, "batch_size": 2})
        config = config.model_copy(update={"data": small})
        workload, notes = image_workload(config, data=images)
        assert sum("untrained" in note for note in notes) == 1
        settings = mqbench_settings(config)
        if settings is None:
            continue
        plan, _ = _plan(workload, settings, notes)
        bits = {spec.format.bits for name, spec in plan.sites.items() if name.endswith(":weight")}
        assert bits == {8, config.extra_prepare_dict.extra_qconfig_dict.w_qscheme.bit}
        read_steps(settings.steps)
        plans += 1
    assert plans == len(files) - sum("fp32" in file.name for file in files)
