"""transformers: folders that `AutoModelForCausalLM.from_pretrained` loads on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.errors import ArtefactError
from bitwright.deployment.artefacts.compressed_tensors import (
    file_damages,
    folder_digests,
    input_formats,
    stored_sites,
)
from bitwright.deployment.onnx_files import Damage
from bitwright.deployment.runtimes.base import FOLDER, Runtime
from bitwright.deployment.runtimes.decoding import IDS, MASK
from bitwright.graph.interception import bare
from bitwright.quantizers import quantizers_of
from bitwright.workload.language_models import quiet_transformers, tokenizer_of


def _rounded(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    scale = torch.where(scale > 0, scale, torch.finfo(x.dtype).eps)
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


class Transformers(Runtime):
    """Runs the folders of language models, float ones and those of compressed-tensors."""

    name = "transformers"
    suffix = FOLDER
    decoders_only = True

    @staticmethod
    def missing() -> str | None:
        for package in ("transformers", "compressed_tensors"):
            if find_spec(package) is None:
                return f"the package {package.replace('_', '-')} is not installed"
        return None

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.rounds = input_formats(path)
        with quiet_transformers(), redirect_stderr(StringIO()):  # the bars of compressed-tensors have no switch
            self.model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
        nn.Module.eval(self.model)
        self.threads = threads
        self.inputs, self.outputs, self.batch = (IDS, MASK), ("logits",), None

    def feed(self, *args: Any, **kwargs: Any) -> dict[str, NDArray[Any]]:
        """Token ids, and a mask that is 1 without padding."""
        given = [*args, *kwargs.values()]
        ids = kwargs.get(IDS, given[0] if given else None)
        if not isinstance(ids, Tensor) or len(given) > 2 or (len(given) == 2 and MASK not in kwargs):
            raise ArtefactError(
                "transformers takes token ids and a mask",
                value=", ".join([*("tensor" for _ in args), *kwargs]) or "nothing",
                fix=f"inputs: {IDS}, {MASK}",
                code="wrong-inputs",
            )
        mask = torch.as_tensor(kwargs.get(MASK, torch.ones_like(ids)))
        return {IDS: ids.numpy(), MASK: mask.long().numpy()}

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Scores of the next token after each token."""
        with self._threads():
            tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
            return [self.model(**tensors, use_cache=False).logits.float().numpy()]

    def decoding(self) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
        """Feeds tokens with a cache of their own."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)

        def step(ids: NDArray[Any]) -> NDArray[np.float32]:
            with self._threads():
                given = torch.from_numpy(np.ascontiguousarray(ids)).long()
                found: NDArray[np.float32] = self.model(given, past_key_values=cache, use_cache=True).logits.numpy()
                return found

        return step

    @contextmanager
    def simulating(self, model: nn.Module) -> Iterator[None]:
        """Round symmetric activations as compressed-tensors does: the largest value of a token gets the code 127.5."""
        formats = {quantizer: quantizer.spec.format for quantizer in quantizers_of(model).values()}
        dynamic = [q for q, own in formats.items() if own.dynamic and own.symmetric and "int" in self.rounds]
        for quantizer in dynamic:
            quantizer.stand_in = _rounded
        try:
            yield
        finally:
            for quantizer in dynamic:
                quantizer.stand_in = None

    @contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            with torch.no_grad():
                yield
        finally:
            torch.set_num_threads(before)

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write a folder of compressed-tensors."""
        from bitwright.deployment.export import export  # it imports this module's base

        export(model, path, inputs, artefact="compressed-tensors")

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the float model and its tokenizer."""
        inner: Any = bare(model)
        with quiet_transformers():
            inner.save_pretrained(path)
            tokenizer = tokenizer_of(inner)
            if tokenizer is not None:
                tokenizer.save_pretrained(path)

    @classmethod
    def size(cls, path: Path) -> int:
        """All files of the folder."""
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())

    @classmethod
    def stored(cls, path: Path) -> dict[str, NDArray[Any]]:
        """The codes and grids of integer weights."""
        return stored_sites(path)

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Compare all tensors with their digests."""
        return file_damages(path)

    @classmethod
    def has_digests(cls, path: Path) -> bool:
        """Folders of other tools have no digests."""
        return bool(folder_digests(path))
