"""The metadata of GGUF files: how llama.cpp describes the architectures of transformers, and their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.core.errors import PlanError, Problem, did_you_mean

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
_SPACE = "▁"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
_SPLITS = {
    ("ByteLevel regex",): "gpt-2",
    ("Digits", "ByteLevel regex"): "smollm",
    (_WORDS % "{1,3}" + r"\s+(?!\S)|\s+", "ByteLevel"): "llama-bpe",
    (_WORDS % "" + r"\s+(?!\S)|\s+", "ByteLevel"): "qwen2",
}
"""How a tokenizer splits texts before it merges, and llama.cpp's name for that."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How llama.cpp computes a model type of transformers."""

    name: str
    """llama.cpp's architecture."""
    permuted: bool = False
    """Whether llama.cpp rotates neighbouring channels of queries and keys, and transformers the halves of a head."""
    activation: str = "silu"
    norm: str = "rms_norm_eps"
    """The setting with the epsilon of norms; another name than this one belongs to norms with a mean."""
    offset: float = 0.0
    """What transformers adds to the weights of norms when it uses them."""
    fixed: tuple[tuple[str, Any], ...] = ()
    """Settings that have this value in llama.cpp."""
    extra: Callable[[Any, Any], None] | None = None
    """Writes further metadata."""


def _gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _phi3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


_LLAMA = Architecture(name="llama", permuted=True)
_SEQUENTIAL = (("use_parallel_residual", False), ("qk_layernorm", False))
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture(name="qwen2", fixed=(("use_sliding_window", False),)),
    "qwen3": Architecture(name="qwen3", fixed=(("use_sliding_window", False),)),
    "phi3": Architecture(name="phi3", extra=_phi3),
    "gemma2": Architecture(name="gemma2", activation="gelu_pytorch_tanh", offset=1.0, extra=_gemma2),
    "granite": Architecture(name="granite", permuted=True, extra=_granite),
    "olmo2": Architecture(name="olmo2"),
    "stablelm": Architecture(name="stablelm", norm="layer_norm_eps", fixed=_SEQUENTIAL),
    "starcoder2": Architecture(name="starcoder2", norm="norm_epsilon", activation="gelu_pytorch_tanh"),
}
"""By model type. The tests compare each of them with llama.cpp."""
_WINDOWED = ("gemma2", "phi3")  # llama.cpp masks with a sliding window


def architecture_of(config: Any) -> Architecture:
    """llama.cpp's description of a model; raises an error with everything that it can't describe."""
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        problem = Problem(
            what="there is no GGUF description of this model type",
            where="model_type",
            value=config.model_type,
            fix=did_you_mean(config.model_type, ARCHITECTURES) + ", or export compressed-tensors or qdq instead",
            code="unsupported-model",
        )
        raise PlanError([problem], title="llama.cpp can't run this model")
    rope, window = rope_of(config), getattr(config, "sliding_window", None)
    act = getattr(config, "hidden_act", found.activation)
    head = head_size(config)
    wrong = [
        ("rope_parameters", rope, rope.get("rope_type", "default") not in ("default", "linear", "llama3")),
        ("hidden_act", act, act != found.activation),
        (
            "sliding_window",
            window,
            bool(window)
            and window < config.max_position_embeddings
            and found.name not in _WINDOWED
            and getattr(config, "use_sliding_window", True),
        ),
        *((name, getattr(config, name, value), getattr(config, name, value) != value) for name, value in found.fixed),
    ]
    if found.name == "gemma2":
        scale = config.query_pre_attn_scalar
        wrong.append(("query_pre_attn_scalar", scale, scale != head))
    problems = [
        Problem(
            what="llama.cpp doesn't compute this setting",
            where=name,
            value=value,
            fix="export compressed-tensors or qdq instead",
            code="unsupported-model",
        )
        for name, value, bad in wrong
        if bad
    ]
    if problems:
        raise PlanError(problems, title=f"llama.cpp's architecture {found.name} doesn't describe this model")
    return found


def rope_of(config: Any) -> dict[str, Any]:
    """The settings of rotary positions."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {"rope_theta": getattr(config, "rope_theta", 10000.0), **found}


def head_size(config: Any) -> int:
    """The channels of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def write_config(writer: Any, config: Any, architecture: Architecture) -> None:
    """Write the sizes and settings of the model."""
    head, rope = head_size(config), rope_of(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    epsilon = float(getattr(config, architecture.norm))
    if architecture.norm == "rms_norm_eps":
        writer.add_layer_norm_rms_eps(epsilon)
    else:
        writer.add_layer_norm_eps(epsilon)
    if architecture.name == "stablelm":
        writer.add_parallel_residual(False)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    writer.add_rope_dimension_count(int(head * (1.0 if share is None else share)))
    if rope.get("rope_type") == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    writer.add_vocab_size(config.vocab_size)
    if architecture.extra is not None:
        architecture.extra(writer, config)


def rotary_factors(model: nn.Module, config: Any) -> Tensor | None:
    """What llama.cpp divides the rotary frequencies by; None if they are the usual ones (or scaled linearly)."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    size = head_size(config)
    usual = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    found = (getattr(module, "inv_freq", None) for module in model.modules())
    used = next(one for one in found if isinstance(one, Tensor))
    return (usual / used.double().cpu()).float()


def write_tokenizer(writer: Any, tokenizer: Any, rows: int, *, where: str) -> list[Problem]:
    """Write the tokenizer; `rows` is the number of embeddings. Returns warnings."""
    data = None if tokenizer is None else tokenizer_data(tokenizer)
    if data is None:
        writer.add_tokenizer_model("none")
        told = "the file has no tokenizer, so llama.cpp runs it only with token ids"
        fix = "pass tokenizer=, or save the tokenizer into the model's folder"
        if tokenizer is not None:
            told, fix = f"GGUF files store only BPE tokenizers; {told}", "pass token ids to llama.cpp"
        value = None if tokenizer is None else type(tokenizer).__name__
        return [Problem(what=told, where=where, value=value, fix=fix, code="no-tokenizer")]
    tokens, types = _tokens(tokenizer, data, rows)
    merges = [one if isinstance(one, str) else " ".join(one) for one in data["model"]["merges"]]
    noted: list[Problem] = []
    if data["model"].get("byte_fallback"):
        rank = {"".join(pair.split(" ", 1)): -float(index + 1) for index, pair in reversed(list(enumerate(merges)))}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([rank.get(token, -float(len(merges) + 1)) for token in tokens])
        writer.add_add_space_prefix(_begins_with_space(tokenizer))
    else:
        name = pre_tokenizer(data)
        if name is None:
            noted.append(_unknown_split(data, where))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name or "default")
        writer.add_token_list(tokens)
        writer.add_token_merges(merges)
    writer.add_token_types(types)
    _special_tokens(writer, tokenizer)
    return noted


def tokenizer_data(tokenizer: Any) -> dict[str, Any] | None:
    """The contents of tokenizer.json, if it merges pairs of bytes or characters."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return None
    data: dict[str, Any] = json.loads(inner.to_str())
    model = data["model"]
    return data if model["type"] == "BPE" and (model.get("byte_fallback") or _splits(data)[-1:] != ()) else None


def pre_tokenizer(data: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer splits texts, or None.

    >>> pre_tokenizer({"pre_tokenizer": {"type": "ByteLevel", "use_regex": True}})
    'gpt-2'
    """
    return _SPLITS.get(_splits(data))


def _splits(data: dict[str, Any]) -> tuple[str, ...]:
    outer = data.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    found = []
    for one in outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]:
        kind = str(one["type"])
        if kind == "Split":
            kind = str(next(iter(one["pattern"].values())))
        elif kind == "ByteLevel" and one.get("use_regex", True):
            kind = "ByteLevel regex"
        elif kind == "Digits" and not one.get("individual_digits"):
            kind = "Digits together"
        found.append(kind)
    return tuple(found)


def _unknown_split(data: dict[str, Any], where: str) -> Problem:
    return Problem(
        what="llama.cpp may split texts differently than this tokenizer, so that it computes other tokens",
        where=where,
        value=", ".join(_splits(data)),
        fix="compare both tokenizers with check, or pass token ids to llama.cpp",
        code="unknown-pre-tokenizer",
    )


def _tokens(tokenizer: Any, data: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The text and the type of each row of the embedding."""
    known = {int(index): str(token) for token, index in tokenizer.get_vocab().items()}
    if known and max(known) >= rows:
        problem = Problem(
            what="the tokenizer has more tokens than the model's embedding has rows",
            where="tokenizer",
            value=f"{max(known) + 1} tokens, {rows} rows",
            fix="pass the tokenizer of this model, or resize the embedding",
            code="other-tokenizer",
        )
        raise PlanError([problem])
    added = {int(one["id"]): bool(one["special"]) for one in data["added_tokens"]}
    unknown = data["model"].get("unk_token")
    tokens, types = [], []
    for index in range(rows):
        token = known.get(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            types.append(_UNUSED)
        elif token == unknown:
            types.append(_UNKNOWN)
        elif index in added:
            types.append(_CONTROL if added[index] else _USER)
        else:
            byte = len(token) == 6 and token.startswith("<0x") and data["model"].get("byte_fallback")
            types.append(_BYTE if byte else _NORMAL)
    return tokens, types


def _special_tokens(writer: Any, tokenizer: Any) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id", None)
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(int(index))
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)


def _begins_with_space(tokenizer: Any) -> bool:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])
    return bool(tokens) and str(tokens[0]).startswith(_SPACE)
