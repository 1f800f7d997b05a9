"""The callback in a real `transformers.Trainer`, on a real small model of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import raises_problem
from safetensors.torch import load_file
from tests.training.loops import common
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from bitwright import BitwrightError, load_checkpoint, quantizers_of
from bitwright.training import Qat
from bitwright.training.loops.huggingface import HuggingFaceQatCallback

CONFIG = {
    "num_channels": 1,
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": 3,
}


def network() -> ResNetForImageClassification:
    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig(**CONFIG))


def images() -> torch.Tensor:
    return torch.nn.functional.interpolate(common.samples()[0], size=16)


def data() -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": x, "labels": y} for x, y in zip(images(), common.samples()[1], strict=True)]


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.optimizer: Any = None
        self.scales: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.optimizer = given["optimizer"]
        assert not self.optimizer.state  # before its first step
        common.optimizer_is_right(self.optimizer, given["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def run(
    folder: Path,
    *,
    options: dict[str, Any] | None = None,
    resume: str | None = None,
    watch: bool = True,
    **settings: Any,
) -> tuple[Qat, Watch, Trainer, dict[str, torch.Tensor]]:
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 20,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "save_steps": 7,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **settings,
    }
    model = network()
    args = TrainingArguments(str(folder), **settings)
    qat = Qat(model, images().split(50), **(options or {}))
    callback, watcher = HuggingFaceQatCallback(qat), Watch()
    trainer = Trainer(
        model,
        args,
        train_dataset=data(),
        eval_dataset=data()[:40],
        callbacks=[callback, *([watcher] if watch else [])],
        optimizer_cls_and_kwargs=callback.optimizer(args, lr=1e-3),
    )
    before = common.scales(model)
    trainer.train(resume_from_checkpoint=resume)
    return qat, watcher, trainer, before


@pytest.mark.parametrize("settings", [{}, {"bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "epoch"}])
def test_it_trains_and_deploys(tmp_path: Path, settings: dict[str, Any]) -> None:
    qat, watch, trainer, before = run(tmp_path, **settings)
    common.falls(watch.losses)
    assert len(watch.losses) == (20 if not settings else 10)
    common.trained(before, qat.model)
    assert (qat.epochs, qat.following) == (2, [])
    rates = {group["name"]: group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert rates["quantizers"] == 1e-3  # the Trainer's schedule goes on from each group's own
    assert rates["weights"] == 1e-2
    common.deploys(qat, tmp_path / "model.onnx", images())


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"quantizer": "plain", "observer": "ema-minmax", "freeze_observers": 1}],
)
def test_resuming_is_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    watch = not options  # nothing is learned by `plain`
    whole, _, _, _ = run(tmp_path / "one", options=options, watch=watch)
    saved = load_file(tmp_path / "one" / "checkpoint-7" / "model.safetensors")
    assert {name for name in saved if name.startswith("bitwright.")}
    again, _, _, _ = run(tmp_path / "two", options=options, resume=str(tmp_path / "one" / "checkpoint-7"), watch=False)
    assert common.same(common.state(whole.model), common.state(again.model))


def test_what_save_pretrained_writes_can_be_read_again(tmp_path: Path) -> None:
    qat, _, trainer, _ = run(tmp_path, num_train_epochs=1)
    trainer.save_model(str(tmp_path / "saved"))
    floating = ResNetForImageClassification.from_pretrained(tmp_path / "saved")  # quantizers' keys are left out
    assert torch.equal(floating.classifier[1].weight, qat.model.classifier[1].weight)  # type: ignore[union-attr,index]
    again = Qat.resumed(network(), qat.plan, qat.quantized.example)
    load_checkpoint(again.model, tmp_path / "saved" / "model.safetensors")
    assert common.same(common.state(again.model), common.state(qat.model))


def test_unsupported_setups_are_rejected(tmp_path: Path) -> None:
    with raises_problem("unsupported-option", where="restore_callback_states_from_checkpoint"):
        run(tmp_path, restore_callback_states_from_checkpoint=True)
    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_steps": 2, "max_steps": 2}
    args = TrainingArguments(str(tmp_path), weight_decay=0.1, **settings)
    model = network()
    qat = Qat(model, images().split(50))
    with pytest.raises(BitwrightError) as caught:
        Trainer(model, args, train_dataset=data(), callbacks=[HuggingFaceQatCallback(qat)]).train()
    assert "scales-decay" in caught.value.codes
    args = TrainingArguments(str(tmp_path / "float"), save_only_model=True, **settings)
    Trainer(network(), args, train_dataset=data()).train()
    with pytest.raises(BitwrightError) as caught:
        run(tmp_path / "float", resume=str(tmp_path / "float" / "checkpoint-2"))
    assert "missing-quantizer-state" in caught.value.codes


def test_gradient_checkpointing_changes_nothing() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **sizes))
    x, y = common.samples(40)
    Qat(model, [x])
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None)  # the older name is deprecated
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.train().zero_grad()
        model(pixel_values=x, labels=y).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert any(name.startswith("bitwright.") for name in gradients[0])
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
    assert len(quantizers_of(model)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["lsq", "plain"])
def test_two_processes_train_one_model(tmp_path: Path, quantizer: str) -> None:
    worker = Path(__file__).with_name("ddp_worker.py")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", str(worker), str(tmp_path), quantizer),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.onnx").is_file()
