"""Names of operators: what a plan written today stands on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.backends import make_plan
from bitwright.core.errors import BitwrightError
from bitwright.graph import capture
from bitwright.graph.graph import SiteName, operator_name

torch.set_num_threads(1)


def modules() -> Iterator[tuple[nn.Module, Any]]:
    """Every module of torch.nn that stands for one operator, with an input for it."""
    for n in (1, 2, 3):
        x = torch.randn(2, 4, *[8] * n)
        for name in ("Conv", "ConvTranspose"):
            yield getattr(nn, f"{name}{n}d")(4, 3, 3), x
        for name in ("BatchNorm", "InstanceNorm"):
            yield getattr(nn, f"{name}{n}d")(4), x
        for name in ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
            yield getattr(nn, f"{name}{n}d")(2), x
        yield getattr(nn, f"MaxPool{n}d")(2, return_indices=True), x
        yield getattr(nn, f"LPPool{n}d")(2, 2), x
        yield getattr(nn, f"Dropout{n}d")(), x
        for name in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
            yield getattr(nn, f"{name}{n}d")(1), x
        yield getattr(nn, f"ConstantPad{n}d")(1, 0.5), x
    image, x = torch.randn(2, 4, 8, 8), torch.randn(2, 4)
    for module in (
        nn.FractionalMaxPool2d(2, output_size=3), nn.Unfold(2), nn.PixelShuffle(2), nn.PixelUnshuffle(2),
        nn.ChannelShuffle(2), nn.LocalResponseNorm(2), nn.Upsample(scale_factor=2), nn.Softmax2d(),
        nn.GroupNorm(2, 4), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Flatten(), nn.Dropout(),
    ):  # fmt: skip
        yield module, image
    for module in (
        nn.Linear(4, 3), nn.LayerNorm(4), nn.RMSNorm(4), nn.Unflatten(1, (2, 2)), nn.Softmax(1),
        nn.LogSoftmax(1), nn.Softmin(1), nn.GLU(), nn.PReLU(), nn.Threshold(0.1, 0.2),
    ):  # fmt: skip
        yield module, x
    for name in (
        "ReLU", "ReLU6", "Hardtanh", "LeakyReLU", "GELU", "SiLU", "Mish", "ELU", "SELU", "CELU", "Softplus",
        "Sigmoid", "Tanh", "Hardswish", "Hardsigmoid", "LogSigmoid", "Softsign", "Tanhshrink", "Softshrink",
        "Hardshrink", "RReLU",
    ):  # fmt: skip
        yield getattr(nn, name)(), x
    yield nn.Embedding(10, 3), torch.arange(4)
    yield nn.EmbeddingBag(10, 3), torch.arange(4)[None]
    yield nn.Bilinear(4, 4, 3), (x, x)
    yield nn.CosineSimilarity(), (x, x)
    yield nn.Fold((4, 5), (2, 2)), torch.randn(1, 12, 12)


class Holder(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, *args: Tensor) -> Any:
        return self.child(*args)


@pytest.mark.parametrize(
    ("module", "inputs"), list(modules()), ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else ""
)
@pytest.mark.parametrize("train", [False, True])
def test_a_module_that_is_one_operator_gives_it_its_name(module: nn.Module, inputs: Any, train: bool) -> None:
    graph = capture(Holder(module), inputs, train=train)
    # a norm counts its batches when it trains; that is no number to quantize
    assert [op.name for op in graph.ops if op.outputs[0].is_floating] == ["child"]


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.LSTM, "child"), (nn.GRU, "child"), (nn.RNN, "child"), (nn.LSTMCell, "child"), (nn.RNNCell, "child")],
)
def test_recurrent_modules_have_their_path(module: Any, name: str) -> None:
    assert name in capture(Holder(module(4, 3)), torch.randn(2, 4)).by_name


def test_a_subclass_counts_as_its_base() -> None:
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    assert list(capture(Holder(Mine(4, 4)), torch.ones(1, 4)).by_name) == ["child", "child/relu#0"]


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("layer1.0.conv1", 0, "conv2d", 0, "conv2d"), "layer1.0.conv1"),
        (("layer1.0.conv1", 2, "conv2d", 0, "conv2d"), "layer1.0.conv1#2"),
        (("layer1.0.conv1", 0, "conv2d", 1, "conv2d"), "layer1.0.conv1/conv2d#1"),
        (("layer1.0", 0, "add", 3, None), "layer1.0/add#3"),
        (("layer1.0", 1, "add", 0, None), "layer1.0#1/add#0"),
        (("", 0, "add", 0, None), "/add#0"),
        (("", 0, "linear", 0, "linear"), "/linear#0"),
    ],
)
def test_names_can_be_taken_apart(parts: tuple[str, int, str, int, str | None], name: str) -> None:
    path, call, kind, index, primary = parts
    assert operator_name(*parts) == name
    site = SiteName.parse(f"{name}:input0")
    assert (site.path, site.call, site.index, site.port) == (path, call, index, "input0")
    assert site.kind == (None if kind == primary and index == 0 and path else kind)


@pytest.mark.parametrize("text", ["", ":", "conv1", ":input", "conv1/add:input", "a#x:input", "a:b:c", "/add#:x"])
def test_what_is_no_site(text: str) -> None:
    with pytest.raises(BitwrightError) as caught:
        SiteName.parse(text)
    assert caught.value.codes == ["invalid-site-name"]
    assert caught.value.problems[0].value == text
    assert caught.value.problems[0].fix


def test_modules_that_sites_can_not_be_named_after_are_listed() -> None:
    model = nn.Sequential()
    for name in ("a#0", "b/c", "d:e", "fine"):
        model.add_module(name, nn.Linear(4, 4))
    with pytest.raises(BitwrightError) as caught:
        make_plan(capture(model, torch.ones(1, 4)))
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [
        ("module-name", name) for name in ("a#0", "b/c", "d:e")
    ]
    assert all("rename" in (problem.fix or "") for problem in caught.value.problems)
