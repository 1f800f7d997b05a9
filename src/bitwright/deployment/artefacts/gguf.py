"""GGUF files for llama.cpp: Q4_0, Q4_1 and Q8_0 blocks of 32 weights, from groups along the inputs or channels.

Scales (and minima) are float16 there, so values differ from the simulation by up to 0.05 %. Other matrices are stored
in float16. For some architectures, queries and keys are permuted, because llama.cpp pairs neighbouring channels for
rotary positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bitwright.core import __version__
from bitwright.core.errors import ArtefactError, PlanError, Problem, first_line
from bitwright.core.files import replacing
from bitwright.core.formats import Format
from bitwright.deployment.artefacts.gguf_metadata import (
    Architecture,
    architecture_of,
    rotary_factors,
    write_config,
    write_tokenizer,
)
from bitwright.deployment.artefacts.weights import IntegerWeight, WeightFile, config_of, float_state
from bitwright.deployment.onnx_files import DIGESTS, Damage
from bitwright.graph.interception import bare

BLOCK = 32
_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # llama.cpp's names of files by their most common type; 1: float16
_LARGEST = float(np.finfo(np.float16).max)
_LOST = 1e-3  # the error of a scale in float16, relative to the largest scale of the weight
_Entry = tuple[str, str | None, Callable[[], Tensor]]  # name, type of blocks, contents


class Gguf(WeightFile):
    """A GGUF file with Q4_0, Q4_1, Q8_0 and float16 weights, and the tokenizer."""

    unties = True

    def refusal(self, format: Format, shape: torch.Size) -> tuple[str, str] | None:
        """Groups that consist of blocks of 32, with 4 bits, or 8 bits without zero points."""
        if stored_type(format) is None:
            return "blocks are Q4_0, Q4_1 or Q8_0", "use int4/group32, uint4/group32/asym or int8/group32"
        if shape[1] % BLOCK:
            return f"blocks have {BLOCK} inputs, and this weight has {shape[1]}", "keep it in float"
        return None

    def write(
        self, model: nn.Module, weights: Sequence[IntegerWeight], path: Path, *, tokenizer: Any = None, inputs: Any = ()
    ) -> list[Problem]:
        """Write the metadata and all tensors."""
        return write_gguf(model, weights, path, tokenizer)


def write_gguf(model: nn.Module, weights: Sequence[IntegerWeight], path: Path, tokenizer: Any) -> list[Problem]:
    """Write a model with these integer weights; all others are float16. Returns warnings."""
    gguf, model = _library(), bare(model)
    config = config_of(model, "gguf").get_text_config()
    architecture = architecture_of(config)
    entries = list(_entries(gguf, model, weights, config, architecture))
    writer: Any = gguf.GGUFWriter(None, architecture.name)
    noted = write_tokenizer(writer, tokenizer, model.get_input_embeddings().num_embeddings, where=str(path))  # type: ignore[operator]
    writer.add_quantized_by(f"bitwright {__version__}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = [kind for _, kind, _ in entries if kind is not None]
    writer.add_file_type(_TYPES[max(kinds, key=kinds.count)] if kinds else 1)
    write_config(writer, config, architecture)
    digests = {}
    for name, kind, contents in entries:  # one after the other, because all of them may not fit into memory
        array = contents().cpu().numpy()
        raw = None if kind is None else gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, raw_dtype=raw)
        digests[name] = _digest(array)
    writer.add_string(DIGESTS, json.dumps(digests))
    with replacing(path) as temporary:
        writer.write_header_to_file(path=temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, _, contents in entries:
            writer.write_tensor_data(np.ascontiguousarray(contents().cpu().numpy()))
        writer.close()
    return noted


def _entries(
    gguf: Any, model: nn.Module, weights: Sequence[IntegerWeight], config: Any, architecture: Architecture
) -> Iterator[_Entry]:
    """All tensors of the file."""
    found = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(found, config.num_hidden_layers)
    tied = _shared_head(model)
    for name, tensor in float_state(model, weights).items():
        if name != tied:
            yield _name(names, name), None, lambda n=name, t=tensor: _as_float(n, t, config, architecture)  # type: ignore[misc]
    factors = rotary_factors(model, config)
    if factors is not None:
        yield "rope_freqs.weight", None, lambda: factors
    for weight in weights:
        name, kind = f"{weight.module}.weight", stored_type(weight.format)
        yield (
            _name(names, name, f'keep_float="{weight.module}"'),
            kind,
            lambda n=name, w=weight: _permuted(n, packed_blocks(w), config, architecture),  # type: ignore[misc]
        )


def _shared_head(model: nn.Module) -> str | None:
    """The name of the head's weight if it is the embedding; llama.cpp then uses the embedding."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None or head.weight is not model.get_input_embeddings().weight:  # type: ignore[operator]
        return None
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        problem = Problem(
            what="the package gguf, which writes this artefact, isn't installed",
            where="gguf",
            fix="pip install 'bitwright[language-models]'",
            code="package-missing",
        )
        raise PlanError([problem]) from error
    return gguf


def stored_type(format: Format) -> str | None:
    """The type of blocks that stores a format exactly, except for the precision of scales.

    >>> [stored_type(Format.parse(text)) for text in ("int4/group32/sym/full", "int8/channel/sym", "int4/group16/sym")]
    ['Q4_0', 'Q8_0', None]
    """
    if format.minifloat is not None or format.dynamic or format.granularity not in ("group", "channel", "tensor"):
        return None
    if format.granularity == "group" and format.group % BLOCK:
        return None
    if format.bits == 4:
        return "Q4_0" if format.symmetric and format.signed else "Q4_1"
    return "Q8_0" if format.bits == 8 and format.symmetric and format.signed else None


def packed_blocks(weight: IntegerWeight) -> Tensor:
    """The bytes of a weight, (outputs, bytes): each block has its scale, a minimum in Q4_1, and 32 codes."""
    codes = weight.codes
    rows, kind = codes.shape[0], stored_type(weight.format)
    codes = codes.reshape(rows, -1, BLOCK)

    def by_block(part: Tensor) -> Tensor:
        groups = weight.by_group(part)
        return groups.repeat_interleave(codes.shape[1] // groups.shape[1], dim=1)

    scale = by_block(weight.grid.scale)
    head = [_half(scale, weight.site)]
    if kind == "Q8_0":
        body = codes.to(torch.int8).view(torch.uint8)
    else:
        lowest = -8 if kind == "Q4_0" else weight.grid.qmin
        if kind == "Q4_1":
            head.append(_half((lowest - by_block(weight.grid.zero_point)) * scale, weight.site))
        unsigned = (codes - lowest).to(torch.uint8)
        body = unsigned[..., : BLOCK // 2] | (unsigned[..., BLOCK // 2 :] << 4)
    return torch.cat([*head, body], dim=-1).reshape(rows, -1)


def _half(values: Tensor, site: str) -> Tensor:
    """float16 as two bytes, (outputs, blocks, 2)."""
    found, largest = values.half(), float(values.abs().max())
    if not float((found.float() - values).abs().max()) <= _LOST * largest:
        problem = Problem(
            what="GGUF files store scales in float16, which can't represent those of this weight",
            where=site,
            value=f"{largest:.3g}",
            fix=f"rescale the layer, so that its largest weights are between 1e-4 and {_LARGEST:.0f}, or keep it in "
            "float",
            code="scale-out-of-range",
        )
        raise PlanError([problem])
    return found.unsqueeze(-1).contiguous().view(torch.uint8)


def _as_float(name: str, tensor: Tensor, config: Any, architecture: Architecture) -> Tensor:
    """Matrices in float16 (in float32 if they exceed its range), vectors in float32."""
    values = tensor.detach().float()
    if values.dim() == 1:
        is_norm = "norm" in name and name.endswith(".weight")
        return _permuted(name, values + architecture.offset if is_norm else values, config, architecture)
    if values.numel() and float(values.abs().max()) <= _LARGEST:
        values = values.half()
    return _permuted(name, values, config, architecture)


def _permuted(name: str, tensor: Tensor, config: Any, architecture: Architecture) -> Tensor:
    """The rows of queries and keys in llama.cpp's order: the two halves of a head alternate."""
    module = name.rsplit(".", 2)[-2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)
    if heads is None or not architecture.permuted:
        return tensor
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _name(names: Any, name: str, fix: str = "export compressed-tensors or qdq instead") -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        problem = Problem(
            what="llama.cpp's architecture doesn't have this tensor",
            where=name,
            fix=fix,
            code="unknown-tensor",
        )
        raise PlanError([problem])
    return str(found)


def _digest(array: NDArray[Any]) -> str:
    return sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def _reader(path: Path) -> Any:
    try:
        return _library().GGUFReader(path)
    except Exception as error:  # it raises different types for a damaged file
        raise ArtefactError(
            f"this is not a complete GGUF file: {type(error).__name__}: {first_line(error)}",
            where=str(path),
            fix="export it again",
            code="artefact-not-loadable",
        ) from error


def stored_digests(path: Path) -> dict[str, str]:
    """The digests of the tensors of a file; empty if another tool wrote it."""
    field = _reader(path).fields.get(DIGESTS)
    if field is None:
        return {}
    try:
        found: dict[str, str] = json.loads(field.contents())
    except ValueError:
        return {"": "unreadable"}
    return found


def file_damages(path: Path) -> list[Damage]:
    """Tensors that differ from those that were written."""
    stored = stored_digests(path)
    if not stored:
        return []
    found = {str(tensor.name): _digest(tensor.data) for tensor in _reader(path).tensors}
    return [
        Damage(site=name, what="the values changed after the export" if name in found else "the tensor is missing")
        for name in stored
        if found.get(name) != stored[name]
    ]
