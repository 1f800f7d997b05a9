"""ncnn's own files from our ONNX: a .param of layers, a .bin of their weights, and beside them what sites have."""

from bitwright.deploy.ncnn.files import Files, load, save
from bitwright.deploy.ncnn.writer import convert

__all__ = ["Files", "convert", "load", "save"]
