"""In integers only, every quantized site is within one code of the simulation that is given the same codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from target_blocks import block
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.errors import ArtefactError
from bitwright.core.registry import RUNTIMES
from bitwright.deployment import available_runtimes
from bitwright.deployment.runtimes.reference import (
    OPERATORS,
    Integers,
    Reference,
    accumulator,
    common,
    conv,
    conv_transpose,
    padded,
    rescale,
)
from bitwright.quantizers import tapped

torch.set_num_threads(1)


def simulated_codes(model: nn.Module, call: tuple[Tensor, ...]) -> dict[str, Any]:
    codes: dict[str, Any] = {}

    def look(site: str, quantizer: Any, x: Tensor) -> None:
        if not quantizer.weight:
            codes.setdefault(site, quantizer.integers(x).numpy())

    with tapped(model, look), torch.no_grad():
        model(*call)
    return codes


def agree(model: nn.Module, inputs: Any, path: Path, **choices: Any) -> Reference:
    """Quantize, export, run in integers, compare every site; what the last run did."""
    quantized = bw.quantize(model, [inputs], **choices)
    artefact = quantized.export(path / "model.onnx", artefact="qdq", dynamic_batch=False)
    runtime = Reference(artefact.path)
    call = inputs if isinstance(inputs, tuple) else (inputs,)
    differences = runtime.compare(runtime.feed(*call), simulated_codes(model, call))
    activations = {s for s, spec in quantized.plan.quantized if not s.endswith((":weight", ":bias")) and not spec.share}
    constant = {tensor.name.removesuffix(".codes") for tensor in onnx.load(artefact.path).graph.initializer}
    assert activations - constant <= set(differences)
    assert {site: off for site, off in differences.items() if off > 1} == {}
    assert quantized.check(
        artefact.path, [inputs], runtime="reference"
    ).passed  # and with codes of its own, all the way
    return runtime


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("onnxruntime", "residual"),
        ("tensorrt", "residual"),  # per-channel accumulators are added to codes
        ("snpe", "concat"),  # weights with zero points
        ("executorch_xnnpack", "depthwise"),
        ("tflitemicro", "deconv"),
        ("ppl_w8a16", "deconv"),  # 16-bit codes
        ("tvm", "transformer"),
    ],
)
def test_blocks(name: str, blocks: str, tmp_path: Path) -> None:
    model, inputs = block(blocks)
    runtime = agree(model, inputs, tmp_path, backend=name)
    kinds = {node.output[0]: node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    multiplied = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
    assert not multiplied & {kinds[output] for output in runtime.in_float}
    assert multiplied & {kinds[output] for output in runtime.in_integers}
    if blocks != "transformer":  # norms, softmax and GELU have no integer form; an input is clipped before it has codes
        assert {kinds[output] for output in runtime.in_float} <= {"Clip"}


def test_the_cnn_of_the_quickstart(tmp_path: Path) -> None:
    work = bw.load_workload("digits-untrained")
    torch.manual_seed(0)
    agree(work.model.eval(), next(iter(work.calibration())), tmp_path)


# -- nets that nobody would draw by hand -----------------------------------------------------------------------

sizes = st.integers(1, 3)


@st.composite
def nets(draw: st.DrawFn) -> nn.Module:
    """Up to three layers that keep four axes, then maybe a head."""
    layers: list[nn.Module] = []
    channels, size = 4, 9
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["conv", "depthwise", "deconv", "max", "average"]))
        kernel, stride = draw(sizes), draw(st.integers(1, 2))
        padding = draw(st.integers(0, kernel // 2))
        if kind in ("conv", "depthwise"):
            dilation = draw(st.integers(1, 2))
            if size + 2 * padding < dilation * (kernel - 1) + 1:
                continue
            groups = channels if kind == "depthwise" else draw(st.sampled_from([1, 2]))
            layers.append(
                nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups, bias=draw(st.booleans()))
            )
            size = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        elif kind == "deconv":
            groups = draw(st.sampled_from([1, 2]))
            extra = draw(st.integers(0, stride - 1))
            grown = (size - 1) * stride - 2 * padding + kernel + extra
            if not 1 <= grown <= 20:
                continue
            layers.append(nn.ConvTranspose2d(channels, channels, kernel, stride, padding, extra, groups))
            size = grown
        else:
            if size + 2 * padding < kernel:
                continue
            ceil = draw(st.booleans())
            pool = (
                nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)
                if kind == "max"
                else nn.AvgPool2d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=draw(st.booleans()))
            )
            layers.append(pool)
            size = pool(torch.zeros(1, 1, size, size)).shape[-1]
        layers.append(draw(st.sampled_from([nn.Identity(), nn.ReLU(), nn.ReLU6()])))
    layers.append(nn.Conv2d(channels, 3, 1))
    return nn.Sequential(*layers).eval()


@settings(max_examples=4, derandomize=True)  # each example is an export
@given(net=nets(), seed=st.integers(0, 2**16), name=st.sampled_from(["onnxruntime", "snpe", "vitis", "stpu"]))
def test_small_nets(net: nn.Module, seed: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    agree(net, torch.randn(2, 4, 9, 9), tmp_path_factory.mktemp("net"), backend=name)


# -- the arithmetic itself ---------------------------------------------------------------------------------------


@given(
    codes=st.lists(st.integers(-(2**31), 2**31), min_size=1, max_size=8),
    ratio=st.floats(2.0**-40, 2.0**4),
)
def test_rescaling_rounds_to_the_nearest(codes: list[int], ratio: float) -> None:
    found = rescale(np.array(codes, np.int64), np.array(ratio))
    exact = np.array(codes, np.float64) * ratio
    assert (np.abs(found - exact) <= 0.5 + np.abs(exact) * 2.0**-29).all()


def test_ties_go_to_even() -> None:
    halves = np.array([-5, -3, -1, 1, 3, 5], np.int64)
    assert rescale(halves, np.array(0.5)).tolist() == np.rint(halves * 0.5).astype(int).tolist() == [-2, -2, 0, 0, 2, 2]


@given(a=st.integers(-(2**20), 2**20), b=st.integers(-255, 255), fine=st.floats(1e-6, 1e-3), coarse=st.floats(1e-3, 1))
def test_numbers_on_one_scale_stay_what_they_are(a: int, b: int, fine: float, coarse: float) -> None:
    values = [accumulator(np.array(a), fine), accumulator(np.array(b), coarse)]
    codes, scale = common(values)
    assert len(codes) == 2
    for code, value in zip(codes, values, strict=True):
        assert abs(code * scale - value.centred * value.scale) <= scale + abs(value.centred * value.scale) * 2.0**-17


@settings(max_examples=40)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.integers(0, 9))
def test_sums_are_those_of_torch(groups: int, kernel: int, stride: int, padding: int, dilation: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-128, 128, (2, 4, 7, 8), generator=generator)
    weight = torch.randint(-128, 128, (6, 4 // groups, kernel, kernel), generator=generator)
    steps: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    exact = F.conv2d(x.double(), weight.double(), padding=padding, **steps)
    sides = {"strides": [stride] * 2, "dilations": [dilation] * 2, "group": groups}
    found = conv(padded(x.numpy(), [padding] * 4, 0), weight.numpy(), **sides)
    assert np.array_equal(found, exact.numpy())
    turned = (
        weight.reshape(groups, 6 // groups, 4 // groups, kernel, kernel)
        .transpose(1, 2)
        .reshape(4, 6 // groups, kernel, kernel)
    )
    extra = min(stride, dilation) - 1
    exact = F.conv_transpose2d(x.double(), turned.double(), output_padding=extra, **steps)
    found = conv_transpose(x.numpy(), turned.numpy(), pads=[0] * 4, output_padding=[extra] * 2, **sides)
    assert np.array_equal(found, exact.numpy())


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
    st.integers(-128, 127),
)
def test_pools_are_those_of_torch(
    kernel: int, stride: int, padding: int, ceil: bool, include: bool, zero_point: int
) -> None:
    padding = min(padding, kernel // 2)
    codes = torch.randint(-128, 128, (2, 3, 7, 8), generator=torch.Generator().manual_seed(kernel))
    x = Integers(codes=codes.numpy(), scale=np.array(0.25), zero_point=np.array(zero_point, np.int64), bits=8)
    steps = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [padding] * 4, "ceil_mode": int(ceil)}
    real = torch.from_numpy(x.real()).double()
    found = OPERATORS["MaxPool"](steps, x)
    assert found is not None
    assert np.array_equal(found.real(), F.max_pool2d(real, kernel, stride, padding, ceil_mode=ceil).numpy())
    found = OPERATORS["AveragePool"]({**steps, "count_include_pad": int(include)}, x)
    assert found is not None
    exact = F.avg_pool2d(real, kernel, stride, padding, ceil_mode=ceil, count_include_pad=include)
    assert found.real().shape == tuple(exact.shape)
    assert np.allclose(found.real(), exact.numpy(), atol=1e-4)


def test_it_is_found_by_name_and_not_among_what_deploys() -> None:
    assert "reference" in RUNTIMES
    assert "reference" not in available_runtimes()
    assert "onnxruntime" in available_runtimes()


# -- what it refuses, and what is float ------------------------------------------------------------------------


def test_an_accumulator_that_overflows_is_named(tmp_path: Path) -> None:
    names = ["x", "w", "s", "z"]
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            onnx.helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            onnx.helper.make_node("DequantizeLinear", ["w", "s", "z"], ["e"]),
            onnx.helper.make_node("MatMul", ["d", "e"], ["y"]),
        ],
        "sum",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2**17 + 1])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 1])],
        [
            onnx.numpy_helper.from_array(array, name)
            for name, array in zip(
                names[1:], (np.full((2**17 + 1, 1), -128, np.int8), np.float32(1.0), np.int8(0)), strict=True
            )
        ],
    )
    path = tmp_path / "sum.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]), path)
    runtime = Reference(path)
    with pytest.raises(ArtefactError) as caught:
        runtime.run({"x": np.full((1, 2**17 + 1), -200, np.float32)})
    assert "accumulator-overflow" in caught.value.codes


def test_what_the_plan_leaves_in_float_runs_in_float(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    x = torch.randn(4, 6)
    runtime = agree(Net().eval(), x, tmp_path, keep_float=["b"])
    kinds = {node.output[0]: node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert [kinds[output] for output in runtime.in_integers] == ["Gemm"]
    assert [kinds[output] for output in runtime.in_float] == ["Tanh", "Gemm"]
