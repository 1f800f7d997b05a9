"""A folder in the format compressed-tensors, which `transformers` and vLLM load.

There are three layouts: integer weights packed into int32 words along the inputs, as unsigned numbers with the offset
2^(B−1); int8 weights for dynamic int8 activations; and FP8 weights. Scales are stored in the model's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bitwright.core.documents import parse_json, read_text
from bitwright.core.errors import ArtefactError, Problem, first_line
from bitwright.core.files import write_text
from bitwright.core.formats import Format
from bitwright.core.output_folder import staged_output
from bitwright.deployment.artefacts.weights import (
    IntegerWeight,
    WeightFile,
    config_of,
    float_state,
    quantized_inputs,
)
from bitwright.deployment.onnx_files import DIGESTS, Damage
from bitwright.graph.interception import bare

_Groups = list[tuple[str, list[IntegerWeight]]]  # layouts and their weights
_WORD = 32
PACKED, _INT8, _FP8, _MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
_WEIGHTS = "model.safetensors"
_SITES = "bitwright.sites"


class CompressedTensors(WeightFile):
    """A folder with config.json and the weights, for `AutoModelForCausalLM.from_pretrained` and vLLM."""

    unties = True

    def refusal(self, format: Format, shape: torch.Size) -> tuple[str, str] | None:
        """Integers of up to 8 bits per channel or group, and FP8 per channel."""
        if format.minifloat is not None:
            if str(format) != "fp8e4m3/channel":
                return "it stores only small floats of the format fp8e4m3/channel", "use fp8e4m3/channel"
            return None
        if format.dynamic or format.bits > 8:
            return "it stores only integers of at most 8 bits", "use int4/group32 or int8/channel/sym"
        if format.granularity not in ("channel", "group"):
            return "it stores only scales per channel or group", "use int8/channel/sym"
        if not format.signed and format.symmetric:
            return "symmetric weights must be signed", f"use int{format.bits}/…/sym, or asym"
        return None

    def stores_activation(self, format: Format) -> bool:
        """Scales per token that are computed at run time, of int8 and FP8."""
        return str(format) in ("int8/token/sym/dynamic", "int8/token/asym/dynamic", "fp8e4m3/token/dynamic")

    def write(
        self, model: nn.Module, weights: Sequence[IntegerWeight], path: Path, *, tokenizer: Any = None, inputs: Any = ()
    ) -> list[Problem]:
        """Write config.json, generation_config.json, model.safetensors and the tokenizer."""
        config = config_of(model, "compressed-tensors")
        activations = quantized_inputs(model, weights, inputs)
        state = {name: tensor.contiguous().clone() for name, tensor in _untied(model, weights).items()}
        groups = _groups(weights, activations)
        for layout, members in groups:
            for weight in members:
                dtype = weight.weight.dtype
                state |= {f"{weight.module}.{name}": tensor for name, tensor in stored(weight, dtype, layout).items()}
        metadata = {
            "format": "pt",
            DIGESTS: json.dumps({name: _digest(tensor) for name, tensor in state.items()}),
            _SITES: json.dumps({weight.site: weight.module for weight in weights}),
        }
        with staged_output(path) as staged:
            config.save_pretrained(staged)
            file = staged / "config.json"
            known = json.loads(file.read_text(encoding="utf-8"))
            known["architectures"] = [type(bare(model)).__name__]
            formats = [(layout, {weight.module: weight.format for weight in members}) for layout, members in groups]
            known["quantization_config"] = quantization_config(model, formats, activations)
            if _unties(model, weights):
                known["tie_word_embeddings"] = False
            write_text(file, json.dumps(known, indent=2) + "\n")
            generation = getattr(model, "generation_config", None)
            if generation is not None:
                generation.save_pretrained(staged)
            save_file(state, staged / _WEIGHTS, metadata=metadata)
            if tokenizer is not None:
                tokenizer.save_pretrained(staged)
        return _unreadable(groups, activations, path)


def _unreadable(groups: _Groups, activations: dict[str, Format], path: Path) -> list[Problem]:
    """A warning about what vLLM loads and transformers doesn't."""
    asymmetric = [weight.site for _, members in groups for weight in members if not weight.format.symmetric]
    if not asymmetric or (len(groups) == 1 and not activations):
        return []
    noted = Problem(
        what="transformers 5.23 reads zero points only if all quantized layers have one format and float activations",
        where=str(path),
        value=f"{len(groups)} formats, {len(asymmetric)} layers with zero points",
        fix="use symmetric weights, or head_bits=4 for the same format everywhere, or load the folder with vLLM",
        code="zero-points-not-loadable",
    )
    return [noted]


def _unties(model: nn.Module, weights: Sequence[IntegerWeight]) -> bool:
    """Whether the head is quantized, and the embedding with the same weight isn't."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    return embedding is not None and any(w.weight.data_ptr() == embedding.weight.data_ptr() for w in weights)


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


def _groups(weights: Sequence[IntegerWeight], activations: dict[str, Format]) -> _Groups:
    """Weights with the same format of weights and inputs."""
    found: dict[tuple[str, str], tuple[str, list[IntegerWeight]]] = {}
    for weight in weights:
        given, layout = activations.get(weight.module), PACKED
        if weight.format.minifloat is not None:
            layout = _FP8
        elif given is not None and weight.format.bits == 8:
            layout = _INT8
        kind = f"{weight.format.bits} {weight.format.symmetric} {weight.group} {weight.format.minifloat}"
        found.setdefault((kind, str(given)), (layout, []))[1].append(weight)
    return list(found.values())


def stored(weight: IntegerWeight, dtype: torch.dtype, layout: str = PACKED) -> dict[str, Tensor]:
    """The tensors of one layer."""
    scale = weight.by_group(weight.grid.scale).to(dtype).contiguous()
    if weight.format.minifloat is not None:
        scale = scale * (weight.grid.qmax / weight.format.minifloat.largest)
        return {"weight": weight.rounded.div(scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    codes = weight.codes
    bits, signed = weight.format.bits, weight.format.signed
    offset = 1 << (bits - 1) if signed else 0  # codes as unsigned numbers
    zero_point = weight.by_group(weight.grid.zero_point).to(torch.int32)
    if layout == _INT8:
        found = {"weight": (codes - (0 if signed else 128)).to(torch.int8), "weight_scale": scale}
        if not weight.format.symmetric:
            found["weight_zero_point"] = (zero_point - (0 if signed else 128)).to(torch.int8).contiguous()
        return found
    found = {
        "weight_packed": packed(codes + offset, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(codes.shape),
    }
    if not weight.format.symmetric:
        found["weight_zero_point"] = packed((zero_point + offset).T, bits).T.contiguous()
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


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `packed`.

    >>> unpacked(torch.tensor([[-2147483615]], dtype=torch.int32), 4, 8).tolist()
    [[1, 2, 0, 0, 0, 0, 0, 8]]
    """
    stream = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    parts = stream[:, : columns * bits].reshape(len(words), columns, bits).astype(np.int64)
    return torch.from_numpy((parts << np.arange(bits)).sum(-1))


def quantization_config(
    model: nn.Module, groups: Sequence[tuple[str, dict[str, Format]]], activations: dict[str, Format]
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json. `groups` has a layout and the format of each layer."""
    modules = {name for _, members in groups for name in members}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layouts = sorted({layout for layout, _ in groups})
    found: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": layouts[0] if len(layouts) == 1 else _MIXED,
        "quantization_status": "compressed",
        "ignore": [name for name in linears if name not in modules],
        "config_groups": {
            f"group_{number}": {
                "targets": list(members),
                "weights": _arguments(next(iter(members.values()))),
                "input_activations": _arguments(given) if (given := activations.get(next(iter(members)))) else None,
                "output_activations": None,
                "format": layout,
            }
            for number, (layout, members) in enumerate(groups)
        },
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    if (
        not activations
        and len(groups) == 1
        and any(not format.symmetric for _, members in groups for format in members.values())
    ):
        found["dequantize"] = True  # transformers 5.23 reads packed zero points only this way
    return found


def _arguments(format: Format) -> dict[str, Any]:
    return {
        "num_bits": format.bits,
        "type": "int" if format.minifloat is None else "float",
        "symmetric": format.symmetric,
        "strategy": format.granularity,
        "group_size": format.group if format.granularity == "group" else None,
        "dynamic": format.dynamic,
    }


def folder_config(path: Path) -> dict[str, Any]:
    """The contents of config.json."""
    file = path / "config.json"
    if not file.is_file():
        what, fix = "the folder has no config.json", "pass the folder of an exported model"
        raise ArtefactError(what, where=str(path), fix=fix, code="no-such-artefact")
    found: dict[str, Any] = parse_json(
        read_text(file), where=str(file), what="config.json", fix="export it again", error=ArtefactError
    )
    return found


def input_formats(path: Path) -> set[str]:
    """The types of activations that the layers round: "int" and "float"."""
    groups = (folder_config(path).get("quantization_config") or {}).get("config_groups", {}).values()
    return {str(group["input_activations"]["type"]) for group in groups if group.get("input_activations")}


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(raw.numpy().tobytes()).hexdigest()[:16]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path / _WEIGHTS, "pt")
    except Exception as error:  # OSError and the library's own type
        raise ArtefactError(
            f"the weights can't be read: {first_line(error)}",
            where=str(path / _WEIGHTS),
            fix="export it again",
            code="artefact-not-loadable",
        ) from error


def folder_digests(path: Path) -> dict[str, str]:
    """The digests of the tensors of a folder; empty if another tool wrote it."""
    with _opened(path) as file:
        found: dict[str, str] = json.loads((file.metadata() or {}).get(DIGESTS, "{}"))
    return found


def file_damages(path: Path) -> list[Damage]:
    """Tensors that differ from those that were written."""
    known = folder_digests(path)
    if not known:
        return []
    with _opened(path) as file:
        found = {name: _digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return [
        Damage(site=name, what="the values changed after the export" if name in found else "the tensor is missing")
        for name in known
        if found.get(name) != known[name]
    ]


def stored_sites(path: Path) -> dict[str, NDArray[Any]]:
    """`<site>.codes` and `<site>.scale` of the packed weights of a folder that Bitwright wrote."""
    found: dict[str, NDArray[Any]] = {}
    with _opened(path) as file:
        names = set(file.keys())
        for site, module in json.loads((file.metadata() or {}).get(_SITES, "{}")).items():
            scale = file.get_tensor(f"{module}.weight_scale")
            if f"{module}.weight_packed" in names and scale.dtype == torch.float32:
                words, shape = (file.get_tensor(f"{module}.weight_{name}") for name in ("packed", "shape"))
                bits = words.shape[1] * _WORD // int(shape[1])
                if f"{module}.weight_zero_point" not in names:  # signed
                    found[f"{site}.codes"] = unpacked(words, bits, int(shape[1])).numpy() - (1 << (bits - 1))
                found[f"{site}.scale"] = scale.numpy()
    return found
