"""llama.cpp: GGUF files, by the C functions of llama.h in the library of the package xllamacpp.

llama.cpp rounds the inputs of products with blocks of integers to 8 bits, with a scale for 32 values, and the inputs of
products with float16 weights to float16. Keys and values are cached in float16.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core.errors import ArtefactError, Problem
from bitwright.deployment.artefacts.gguf import BLOCK, file_damages, stored_digests, stored_type, write_gguf
from bitwright.deployment.onnx_files import Damage
from bitwright.deployment.runtimes.base import Runtime
from bitwright.deployment.runtimes.decoding import IDS, MASK
from bitwright.graph.interception import bare
from bitwright.quantizers import quantizers_of
from bitwright.workload.language_models import tokenizer_of

_CONTEXT, _BATCH, _MICRO_BATCH = 0, 1, 2  # the first fields of llama_context_params, as 32-bit numbers
_LEAST_CONTEXT, _MOST_BATCH = 512, 2048
_TEXT = "It's 1,234.5 km (≈ 767 mi)  from\n\n\tZürich's café to 東京: 2026-11-19, isn't it?  def f(x): return x**2\n"


class _Parameters(ctypes.Structure):
    """Parameters whose fields differ between versions: more space than any of them needs."""

    _fields_: ClassVar = [("words", ctypes.c_uint32 * 256)]


class _Batch(ctypes.Structure):
    """llama_batch."""

    _fields_: ClassVar = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LOG, _POINTER)),
    "llama_model_default_params": (_Parameters, ()),
    "llama_model_load_from_file": (_POINTER, (ctypes.c_char_p, _Parameters)),
    "llama_model_free": (None, (_POINTER,)),
    "llama_model_n_ctx_train": (_INT, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
    "llama_context_default_params": (_Parameters, ()),
    "llama_init_from_model": (_POINTER, (_POINTER, _Parameters)),
    "llama_free": (None, (_POINTER,)),
    "llama_n_ctx": (_SIZE, (_POINTER,)),
    "llama_n_batch": (_SIZE, (_POINTER,)),
    "llama_set_n_threads": (None, (_POINTER, _INT, _INT)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_clear": (None, (_POINTER, ctypes.c_bool)),
    "llama_batch_init": (_Batch, (_INT, _INT, _INT)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (_INT, (_POINTER, _Batch)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_POINTER, _INT)),
    "llama_tokenize": (
        _INT,
        (_POINTER, ctypes.c_char_p, _INT, ctypes.POINTER(_INT), _INT, ctypes.c_bool, ctypes.c_bool),
    ),
}
_messages: deque[str] = deque(maxlen=200)


def _keep_message(level: int, text: bytes, _: object) -> None:
    _messages.append(text.decode(errors="replace"))


_kept_message = _LOG(_keep_message)  # it must live as long as the library


@cache
def _library() -> Any:
    """The library with its functions declared, or the reason why it can't be used."""
    spec = find_spec("xllamacpp")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("xllamacpp*")) if _is_library(file)]
    if not files:
        return "the package xllamacpp is not installed"
    try:
        found = ctypes.CDLL(str(files[0]))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"the library of xllamacpp can't be used: {error}"
    found.llama_log_set(_kept_message, None)
    found.llama_backend_init()
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_library(file: Path) -> bool:
    return file.suffix in (".so", ".pyd", ".dylib")


class LlamaCpp(Runtime):
    """Runs GGUF files with llama.cpp on the CPU, for one sample at a time."""

    name = "llamacpp"
    suffix = ".gguf"
    decoders_only = True

    @staticmethod
    def missing() -> str | None:
        found = "the package gguf is not installed" if find_spec("gguf") is None else _library()
        return found if isinstance(found, str) else None

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        self.library, self.threads = _library(), threads or _cores()
        self.inputs, self.outputs, self.batch = (IDS,), ("logits",), None
        self.context: int | None = None
        _messages.clear()
        self.model = self.library.llama_model_load_from_file(os.fsencode(path), self._model_parameters())
        if not self.model:
            raise RuntimeError(_failure())
        self.vocabulary = self.library.llama_model_get_vocab(self.model)
        self.rows = int(self.library.llama_vocab_n_tokens(self.vocabulary))
        self.capacity = self.used = 0
        self._reserve(_LEAST_CONTEXT)

    def _model_parameters(self) -> _Parameters:
        found: _Parameters = self.library.llama_model_default_params()
        return found

    def _reserve(self, tokens: int) -> None:
        """A new context for so many tokens."""
        self._free_context()
        size = max(_LEAST_CONTEXT, -(-tokens // 256) * 256)
        parameters = self.library.llama_context_default_params()
        for field, value in ((_CONTEXT, size), (_BATCH, min(size, _MOST_BATCH)), (_MICRO_BATCH, _LEAST_CONTEXT)):
            parameters.words[field] = value
        _messages.clear()
        self.context = self.library.llama_init_from_model(self.model, parameters)
        if not self.context or self.library.llama_n_ctx(self.context) < size:
            raise RuntimeError(_failure())
        self.library.llama_set_n_threads(self.context, self.threads, self.threads)
        self.capacity, self.used = size, 0
        self.most = int(self.library.llama_n_batch(self.context))
        self.tokens = self.library.llama_batch_init(self.most, 0, 1)

    def _free_context(self) -> None:
        if self.context:
            self.library.llama_batch_free(self.tokens)
            self.library.llama_free(self.context)
            self.context = None

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self._free_context()
            self.library.llama_model_free(self.model)

    def feed(self, *args: Any, **kwargs: Any) -> dict[str, NDArray[Any]]:
        """The token ids of a call of the model. Padding isn't supported."""
        mask = kwargs.pop(MASK, None)
        if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
            raise ArtefactError(
                "llama.cpp takes samples without padding",
                where=MASK,
                fix="pass samples of equal length, or one sample at a time",
                code="padding",
            )
        return super().feed(*args, **kwargs)

    def run(self, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Scores of the next token after each token, sample by sample."""
        found = []
        for row in feed[IDS]:
            self.reset(len(row))
            found.append(self.step(row[None]))
        return [np.concatenate(found)]

    def reset(self, tokens: int = _LEAST_CONTEXT) -> None:
        """Forget the cached tokens, and provide space for so many."""
        if tokens > self.capacity:
            self._reserve(tokens)
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        self.used = 0

    def step(self, ids: NDArray[Any]) -> NDArray[np.float32]:
        """Scores after each of these tokens (1, tokens), which follow the cached ones."""
        row = ids.reshape(-1)
        wrong = row[(row < 0) | (row >= self.rows)]
        if len(ids) != 1 or wrong.size or self.used + len(row) > self.capacity:
            raise ArtefactError(
                "llama.cpp can't run these tokens",
                value=f"token {wrong[0]}" if wrong.size else f"{ids.shape}, {self.used} before",
                fix=f"pass one sample of tokens below {self.rows}, and at most {self.capacity} of them",
                code="runtime-failed",
            )
        found = np.empty((1, len(row), self.rows), dtype=np.float32)
        for start in range(0, len(row), self.most):
            self._decode(row[start : start + self.most], found[0, start : start + self.most])
        return found

    def _decode(self, row: NDArray[Any], scores: NDArray[np.float32]) -> None:
        batch = self.tokens
        for index, token in enumerate(row):
            batch.token[index], batch.pos[index] = int(token), self.used + index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
        batch.n_tokens = len(row)
        _messages.clear()
        if code := self.library.llama_decode(self.context, batch):
            raise ArtefactError(
                f"llama.cpp can't run the artefact with these inputs: {_failure()}",
                value=code,
                fix="pass fewer tokens",
                code="runtime-failed",
            )
        for index in range(len(row)):
            pointer = self.library.llama_get_logits_ith(self.context, index)
            scores[index] = np.ctypeslib.as_array(pointer, (self.rows,))
        self.used += len(row)

    def decoding(self) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
        """Feeds tokens after those that it got before. Another call begins again."""
        limit = int(self.library.llama_model_n_ctx_train(self.model))
        self.reset(min(limit, _MOST_BATCH))
        return self.step

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a text; `special` adds those that begin and end it."""
        data = text.encode()
        found = (_INT * (len(data) + 16))()
        count = self.library.llama_tokenize(self.vocabulary, data, len(data), found, len(found), special, False)
        return list(found[:count])

    def concerns(self, model: nn.Module, ids: Tensor | None) -> list[Problem]:
        """Whether the file has the tokenizer of the model: both tokenize a text and the data to check with."""
        tokenizer = tokenizer_of(bare(model))
        if tokenizer is None:
            return []  # the export warned about it
        texts = [_TEXT, *(() if ids is None else tokenizer.batch_decode(ids[:4]))]
        differ = [
            text for text in texts if self.tokenize(text) != tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        if not differ:
            return []
        noted = Problem(
            what="llama.cpp tokenizes texts differently than the model's tokenizer",
            where=f"{len(differ)} of {len(texts)} texts",
            value=differ[0][:40],
            fix="export the GGUF file with tokenizer=; pass token ids to llama.cpp if this remains",
            code="tokenizer-differs",
        )
        return [noted]

    @contextmanager
    def rounding(self, model: nn.Module) -> Iterator[None]:
        """Round the inputs of linear layers as llama.cpp does."""
        integer = {
            site.rpartition(":")[0].split("#")[0]
            for site, quantizer in quantizers_of(model).items()
            if quantizer.weight and stored_type(quantizer.spec.format) is not None
        }
        hooks = [
            module.register_forward_pre_hook(_rounded_blocks if name in integer else _rounded_halves)
            for name, module in bare(model).named_modules()
            if isinstance(module, nn.Linear)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @classmethod
    def write(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write the blocks of a quantized model."""
        from bitwright.deployment.export import export  # it imports this module's base

        export(model, path, inputs, artefact="gguf", tokenizer=tokenizer_of(bare(model)))

    @classmethod
    def write_float(cls, model: nn.Module, path: Path, inputs: Any) -> None:
        """Write matrices as float16, the usual reference of llama.cpp."""
        write_gguf(model, (), path, tokenizer_of(bare(model)))

    @classmethod
    def damages(cls, path: Path) -> list[Damage]:
        """Compare all tensors with their digests."""
        return file_damages(path)

    @classmethod
    def has_digests(cls, path: Path) -> bool:
        """Files of other tools have no digests."""
        return bool(stored_digests(path))


def _rounded_blocks(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Q8_0: 32 values share a scale, which is stored in float16."""
    x: Tensor = args[0]
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(blocks * torch.where(scale > 0, 1 / scale, 0.0))
    return ((codes * scale.half().float()).flatten(-2).to(x.dtype), *args[1:])


def _rounded_halves(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].half().to(args[0].dtype), *args[1:])


def _failure() -> str:
    """The last line that llama.cpp logged about an error."""
    lines = [line.strip() for line in "".join(_messages).splitlines()]
    told = [line for line in lines if "error" in line.lower() or "failed" in line.lower()] or lines
    return told[0] if told else "llama.cpp doesn't state a reason"
