"""ncnn: Tencent's runtime for phones, with integer convolutions and linears; on this machine's CPU."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import nn

from bitwright.deploy.artefacts.store import QDQ
from bitwright.deploy.export import export, export_float
from bitwright.deploy.integrity import Damage
from bitwright.deploy.ncnn import convert, load, save
from bitwright.deploy.ncnn.files import Site, weights_of
from bitwright.deploy.ncnn.layers import factor
from bitwright.deploy.runtime import Runtime, refused
from bitwright.disk import scratch_folder
from bitwright.errors import ArtefactError
from bitwright.graph.tree import part

# Halves would be faster, but they are not the numbers of the plan.
_HALVES = ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_packed", "use_bf16_storage")


class Ncnn(Runtime):
    """Runs .param files, sample by sample. Beside each lie its weights (.bin) and where our sites are (.json)."""

    name = "ncnn"
    suffix: ClassVar[str] = ".param"
    activations = "int8/tensor/sym/narrow"

    @staticmethod
    def missing() -> str | None:
        """Whether the package is there."""
        return None if find_spec("ncnn") else "the package ncnn is not installed"

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Our Q/DQ graph as ncnn's layers; operators that it can't have are one error."""
        with scratch_folder() as folder:
            file = folder / "model.onnx"
            export(model, file, _one(inputs), dynamic_batch=False, artefact=QDQ)
            net = convert(ir.load(file))
            save(net, path)

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """The float model as ncnn's layers."""
        with scratch_folder() as folder:
            net = convert(ir.load(export_float(model, folder / "model.onnx", _one(inputs), dynamic_batch=False)))
            save(net, path)

    @classmethod
    def size(cls, path: Path) -> int:
        """Layers and weights: what ncnn reads."""
        return path.stat().st_size + weights_of(path).stat().st_size

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        import ncnn

        self.files = load(path)
        self.net = ncnn.Net()
        for option in _HALVES:
            setattr(self.net.opt, option, False)
        if threads is not None:
            self.net.opt.num_threads = threads
        if self.net.load_param(str(path)) != 0 or self.net.load_model(str(weights_of(path))) != 0:
            raise ArtefactError("ncnn can't load the artefact", where=str(path), fix="export it again")
        self.inputs = tuple(self.files.inputs)
        self.outputs = tuple(self.files.outputs)
        self.batch = None

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """One sample after the other: ncnn has no batches."""
        samples = [self._sample(feed, index) for index in range(self._count(feed))]
        return [np.stack(arrays) for arrays in zip(*samples, strict=True)]

    def _count(self, feed: dict[str, NDArray[Any]]) -> int:
        """How many samples; ncnn itself doesn't look at shapes, and would read what lies behind an array."""
        sizes = {len(array) for array in feed.values() if array.ndim}
        for name, shape in self.files.inputs.items():
            array = feed[name]
            if array.shape[1:] != shape or array.dtype != np.float32 or len(sizes) != 1 or 0 in sizes:
                found = f"{name} is {array.dtype} of shape {list(array.shape)}"
                raise refused(
                    self.name, ValueError(f"{found}, the artefact's is float32 of [any, {str(list(shape))[1:]}")
                )
        return sizes.pop()

    def _sample(self, feed: dict[str, NDArray[Any]], index: int) -> list[NDArray[Any]]:
        extractor = self._extractor(feed, index)
        return [self._extract(extractor, output.blob).reshape(output.shape) for output in self.files.outputs.values()]

    def _extractor(self, feed: dict[str, NDArray[Any]], index: int) -> Any:
        import ncnn

        extractor = self.net.create_extractor()
        for name in self.inputs:
            # a copy: ncnn's rows of channels begin at multiples of 16 bytes
            extractor.input(name, ncnn.Mat(np.ascontiguousarray(feed[name][index])).clone())
        return extractor

    def _extract(self, extractor: Any, blob: str) -> NDArray[Any]:
        status, found = extractor.extract(blob)
        if status != 0:
            raise refused(self.name, RuntimeError(f"it stops at {blob} with status {status}"))
        return np.array(found)

    def executed(self) -> dict[str, int]:
        """Layers with integer weights, as they were written: ncnn itself doesn't tell."""
        return dict(self.files.products)

    def left_in_float(self) -> tuple[str, ...] | None:
        """As they were written; files of earlier versions have no names."""
        return self.files.floats

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """What ncnn's own files have."""
        files = load(path)
        if not files.sites:
            raise ArtefactError(
                "this artefact has no sites", where=str(path), fix="give the quantized model's artefact"
            )
        return files.stored(path)

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """By the digests in the .json file."""
        return load(path).damages(path)

    @classmethod
    def probing(cls, path: Path, sites: Iterable[str]) -> Runtime:
        """The artefact itself: what is inside can be asked for."""
        return _Probe(path, sites)


class _Probe(Ncnn):
    """Layers round what they read; here ncnn's own rounding is applied to that once more, to see it."""

    def __init__(self, path: Path, sites: Iterable[str]) -> None:
        super().__init__(path)
        self.shown = {f"{site}.codes": self.files.sites[site] for site in sites if site in self.files.sites}
        self.outputs = (*self.outputs, *self.shown)

    def _sample(self, feed: dict[str, NDArray[Any]], index: int) -> list[NDArray[Any]]:
        extractor = self._extractor(feed, index)
        extractor.set_light_mode(False)  # else blobs vanish when they are read
        results = [
            self._extract(extractor, output.blob).reshape(output.shape) for output in self.files.outputs.values()
        ]
        return [*results, *(self._codes(extractor, site) for site in self.shown.values())]

    def _codes(self, extractor: Any, site: Site) -> NDArray[Any]:
        import ncnn

        found = self._extract(extractor, site.blob)
        if not site.integer:
            option = ncnn.Option()
            option.use_packing_layout = False  # NumPy can't read numbers that are packed by eights
            option.num_threads = 1
            scale = ncnn.Mat(factor(site.scale).reshape(1)).clone()
            found = np.array(ncnn.quantize_to_int8(ncnn.Mat(np.ascontiguousarray(found)).clone(), scale, option))
        if any(site.pads):
            left, right, top, bottom = site.pads
            found = np.pad(found, ((0, 0), (top, bottom), (left, right)))
        return found.astype(np.int32)


def _one(inputs: Any) -> Any:
    """One sample: ncnn's blobs have no axis for a batch."""
    return part(inputs, 0, 1)
