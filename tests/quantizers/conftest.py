"""Small models that together have everything that makes interception hard, and how to quantize them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from single_site import Build, build_quantizer
from torch import Tensor, nn

from bitwright.backends import place
from bitwright.graph import capture
from bitwright.plan import Plan
from bitwright.ptq import calibrate
from bitwright.quantizers import prepare


class Residual(nn.Module):
    """Convolutions with norms to fold, a functional add, and a linear."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=bias)
        self.bn2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(F.relu(x + y), 1), 1))


class InPlace(nn.Module):
    """Writes into tensors and goes on with its own names for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.add_(x)
        y *= 2.0
        self.relu(y)  # the result is not used, the tensor is
        return self.second(y)


class Attention(nn.Module):
    """MultiheadAttention, LayerNorm, and a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        return self.out(F.gelu(x + y))


class Functional(nn.Module):
    """No child modules: everything is a function call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6) * 0.4)
        self.mix = nn.Parameter(torch.randn(5, 4) * 0.4)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        y = torch.tanh(F.linear(x, self.weight))
        return torch.cat([y @ self.mix, (y * gain) @ self.mix], dim=-1)


def example(model: nn.Module, batch: int = 4, seed: int = 0) -> Tensor:
    """A batch for any of the models above."""
    shape = {"Residual": (3, 8, 8), "Attention": (5, 8)}.get(type(model).__name__, (6,))
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Any, seed: int = 0) -> Any:
    """A model with the same parameters each time; norms have statistics that aren't 0 and 1."""
    torch.manual_seed(seed)
    model = build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return model


def plan_for(model: nn.Module, target: str = "onnxruntime", **options: Any) -> Plan:
    """The backend's own plan for a model."""
    return place(capture(model, example(model)), target, **options)


def quantized(model: nn.Module, target: str = "onnxruntime", **options: Any) -> Any:
    """The model, prepared and calibrated."""
    batch = example(model)
    prepare(model, plan_for(model, target, **options))
    calibrate(model, [batch, example(model, seed=1)])
    return model


@pytest.fixture
def zoo() -> SimpleNamespace:
    """The models and helpers of this folder."""
    torch.set_num_threads(1)
    return SimpleNamespace(
        Residual=Residual,
        InPlace=InPlace,
        Attention=Attention,
        Functional=Functional,
        example=example,
        seeded=seeded,
        plan_for=plan_for,
        quantized=quantized,
        copy=copy.deepcopy,
    )


@pytest.fixture(params=[Residual, InPlace, Attention, Functional], ids=lambda build: build.__name__)
def any_model(request: pytest.FixtureRequest) -> nn.Module:
    """Each of the models, in eval mode."""
    torch.set_num_threads(1)
    return seeded(request.param).eval()


@pytest.fixture
def build() -> Build:
    """A quantizer of that name and format, calibrated with the tensor."""
    return build_quantizer
