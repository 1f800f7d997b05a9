"""Tiny language models in files: a Hugging Face folder or a GGUF file, with a tokenizer that is trained on a text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

_TEXT = "the of and to in a is that for it as was with be by on not he his but at are this have from"
WORDS = _TEXT.split()
VOCABULARY = 320


def write_text(file: Path, words: int = 6000) -> Path:
    chosen = random.Random(0).choices(WORDS, weights=range(len(WORDS), 0, -1), k=words)
    file.write_text("\n".join(" ".join(chosen[at : at + 20]) for at in range(0, words, 20)) + "\n", encoding="utf-8")
    return file


def make_tokenizer(folder: Path, *, begin: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    text = write_text(folder / "tokenizer-text.txt")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train([str(text)], trainer)
    text.unlink()
    if begin:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def llama_config(**settings: Any) -> Any:
    from transformers import LlamaConfig

    usual = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return LlamaConfig(**{**usual, **tokens, "num_key_value_heads": 2, "max_position_embeddings": 256, **settings})


def make_llama(**settings: Any) -> Any:
    """Random weights that are large enough for the next token to depend on the previous ones."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(initializer_range=0.12, **settings)).eval()
    model.generation_config.eos_token_id = None
    return model


def write_folder(folder: Path, *, begin: bool = False, model: Any = None, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, begin=begin).save_pretrained(folder)
    (make_llama(**settings) if model is None else model).save_pretrained(folder)
    return folder


def write_gguf(file: Path) -> Path:
    """A Llama in float32, as llama.cpp names its tensors and metadata."""
    import gguf

    model, tokenizer = make_llama(), make_tokenizer(file.parent)
    config, writer = model.config, gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    inner = tokenizer.backend_tokenizer
    vocabulary = inner.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 2))
    import json

    merges = json.loads(inner.to_str())["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy().astype(np.float32)
        for part, count in heads.items():
            if f".{part}." in name:  # llama.cpp rotates neighbouring pairs
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
