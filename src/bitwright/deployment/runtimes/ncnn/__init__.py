"""ncnn: convert ONNX to a .param file of layers and a .bin file of weights, with a .json file of sites, and run it."""

from bitwright.deployment.runtimes.ncnn.runtime import Files, load, save
from bitwright.deployment.runtimes.ncnn.writer import convert

__all__ = [
    "Files",
    "convert",
    "load",
    "save",
]
