"""Whether 8-bit products saturate on this machine, determined by running a probe."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from bitwright.core.files import scratch_folder
from bitwright.core.formats import Format
from bitwright.core.registry import RUNTIMES
from bitwright.deployment.runtimes.base import Runtime, open_runtime
from bitwright.deployment.runtimes.onnx_reader import OnnxReader
from bitwright.plan import Plan, SiteSpec
from bitwright.quantizers import prepare, quantizers_of


@cache
def saturates(runtime: str) -> bool:
    """Whether this runtime on this CPU loses bits in 8-bit products: 255·127 + 255·127 exceeds int16.

    The function runs a convolution with such values and compares the result with the exact sum.
    """
    if runtime not in RUNTIMES or RUNTIMES.get(runtime).missing() is not None:
        return False
    channels = 16
    ones = np.ones((1, channels, 8, 8), dtype=np.float32)
    kind: type[Runtime] = RUNTIMES.get(runtime)
    with scratch_folder() as folder:
        path = folder / f"probe{kind.suffix}"
        if issubclass(kind, OnnxReader):
            ir.save(_probe(channels), path)
        else:
            kind.write(_prepared_probe(channels, kind.activations), path, torch.from_numpy(ones))
        opened = open_runtime(runtime, path, threads=1)
        result = opened.run({opened.inputs[0]: ones})[0]
    return not np.allclose(result, channels * 1.0, rtol=0.02)


def _prepared_probe(channels: int, activations: str) -> nn.Module:
    """The same convolution as a prepared model, for runtimes with their own artefact format."""
    conv = nn.Conv2d(channels, channels, 1, bias=False)
    nn.init.ones_(conv.weight)
    model = nn.Sequential(conv).eval()
    formats = {"0:weight": "int8/channel/sym", "0:input": activations, "0:output": activations}
    prepare(model, Plan(sites={site: SiteSpec(format=Format.parse(text)) for site, text in formats.items()}))
    highest = {"0:weight": 1.0, "0:input": 1.0, "0:output": channels * 1.02}
    for site, quantizer in quantizers_of(model).items():
        top = torch.full((channels if quantizer.weight else 1,), highest[site])
        quantizer.set_range(torch.zeros_like(top), top, conv.weight.shape)
    return model


def _probe(channels: int) -> ir.Model:
    """x → Q/DQ → Conv with all weights 127/127 → Q/DQ; the exact output is `channels`."""

    def constant(name: str, array: np.ndarray) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        constants.append(value)
        return value

    constants: list[ir.Value] = []
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, channels, 8, 8]))
    scale = constant("scale", np.array(1 / 255, dtype=np.float32))
    zero = constant("zero", np.array(0, dtype=np.uint8))
    weight = constant("weight", np.full((channels, channels, 1, 1), 127, dtype=np.int8))
    weight_scale = constant("weight_scale", np.array(1 / 127, dtype=np.float32))
    weight_zero = constant("weight_zero", np.array(0, dtype=np.int8))
    out_scale = constant("out_scale", np.array(channels / 250, dtype=np.float32))
    q = ir.node("QuantizeLinear", [x, scale, zero])
    dq = ir.node("DequantizeLinear", [q.outputs[0], scale, zero])
    dqw = ir.node("DequantizeLinear", [weight, weight_scale, weight_zero])
    conv = ir.node("Conv", [dq.outputs[0], dqw.outputs[0]])
    q2 = ir.node("QuantizeLinear", [conv.outputs[0], out_scale, zero])
    dq2 = ir.node("DequantizeLinear", [q2.outputs[0], out_scale, zero])
    y = dq2.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, channels, 8, 8])
    graph = ir.Graph(
        [x], [y], nodes=[q, dq, dqw, conv, q2, dq2], initializers=constants, opset_imports={"": 21}, name="probe"
    )
    return ir.Model(graph, ir_version=10)
