"""The built-in tables, registered as entry points."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from bitwright.backends.table import BackendTable, load_table


@cache
def _table(name: str) -> BackendTable:
    return load_table(Path(__file__).parent / f"{name}.yaml")


academic = partial(_table, "academic")
academic_fold = partial(_table, "academic_fold")
academic_nlp = partial(_table, "academic_nlp")
acl = partial(_table, "acl")
executorch_xnnpack = partial(_table, "executorch_xnnpack")
fbgemm = partial(_table, "fbgemm")
ncnn = partial(_table, "ncnn")
nnie = partial(_table, "nnie")
onnx_qnn = partial(_table, "onnx_qnn")
onnxruntime = partial(_table, "onnxruntime")
openvino = partial(_table, "openvino")
ppl_cuda = partial(_table, "ppl_cuda")
ppl_w8a16 = partial(_table, "ppl_w8a16")
snpe = partial(_table, "snpe")
stpu = partial(_table, "stpu")
tengine_u8 = partial(_table, "tengine_u8")
tensorrt = partial(_table, "tensorrt")
tensorrt_nlp = partial(_table, "tensorrt_nlp")
tflitemicro = partial(_table, "tflitemicro")
torch_inductor = partial(_table, "torch_inductor")
tvm = partial(_table, "tvm")
vitis = partial(_table, "vitis")
