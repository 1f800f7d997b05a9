"""Peers that quantize the same torch model with the same calibration batches, each written to a file."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bitwright as bw
from bitwright.core.tensor_tree import as_call, tensors_in

Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

LAPS: list[tuple[str, float, float]] = []
"""What was done, and the clock and the CPU's clock when it was: `trace` (from torch into the form that the tool
quantizes), `quantize` (prepare, calibrate, convert), `write` (the file)."""


def lap(name: str) -> None:
    LAPS.append((name, time.perf_counter(), time.process_time()))


def _feeds(path: Path, batches: list[Any]) -> list[dict[str, np.ndarray]]:
    names = bw.open_runtime("onnxruntime", path).inputs
    return [dict(zip(names, (t.numpy() for _, t in tensors_in(batch)), strict=True)) for batch in batches]


def ours(model: nn.Module, example: Any, batches: list[Any], folder: Path, *, backend: str = "onnxruntime") -> Path:
    quantized = bw.quantize(model, batches, example=example, backend=backend)
    lap("quantize")
    path = quantized.export(folder / f"bitwright-{backend}.onnx").path
    lap("write")
    return path


def ours_openvino(model: nn.Module, example: Any, batches: list[Any], folder: Path) -> Path:
    return ours(model, example, batches, folder, backend="openvino")


def onnxruntime(model: nn.Module, example: Any, batches: list[Any], folder: Path, **options: Any) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self, feeds: list[dict[str, np.ndarray]]) -> None:
            self.feeds: Iterator[dict[str, np.ndarray]] = iter(feeds)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    plain, prepared = bw.export_float(model, folder / "float.onnx", example), folder / "prepared.onnx"
    path = folder / f"onnxruntime{len(options)}.onnx"
    quant_pre_process(str(plain), str(prepared))
    reader = Reader(_feeds(plain, batches))
    lap("trace")
    quantize_static(str(prepared), str(path), reader, quant_format=QuantFormat.QDQ, **options)
    lap("quantize")
    return path


def onnxruntime_u8(model: nn.Module, example: Any, batches: list[Any], folder: Path) -> Path:
    from onnxruntime.quantization import QuantType

    return onnxruntime(model, example, batches, folder, activation_type=QuantType.QUInt8, per_channel=True)


def nncf_onnx(model: nn.Module, example: Any, batches: list[Any], folder: Path) -> Path:
    import nncf
    import onnx

    plain = bw.export_float(model, folder / "float.onnx", example)
    loaded, data = onnx.load(plain), nncf.Dataset(_feeds(plain, batches))
    lap("trace")
    quantized = nncf.quantize(loaded, data, subset_size=len(batches), fast_bias_correction=True)
    lap("quantize")
    onnx.save(quantized, folder / "nncf.onnx")
    lap("write")
    return folder / "nncf.onnx"


def nncf_openvino(model: nn.Module, example: Any, batches: list[Any], folder: Path) -> Path:
    import nncf
    import openvino

    plain = bw.export_float(model, folder / "float.onnx", example)
    loaded, data = openvino.convert_model(plain), nncf.Dataset(_feeds(plain, batches))
    lap("trace")
    quantized = nncf.quantize(loaded, data, subset_size=len(batches))
    lap("quantize")
    openvino.save_model(quantized, folder / "nncf.xml", compress_to_fp16=False)
    lap("write")
    return folder / "nncf.xml"


def torchao(model: nn.Module, example: Any, batches: list[Any], folder: Path) -> Path:
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    args, kwargs = as_call(batches[0])
    program = torch.export.export(model.eval(), args, kwargs).module()
    lap("trace")
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(program, quantizer)
    with torch.no_grad():
        for batch in batches:
            args, kwargs = as_call(batch)
            prepared(*args, **kwargs)
    quantized = convert_pt2e(prepared)
    move_exported_model_to_eval(quantized)
    lap("quantize")
    args, kwargs = as_call(batches[0])
    torch.export.save(torch.export.export(quantized, args, kwargs), folder / "torchao.pt2")
    lap("write")
    return folder / "torchao.pt2"


Peer = Callable[[nn.Module, Any, list[Any], Path], Path]
PEERS: dict[str, Peer] = {
    "bitwright": ours,
    "bitwright openvino": ours_openvino,
    "onnxruntime": onnxruntime,
    "onnxruntime u8": onnxruntime_u8,
    "nncf onnx": nncf_onnx,
    "nncf openvino": nncf_openvino,
    "torchao": torchao,
}


def quietly() -> None:
    """Peers tell much about themselves."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
