"""Small models with a batch and a loss, float and prepared, and profiles that nobody had to measure."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.backends import make_plan
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.profiling.device_profile import DeviceProfile, OperatorCost, OperatorTime, TensorsCost
from bitwright.profiling.profiled_step import CLOCKS, TimedStep, Variant
from bitwright.profiling.step_timer import Key, Sample, StepTimer
from bitwright.ptq import calibrate
from bitwright.quantizers import compile_arithmetic, prepare
from bitwright.training.config import StepSettings
from bitwright.zoo import DigitsNet


class Net(nn.Module):
    """Convolution, norm, a shortcut, a view, a product: a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 8, 1)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.conv(x)))
        y = F.relu(self.mix(y) + y)
        return self.head(self.drop(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1)))


def net() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))), F.cross_entropy


def digits() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return DigitsNet(), (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))), F.cross_entropy


def logits_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def bert(layers: int = 2) -> tuple[nn.Module, Any, Any]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=24, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=48, vocab_size=64
    )
    batch = ({"input_ids": torch.randint(0, 64, (2, 8))}, torch.randint(0, 2, (2,)))
    return BertForSequenceClassification(config), batch, logits_loss


def int8_plan(model: nn.Module, batch: Any, backend: str = "onnxruntime") -> Plan:
    return make_plan(capture(model, batch[0]), backend, quantizer="lsq", saturating=False)


def prepared(model: nn.Module, batch: Any, plan: Plan, settings: StepSettings | None = None) -> Variant:
    made = copy.deepcopy(model)
    prepare(made, plan, inputs=batch[0])
    calibrate(made, [batch[0]])
    settings = settings or StepSettings(fuse=False)
    compile_arithmetic(made, settings.fuse)
    return Variant(model=made.train(), plan=plan, settings=settings)


def timed_sample(variant: Variant, batch: Any, loss: Any, *, saving: bool = False) -> Sample:
    step = TimedStep(variant.model.train(), [batch], loss, variant.settings)
    timer = StepTimer(variant.model, variant.plan, variant.settings, CLOCKS["wall"])
    return timer.run(step, saving=saving)


def profile_of(keys: Iterable[Key], *, forward: float = 1e-3, backward: float = 2e-3, **more: Any) -> DeviceProfile:
    """Every key costs the same; work on all parameters is free."""
    return DeviceProfile(
        bitwright_profile=1,
        device="made up",
        operators=[
            OperatorCost(
                operator=text,
                format=format,
                forward=OperatorTime(seconds=0.0 if format == "accumulate" else forward),
                backward=OperatorTime(seconds=0.0 if format == "accumulate" else backward),
            )
            for text, format in keys
        ],
        tensors=[
            TensorsCost(name=name, per_element=0.0, per_tensor=0.0)
            for name in ("sgd/loop", "adamw/loop", "clip", "accumulate", "zero_grad")
        ],
        **more,
    )
