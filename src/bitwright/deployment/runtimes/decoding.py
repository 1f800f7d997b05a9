"""Decoders with a cache: complete the inputs of their ONNX files, and generate tokens with a runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bitwright.core.errors import ArtefactError

__all__ = ["IDS", "MASK", "POSITIONS", "CacheLayout", "DecoderSession", "layout_of_inputs", "past_name", "present_name"]

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
_PAST = re.compile(r"past_key_values\.(\d+)\.(?:key|value)")


def past_name(layer: int, part: str) -> str:
    """The input for the cached keys or values of a layer."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """The output with the keys or values of a layer, including those of the new tokens."""
    return f"present.{layer}.{part}"


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The cached tensors of a decoder: for each input, the number of heads and the size of a head."""

    sizes: Mapping[str, tuple[int, int]]

    @property
    def presents(self) -> tuple[str, ...]:
        """The outputs that become the next call's inputs, in the order of the inputs."""
        return tuple(name.replace("past_key_values", "present", 1) for name in self.sizes)

    def completed(self, feed: Mapping[str, NDArray[Any]], inputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Add the inputs that a caller may leave out: an empty cache, a mask without padding, and positions."""
        if IDS not in feed:
            what, fix = "a decoder needs token ids", f"pass {IDS}=ids"
            raise ArtefactError(what, value=", ".join(feed) or "no inputs", fix=fix, code="wrong-inputs")
        ids = feed[IDS]
        batch, length = ids.shape
        first = next(iter(self.sizes))
        past = int(feed[first].shape[2]) if first in feed else 0
        mask = feed.get(MASK)
        if mask is None:
            mask = np.ones((batch, past + length), dtype=np.int64)
        found = {**feed, IDS: ids, MASK: mask.astype(np.int64)}
        if POSITIONS not in feed:
            found[POSITIONS] = positions_of(found[MASK])[:, -length:]
        for name, (heads, size) in self.sizes.items():
            found.setdefault(name, np.zeros((batch, heads, 0, size), dtype=np.float32))
        return {name: found[name] for name in inputs if name in found}


def positions_of(mask: NDArray[Any]) -> NDArray[np.int64]:
    """The position of each token: padding at the beginning doesn't count."""
    found: NDArray[np.int64] = np.maximum(mask.astype(np.int64).cumsum(axis=1) - 1, 0)
    return found


def layout_of_inputs(shapes: Mapping[str, Sequence[Any] | None]) -> CacheLayout | None:
    """The cache of an artefact with these input shapes, or None if it has none."""
    sizes = {
        name: (int(shape[1]), int(shape[3]))
        for name, shape in shapes.items()
        if _PAST.fullmatch(name) and shape is not None and len(shape) == 4
    }
    return CacheLayout(sizes=sizes) if sizes and IDS in shapes else None


class _Steps(Protocol):
    cache: CacheLayout | None

    def run_all(self, feed: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]: ...


class DecoderSession:
    """Feeds tokens to a decoder on a runtime and keeps its cache.

    >>> import tempfile, torch, bitwright
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
    >>> model.config.use_cache = False
    >>> ids = torch.arange(12).view(2, 6)
    >>> quantized = bitwright.quantize(model, [{"input_ids": ids}], "w8a16")
    >>> artefact = quantized.export(tempfile.mkdtemp())
    >>> session = DecoderSession(bitwright.open_runtime("onnxruntime", artefact.path))
    >>> session.feed(ids.numpy()).shape, session.feed(ids[:, :1].numpy()).shape, session.length
    ((2, 6, 50), (2, 1, 50), 7)
    """

    def __init__(self, runtime: Any) -> None:
        if getattr(runtime, "cache", None) is None:
            raise ArtefactError(
                "this artefact has no cache",
                fix="export the decoder into a folder",
                code="no-cache",
            )
        self.runtime: _Steps = runtime
        self.past: dict[str, NDArray[Any]] = {}
        self.mask: NDArray[np.int64] | None = None

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        return 0 if self.mask is None else int(self.mask.shape[1])

    def feed(self, ids: NDArray[Any], mask: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Scores of the next token after each of these tokens, which follow the cached ones.

        `mask` (1: a token, 0: padding) is for the new tokens.
        """
        cache = self.runtime.cache
        assert cache is not None
        new = np.ones(ids.shape, dtype=np.int64) if mask is None else mask.astype(np.int64)
        self.mask = new if self.mask is None else np.concatenate([self.mask, new], axis=1)
        results = self.runtime.run_all({IDS: ids.astype(np.int64), MASK: self.mask, **self.past})
        self.past = {name: results[present] for name, present in zip(cache.sizes, cache.presents, strict=True)}
        scores: NDArray[np.float32] = results["logits"]
        return scores

    def generate(self, ids: NDArray[Any], tokens: int) -> NDArray[np.int64]:
        """Append the most probable token, `tokens` times; returns only the new tokens."""
        found: list[NDArray[np.int64]] = []
        for _ in range(tokens):
            ids = self.feed(ids)[:, -1:].argmax(axis=-1).astype(np.int64)
            found.append(ids)
        return np.concatenate(found, axis=1)
