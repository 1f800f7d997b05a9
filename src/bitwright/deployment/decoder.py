"""Write a decoder with a key-value cache: ONNX with `past_key_values`, and a folder for `onnxruntime-genai`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.errors import ExportError, Problem, first_line, log_warnings
from bitwright.core.files import write_text
from bitwright.core.tensor_tree import as_array, eval_mode
from bitwright.deployment.runtimes.decoding import IDS, MASK, POSITIONS, CacheLayout, past_name, present_name
from bitwright.deployment.runtimes.onnxruntime import OnnxRuntime
from bitwright.graph.interception import bare

__all__ = [
    "SimulatedDecoder",
    "cached_forward",
    "decoder_example",
    "dynamic_sizes",
    "is_decoder",
    "name_values",
    "write_generation_files",
]

_PARTS = ("key", "value")
_PAST_PREFIX = "past_key_values_"
_BATCH, _NEW, _PAST = 2, 3, 4  # of the traced call; different, and none of them is 1, which would become a constant
EXACT = {"session.qdq_matmulnbits_accuracy_level": "0"}
"""ONNX Runtime's option to multiply float activations: by default, `MatMulNBits` rounds them to 8 bits."""


def is_decoder(model: nn.Module) -> bool:
    """Whether a model is a decoder of transformers: it generates tokens and isn't an encoder with a decoder."""
    config = getattr(model, "config", None)
    generates = getattr(model, "can_generate", None)
    return config is not None and callable(generates) and bool(generates()) and not config.is_encoder_decoder


class _CachedForward:
    """A decoder's forward with its cache as tensors: (ids, mask, positions, past…) → (logits, present…)."""

    def __init__(self, forward: Callable[..., Any], names: list[str]) -> None:
        self.forward, self.names = forward, names
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in (IDS, MASK, POSITIONS, *names)]
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Call the original forward with a cache object."""
        from transformers import DynamicCache

        given = self.__signature__.bind(*args, **kwargs).arguments
        tensors = [given[name] for name in self.names]
        cache = DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))
        own = {name: given[name] for name in (IDS, MASK, POSITIONS)}
        result = self.forward(**own, past_key_values=cache, use_cache=True)
        found = {"logits": result.logits}
        for layer, one in enumerate(result.past_key_values.layers):
            found |= {f"present_{layer}_key": one.keys, f"present_{layer}_value": one.values}
        return found

    @property
    def __code__(self) -> CodeType:
        code: CodeType = self.forward.__code__
        return code


@contextmanager
def cached_forward(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Let the model take and return its cache as tensors in this block. Yields heads and head size of each tensor."""
    model = bare(model)
    sizes = _cache_sizes(model)
    names = [f"{_PAST_PREFIX}{layer}_{part}" for layer in range(len(sizes) // 2) for part in _PARTS]
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = _CachedForward(model.forward, names)
    try:
        yield sizes
    finally:
        if own is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = own


def _cache_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Heads and head size of each cached tensor; the model runs on one token."""
    what, reason = "this model can't be exported with a cache of keys and values", None
    try:
        from transformers import DynamicCache

        with torch.no_grad(), eval_mode(model):
            result = model(
                input_ids=torch.zeros(1, 2, dtype=torch.long), past_key_values=DynamicCache(), use_cache=True
            )
        tensors = [tensor for layer in result.past_key_values.layers for tensor in (layer.keys, layer.values)]
        if any(tensor.dim() != 4 or tensor.shape[2] != 2 for tensor in tensors) or not tensors:
            reason = f"its cache has the shapes {sorted({tuple(tensor.shape) for tensor in tensors})}"
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    if reason is not None:
        raise ExportError(
            f"{what}: {reason}",
            value=type(model).__name__,
            fix="export it as a plain model, with export(model, path, inputs)",
            code="no-cache",
        )
    return [(int(tensor.shape[1]), int(tensor.shape[3])) for tensor in tensors]


def decoder_example(model: nn.Module, sizes: list[tuple[int, int]]) -> dict[str, Tensor]:
    """A call of the cached forward: tokens after a cache, with padding in one sample."""
    generator = torch.Generator().manual_seed(0)
    return decoder_call(model, sizes, batch=_BATCH, new=_NEW, past=_PAST, padding=0, generator=generator)


def decoder_call(
    model: nn.Module,
    sizes: list[tuple[int, int]],
    *,
    batch: int,
    new: int,
    past: int,
    padding: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Random tokens after a random cache; the first sample begins with padding."""
    vocabulary = int(bare(model).get_input_embeddings().num_embeddings)  # type: ignore[operator]
    mask = torch.ones(batch, past + new, dtype=torch.long)
    mask[0, :padding] = 0
    call = {
        IDS: torch.randint(vocabulary, (batch, new), generator=generator),
        MASK: mask,
        POSITIONS: (mask.cumsum(1) - 1).clamp(min=0)[:, -new:],
    }
    for index, (heads, size) in enumerate(sizes):
        name = f"{_PAST_PREFIX}{index // 2}_{_PARTS[index % 2]}"
        call[name] = torch.randn(batch, heads, past, size, generator=generator)
    return call


def dynamic_sizes(call: Any) -> Any:
    """The dynamic axes of a call's arguments for torch.export: samples, tokens and cached tokens."""
    auto = torch.export.Dim.AUTO
    if not isinstance(call, dict):  # no positional arguments
        return call
    return {name: {0: auto, 2 if name.startswith("past") else 1: auto} for name in call}


def name_values(model: ir.Model) -> None:
    """Give inputs, outputs and their sizes the names that runtimes for decoders expect."""
    for value in model.graph.inputs:
        name = str(value.name)
        sizes: list[int | str] = ["batch_size", "total_sequence_length" if name == MASK else "sequence_length"]
        if name.startswith(_PAST_PREFIX):
            value.name = _input_name(name)
            assert value.shape is not None
            sizes = ["batch_size", _fixed(value.shape[1]), "past_sequence_length", _fixed(value.shape[3])]
        value.shape = ir.Shape(sizes)
    for index, value in enumerate(model.graph.outputs):
        assert value.shape is not None
        if index:
            value.name = present_name((index - 1) // 2, _PARTS[(index - 1) % 2])
            sizes = ["batch_size", _fixed(value.shape[1]), "total_sequence_length", _fixed(value.shape[3])]
        else:
            value.name = "logits"
            sizes = ["batch_size", "sequence_length", _fixed(value.shape[2])]
        value.shape = ir.Shape(sizes)


def _input_name(argument: str) -> str:
    """The input of the artefact for an argument of the cached forward, which must be an identifier."""
    if not argument.startswith(_PAST_PREFIX):
        return argument
    layer, part = argument.removeprefix(_PAST_PREFIX).split("_")
    return past_name(int(layer), part)


class SimulatedDecoder:
    """A prepared model in this process, called like an artefact with a cache."""

    def __init__(self, model: nn.Module, sizes: list[tuple[int, int]]) -> None:
        self.model = model
        names = (past_name(index // 2, _PARTS[index % 2]) for index in range(len(sizes)))
        self.cache = CacheLayout(sizes=dict(zip(names, sizes, strict=True)))

    def run_all(self, feed: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All outputs by name, as those of an artefact."""
        complete = self.cache.completed(feed, (IDS, MASK, POSITIONS, *self.cache.sizes))
        with torch.no_grad():
            results = self.model(*(torch.from_numpy(array) for array in complete.values()))
        return dict(zip(("logits", *self.cache.presents), map(as_array, results.values()), strict=True))


def _fixed(size: Any) -> int:
    if not isinstance(size, int):
        raise ExportError(
            "a size of the cache depends on the input",
            value=str(size),
            fix="export it as a plain model, with export(model, path, inputs)",
            code="no-cache",
        )
    return size


def verify_decoder(model: nn.Module, sizes: list[tuple[int, int]], path: Path) -> None:
    """Compare the artefact with the model for other numbers of samples, tokens and cached tokens than the traced ones.

    Raises an error if a size isn't really dynamic. Nothing is verified where ONNX Runtime isn't installed.
    """
    if OnnxRuntime.missing() is not None:
        return
    generator, real = torch.Generator().manual_seed(1), OnnxRuntime(path, config=EXACT)
    for batch, new, past, padding in ((1, 1, 5, 0), (1, 7, 0, 0), (3, 1, 6, 2), (1, 1, 0, 0), (2, 6, 9, 3)):
        call = decoder_call(model, sizes, batch=batch, new=new, past=past, padding=padding, generator=generator)
        with torch.no_grad(), eval_mode(model):
            expected = [tensor.numpy() for tensor in model(**call).values()]
        feed = {_input_name(name): tensor.numpy() for name, tensor in call.items()}
        found = list(real.run_all(feed).values())
        where = f"{batch} samples, {new} tokens after {past}"
        if padding:
            where += f", {padding} of padding"
            expected[0], found[0] = expected[0][1:], found[0][1:]
        for ours, theirs in zip(expected, found, strict=True):
            error = float(np.abs(ours - theirs).max(initial=0.0)) if ours.shape == theirs.shape else np.inf
            if not error <= 0.05 * float(np.abs(ours).max(initial=0.0)) + 1e-3:
                raise ExportError(
                    "the exported decoder computes other values than the model for these sizes",
                    where=where,
                    value=f"{theirs.shape}, largest error {error:.2g}",
                    fix="export it as a plain model, with export(model, path, inputs)",
                    code="decoder-differs",
                )


def write_generation_files(
    model: nn.Module, folder: Path, sizes: list[tuple[int, int]], *, tokenizer: Any, exact: bool
) -> tuple[Problem, ...]:
    """Write genai_config.json and the tokenizer next to model.onnx; returns a warning if there is no tokenizer."""
    write_text(
        folder / "genai_config.json", json.dumps(_genai_config(bare(model), sizes, exact=exact), indent=2) + "\n"
    )
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return ()
    noted = Problem(
        what="the folder has no tokenizer, so it generates only from token ids",
        where=str(folder),
        fix="pass tokenizer=, or save the tokenizer into the folder",
        code="no-tokenizer",
    )
    log_warnings([noted])
    return (noted,)


def _genai_config(model: Any, sizes: list[tuple[int, int]], *, exact: bool) -> dict[str, Any]:
    config = model.config.get_text_config()
    generation = getattr(model, "generation_config", None)

    def token(name: str) -> Any:
        found = getattr(generation, name, None)
        return getattr(config, name, None) if found is None else found

    end = token("eos_token_id")
    last = end[0] if isinstance(end, list) and end else end
    begin = token("bos_token_id")
    padding = token("pad_token_id")
    context = int(getattr(config, "max_position_embeddings", None) or 2048)
    options: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": [], **(EXACT if exact else {})}
    described = {
        "bos_token_id": 0 if begin is None else begin,
        "eos_token_id": config.vocab_size if end is None else end,  # a token that never occurs
        "pad_token_id": (0 if last is None else last) if padding is None else padding,
        "context_length": context,
        "type": "decoder",
        "vocab_size": config.vocab_size,
        "decoder": {
            "session_options": options,
            "filename": "model.onnx",
            "hidden_size": config.hidden_size,
            "head_size": sizes[0][1],
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": len(sizes) // 2,
            "num_key_value_heads": sizes[0][0],
            "inputs": {
                **{name: name for name in (IDS, MASK, POSITIONS)},
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
    return {"model": described, "search": {"max_length": context, "past_present_share_buffer": False}}
