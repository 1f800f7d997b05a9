"""ncnn's own files from our ONNX: a .param of layers, a .bin of their weights, and beside them what sites have."""

from bitwright.deploy.runtimes.ncnn.runtime import Files, load, save
from bitwright.deploy.runtimes.ncnn.writer import convert

__all__ = [
    "Files",
    "convert",
    "load",
    "save",
]
