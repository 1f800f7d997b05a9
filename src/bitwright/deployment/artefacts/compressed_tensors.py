"""A folder in the format compressed-tensors, which `transformers` and vLLM load: packed integer weights with scales.

Codes are packed into int32 words along the inputs, as unsigned numbers with the offset 2^(B−1). Scales are stored in
the model's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.core.files import write_text
from bitwright.core.formats import Format
from bitwright.core.output_folder import staged_output
from bitwright.deployment.artefacts.weights import IntegerWeight, WeightFile, config_of, float_state

_WORD = 32
_FORMAT = "pack-quantized"


class CompressedTensors(WeightFile):
    """A folder with config.json and packed weights, for `AutoModelForCausalLM.from_pretrained` and vLLM."""

    def refusal(self, format: Format, shape: torch.Size) -> tuple[str, str] | None:
        """Integers of up to 8 bits per channel or group."""
        if format.minifloat is not None or format.dynamic or format.bits > 8:
            return "it stores only integers of at most 8 bits", "use int4/group32 or int8/channel/sym"
        if format.granularity not in ("channel", "group"):
            return "it stores only scales per channel or group", "use int8/channel/sym"
        if not format.signed and format.symmetric:
            return "symmetric weights must be signed", f"use int{format.bits}/…/sym, or asym"
        return None

    def write(self, model: nn.Module, weights: Sequence[IntegerWeight], path: Path) -> None:
        """Write config.json, generation_config.json and model.safetensors."""
        config = config_of(model, "compressed-tensors")
        state = {name: tensor.contiguous().clone() for name, tensor in _untied(model, weights).items()}
        for weight in weights:
            dtype = model.get_submodule(weight.module).weight.dtype
            assert isinstance(dtype, torch.dtype)
            state |= {f"{weight.module}.{name}": tensor for name, tensor in stored(weight, dtype).items()}
        with staged_output(path) as staged:
            config.save_pretrained(staged)
            file = staged / "config.json"
            known = json.loads(file.read_text(encoding="utf-8"))
            known["architectures"] = [type(model).__name__]
            known["quantization_config"] = quantization_config(model, weights)
            write_text(file, json.dumps(known, indent=2) + "\n")
            generation = getattr(model, "generation_config", None)
            if generation is not None:
                generation.save_pretrained(staged)
            save_file(state, staged / "model.safetensors", metadata={"format": "pt"})


def _untied(model: nn.Module, weights: Sequence[IntegerWeight]) -> dict[str, Tensor]:
    """The float tensors, each once: tied names follow from config.json."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in float_state(model, weights).items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() == 0 or key not in seen:
            seen.add(key)
            found[name] = tensor.detach()
    return found


def stored(weight: IntegerWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one layer."""
    bits, signed = weight.format.bits, weight.format.signed
    offset = 1 << (bits - 1) if signed else 0  # codes as unsigned numbers
    found = {
        "weight_packed": packed(weight.codes + offset, bits),
        "weight_scale": weight.by_group(weight.grid.scale).to(dtype).contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if not weight.format.symmetric:
        zero_point = weight.by_group(weight.grid.zero_point).to(torch.int32) + offset
        found["weight_zero_point"] = packed(zero_point.T, bits).T.contiguous()
    return found


def packed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes of a matrix, packed densely into int32 along the last axis, from the lowest bit.

    >>> packed(torch.tensor([[1, 2, 0, 0, 0, 0, 0, 8]]), 4).tolist()
    [[-2147483615]]
    """
    rows, columns = codes.shape
    groups = -(-columns // _WORD)
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, groups * _WORD - columns)).reshape(-1, _WORD)
    # 32 codes fill `bits` words exactly
    start = torch.arange(_WORD, device=codes.device) * bits
    words = torch.zeros(len(padded), bits + 1, dtype=torch.int64, device=codes.device)
    shifted = padded << (start % _WORD)
    low, high = shifted & 0xFFFFFFFF, shifted >> _WORD
    words.scatter_add_(1, (start // _WORD).expand_as(low), low)
    words.scatter_add_(1, (start // _WORD + 1).expand_as(high), high)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)[:, :bits]
    return words.reshape(rows, -1)[:, : -(-columns * bits // _WORD)].to(torch.int32).contiguous()


def quantization_config(model: nn.Module, weights: Sequence[IntegerWeight]) -> dict[str, Any]:
    """The entry `quantization_config` of config.json: one group of layers for each format."""
    groups: dict[str, list[IntegerWeight]] = {}
    for weight in weights:
        groups.setdefault(f"{weight.format.bits} {weight.format.symmetric} {weight.group}", []).append(weight)
    modules = {weight.module for weight in weights}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "ignore": [name for name in linears if name not in modules],
        "config_groups": {
            f"group_{number}": {
                "targets": [weight.module for weight in members],
                "weights": _arguments(members[0].format),
                "input_activations": None,
                "output_activations": None,
                "format": _FORMAT,
            }
            for number, members in enumerate(groups.values())
        },
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(format: Format) -> dict[str, Any]:
    return {
        "num_bits": format.bits,
        "type": "int",
        "symmetric": format.symmetric,
        "strategy": format.granularity,
        "group_size": format.group if format.granularity == "group" else None,
        "dynamic": False,
    }
