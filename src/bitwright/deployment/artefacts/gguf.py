"""GGUF files for llama.cpp: Q4_0, Q4_1 and Q8_0 blocks of 32 weights, from groups of 32 along the inputs.

Scales (and minima) are float16 there, so values differ from the simulation by up to 0.05 %. Queries and keys are
permuted, because llama.cpp pairs neighbouring channels for rotary positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.errors import PlanError, Problem
from bitwright.core.files import replacing
from bitwright.core.formats import Format
from bitwright.deployment.artefacts.weights import IntegerWeight, WeightFile, config_of, float_state

_BLOCK = 32


class Gguf(WeightFile):
    """A GGUF file of a Llama model with Q4_0, Q4_1 and Q8_0 weights, without a tokenizer."""

    def refusal(self, format: Format, shape: torch.Size) -> tuple[str, str] | None:
        """Groups of 32 with 4 bits, or 8 bits without zero points."""
        if stored_type(format) is None:
            return "blocks are Q4_0, Q4_1 or Q8_0", "use int4/group32, uint4/group32/asym or int8/group32"
        return None

    def write(self, model: nn.Module, weights: Sequence[IntegerWeight], path: Path) -> None:
        """Write the metadata and all tensors."""
        gguf = _library()
        config = config_of(model, "gguf")
        if problems := _config_problems(config):
            raise PlanError(problems, title="llama.cpp's architecture llama doesn't describe this model")
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        tied = bool(config.tie_word_embeddings)
        with replacing(path) as temporary:
            writer = gguf.GGUFWriter(temporary, "llama")
            _write_config(writer, config)
            for name, tensor in float_state(model, weights).items():
                if name == "lm_head.weight" and tied:
                    continue
                writer.add_tensor(_name(names, name), _permuted(name, tensor.float(), config).cpu().numpy())
            for weight in weights:
                kind = stored_type(weight.format)
                blocks = _permuted(f"{weight.module}.weight", packed_blocks(weight), config)
                data = blocks.cpu().numpy()
                raw = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(_name(names, f"{weight.module}.weight"), data, raw_dtype=raw)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        problem = Problem(
            what="the package gguf, which writes this artefact, isn't installed",
            where="gguf",
            fix="pip install gguf",
            code="package-missing",
        )
        raise PlanError([problem]) from error
    return gguf


def stored_type(format: Format) -> str | None:
    """The type of blocks that stores a format exactly, except for the precision of scales.

    >>> stored_type(Format.parse("int4/group32/sym/full")), stored_type(Format.parse("int4/group64/sym"))
    ('Q4_0', None)
    """
    if format.granularity != "group" or format.group != _BLOCK or format.minifloat is not None:
        return None
    if format.bits == 4:
        return "Q4_0" if format.symmetric and format.signed else "Q4_1"
    return "Q8_0" if format.bits == 8 and format.symmetric and format.signed else None


def packed_blocks(weight: IntegerWeight) -> Tensor:
    """The bytes of a weight, (outputs, bytes): each block has its scale, a minimum in Q4_1, and 32 codes."""
    rows = weight.codes.shape[0]
    kind = stored_type(weight.format)
    codes = weight.codes.reshape(rows, -1, _BLOCK)
    scale = weight.by_group(weight.grid.scale)
    head = [_half(scale)]
    if kind == "Q8_0":
        body = codes.to(torch.int8).view(torch.uint8)
    else:
        lowest = -8 if kind == "Q4_0" else weight.grid.qmin
        if kind == "Q4_1":
            head.append(_half((lowest - weight.by_group(weight.grid.zero_point)) * scale))
        unsigned = (codes - lowest).to(torch.uint8)
        body = unsigned[..., : _BLOCK // 2] | (unsigned[..., _BLOCK // 2 :] << 4)
    return torch.cat([*head, body], dim=-1).reshape(rows, -1)


def _half(values: Tensor) -> Tensor:
    """float16 as two bytes, (outputs, blocks, 2)."""
    return values.half().unsqueeze(-1).contiguous().view(torch.uint8)


def _permuted(name: str, tensor: Tensor, config: Any) -> Tensor:
    """The rows of queries and keys in llama.cpp's order: the two halves of a head alternate."""
    module = name.rsplit(".", 2)[-2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _name(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        problem = Problem(
            what="llama.cpp's architecture llama doesn't have this tensor", where=name, code="unknown-tensor"
        )
        raise PlanError([problem])
    return str(found)


def _config_problems(config: Any) -> list[Problem]:
    rope = getattr(config, "rope_parameters", None) or {}
    wrong = [
        ("model_type", config.model_type, config.model_type == "llama"),
        ("rope_parameters", rope, rope.get("rope_type", "default") == "default"),
        ("hidden_act", getattr(config, "hidden_act", "silu"), getattr(config, "hidden_act", "silu") == "silu"),
    ]
    return [
        Problem(
            what="this configuration isn't supported",
            where=name,
            value=value,
            fix="export compressed-tensors or qdq instead",
            code="unsupported-model",
        )
        for name, value, fine in wrong
        if not fine
    ]


def _write_config(writer: Any, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
