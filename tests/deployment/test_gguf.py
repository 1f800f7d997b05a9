"""GGUF files: llama.cpp loads, tokenizes and computes what the simulation computes, for each architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.language_models import make_llama, make_tokenizer, write_folder, write_text
from tests.support.problems import raises_problem
from torch import Tensor

import bitwright as bw
from bitwright.core.errors import PlanError
from bitwright.deployment.artefacts.gguf import stored_digests
from bitwright.deployment.artefacts.gguf_metadata import ARCHITECTURES

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

_ROPE = {"rope_theta": 500.0, "factor": 4.0}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": {"rope_type": "llama3", **_ROPE, **_LLAMA3}}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", **_ROPE}}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "granite": ("Granite", _SCALES),
    "olmo2": ("Olmo2", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "starcoder2": ("Starcoder2", {}),
}


def model_of(name: str, **options: Any) -> Any:
    kind, own = MODELS[name]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(sizes | own | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases; those of new models are 1 and 0
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def text() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{"input_ids": torch.randint(0, 96, (2, 24), generator=generator)}]


def quantized(model: Any, **options: Any) -> bw.Quantized:
    options = {"precision": "w4a16", "group": 32, **options}
    return bw.quantize(model, text(), measure=False, **options)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_the_simulation_computes(name: str, tmp_path: Path) -> None:
    made = quantized(model_of(name), keep_float=["lm_head"] if name == "gemma2" else [])
    made.export(tmp_path / "m.gguf", artefact="gguf")
    check = made.check(tmp_path / "m.gguf", text())
    assert check.passed
    assert check.runtime == "llamacpp"
    assert [output.name for output in check.outputs] == ["logits", "prompt", "decoding"]
    assert check.outputs[0].sqnr_db > 28  # llama.cpp rounds activations to 8 bits
    assert check.distance is not None
    assert check.outputs[0].sqnr_db > check.distance.outputs[0].sqnr_db + 10


def test_all_architectures_are_tested() -> None:
    assert {transformers.AutoConfig.for_model(kind).model_type for kind in ARCHITECTURES} == {
        getattr(transformers, f"{kind}Config").model_type for kind, _ in MODELS.values()
    }


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"weights": "int4/group64/sym"}, {"Q4_0", "Q8_0"}),
        ({"precision": "w8a16", "group": None}, {"Q8_0"}),
        ({"weights": "uint4/group32/asym", "head_bits": 4}, {"Q4_1"}),
        ({"keep_float": "model.layers.0.*"}, {"Q4_0", "Q8_0", "F16"}),
    ],
)
def test_formats_are_stored_in_blocks(options: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    made = quantized(model_of("llama"), **options)
    made.export(tmp_path / "m.gguf", artefact="gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    matrices = [one for one in reader.tensors if len(one.shape) == 2 and one.name != "token_embd.weight"]
    assert {one.tensor_type.name for one in matrices} == kinds
    assert made.check(tmp_path / "m.gguf", text()).passed


def test_a_wrong_file_diverges(tmp_path: Path) -> None:
    other, model = quantized(model_of("llama")), model_of("llama")
    other.export(tmp_path / "m.gguf", artefact="gguf")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    made = quantized(model)
    check = made.check(tmp_path / "m.gguf", text())
    assert not check.passed
    assert check.outputs[0].rounding_share is not None
    assert check.outputs[0].rounding_share > 5


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    made = quantized(model_of("llama"))
    path = tmp_path / "m.gguf"
    made.export(path, artefact="gguf")
    tensors = {one.name: one for one in gguf.GGUFReader(path).tensors}
    where = int(tensors["blk.0.ffn_up.weight"].data_offset)
    data = bytearray(path.read_bytes())
    data[where + 5] ^= 1
    path.write_bytes(data)
    check = made.check(path, text())
    assert not check.passed
    assert [damage.site for damage in check.damages] == ["blk.0.ffn_up.weight"]
    path.write_bytes(data[: where + 1000])
    with raises_problem("artefact-not-loadable"):
        made.check(path, text())


def test_files_of_other_tools_have_no_digests(tmp_path: Path) -> None:
    from tests.support.language_models import write_gguf

    made = quantized(model_of("llama"))
    made.export(tmp_path / "m.gguf", artefact="gguf")
    assert "output.weight" in stored_digests(tmp_path / "m.gguf")
    assert stored_digests(write_gguf(tmp_path / "other.gguf")) == {}


def test_what_llama_cpp_cannot_describe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=96
        )
    ).eval()
    model.config.use_cache = False
    with raises_problem("unsupported-model", where="model_type"):
        quantized(model).export(path, artefact="gguf")
    with raises_problem("unsupported-model", where="sliding_window"):
        quantized(model_of("mistral", sliding_window=8)).export(path, artefact="gguf")
    with raises_problem("unsupported-model", where="rope_parameters"):
        rope = {"rope_type": "dynamic", **_ROPE}
        quantized(model_of("llama", rope_parameters=rope)).export(path, artefact="gguf")
    with raises_problem("unsupported-format", where="model.layers.0.self_attn.q_proj:weight", mentions="48"):
        quantized(model_of("llama", hidden_size=48), precision="w8a16", group=None).export(path, artefact="gguf")
    with raises_problem("unsupported-format"):
        quantized(model_of("llama"), precision="w8a8-dynamic", group=None).export(path, artefact="gguf")
    with raises_problem("unknown-tensor", where="lm_head.weight"):
        quantized(model_of("gemma2")).export(path, artefact="gguf")
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-8)
    with raises_problem("scale-out-of-range", where="model.layers.0.mlp.up_proj:weight"):
        quantized(model).export(path, artefact="gguf")
    assert not path.exists()


def test_padding_and_unknown_tokens_are_refused(tmp_path: Path) -> None:
    made = quantized(model_of("llama"))
    made.export(tmp_path / "m.gguf", artefact="gguf")
    runtime = bw.open_runtime("llamacpp", tmp_path / "m.gguf")
    ids, mask = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 1]])
    with raises_problem("padding", where="attention_mask"):
        runtime(input_ids=ids, attention_mask=mask)
    with raises_problem("runtime-failed"):
        runtime(input_ids=torch.tensor([[5, 96]]))
    assert runtime(input_ids=ids, attention_mask=torch.ones_like(ids)).shape == (1, 3, 96)


def test_samples_may_be_longer_than_a_batch(tmp_path: Path) -> None:
    made = quantized(model_of("llama", max_position_embeddings=4096))
    made.export(tmp_path / "m.gguf", artefact="gguf")
    runtime = bw.open_runtime("llamacpp", tmp_path / "m.gguf", threads=1)
    ids = torch.randint(0, 96, (1, 2100), generator=torch.Generator().manual_seed(0))
    found = runtime(ids)
    with torch.no_grad():
        expected = made.model(ids).logits
    tail = slice(2000, 2100)
    error = (found[:, tail] - expected[:, tail]).norm() / expected[:, tail].norm()
    assert float(error) < 0.1


_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["the of and, it's 2026: 12345.67!", "  spaces\n\n\tand  tabs ", "Zürich 東京 🙂 naïve", "x**2 = {y[0]: 'z'}"]


def byte_level(splits: list[Any], **options: Any) -> Any:
    """A byte-level BPE tokenizer that splits texts as given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(**options))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence(splits), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["the of and it's 2026 12345 in that was"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def sentence_piece() -> Any:
    """A tokenizer as SentencePiece makes it: words begin with ▁, and unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    first = Tokenizer(models.BPE())
    first.normalizer = words
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    first.train_from_iterator(["the of and it was in that", "of the and that 2026"], trainer)
    model = json.loads(first.to_str())["model"]
    merges = [tuple(one) if isinstance(one, list) else tuple(one.split(" ")) for one in model["merges"]]
    inner = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = words
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tokenizers() -> dict[str, Any]:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Split

    plain, pieces = ByteLevel(add_prefix_space=False), ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt-2": byte_level([plain]),
        "smollm": byte_level([Digits(individual_digits=True), plain]),
        "llama-bpe": byte_level([Split(Regex(_SPLIT % "{1,3}"), "isolated"), pieces], ignore_merges=True),
        "qwen2": byte_level([Split(Regex(_SPLIT % ""), "isolated"), pieces]),
        "default": sentence_piece(),
    }


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_llama_cpp_tokenizes_as_the_model(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizers()[name]
    rows = len(tokenizer) + 5  # an embedding may have more rows than there are tokens
    made = quantized(model_of("llama", vocab_size=rows, num_hidden_layers=1))
    artefact = made.export(tmp_path / "m.gguf", artefact="gguf", tokenizer=tokenizer)
    assert artefact.warnings == ()
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == name
    runtime: Any = bw.open_runtime("llamacpp", tmp_path / "m.gguf")
    expected = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS}
    assert {text: runtime.tokenize(text) for text in TEXTS} == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 30


def test_a_tokenizer_that_begins_texts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, begin=True)
    made = quantized(model_of("llama", vocab_size=len(tokenizer), num_hidden_layers=1))
    made.export(tmp_path / "m.gguf", artefact="gguf", tokenizer=tokenizer)
    runtime: Any = bw.open_runtime("llamacpp", tmp_path / "m.gguf")
    assert runtime.tokenize("the of", special=True) == tokenizer("the of")["input_ids"]
    assert runtime.tokenize("the of", special=True)[0] == tokenizer.bos_token_id


def test_other_tokenizers_are_reported(tmp_path: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Punctuation

    path = tmp_path / "m.gguf"
    made = quantized(model_of("llama", vocab_size=400, num_hidden_layers=1))
    assert [one.code for one in made.export(path, artefact="gguf").warnings] == ["no-tokenizer"]
    other = byte_level([Punctuation("contiguous"), ByteLevel(use_regex=False)])
    artefact = made.export(path, artefact="gguf", tokenizer=other)
    assert [one.code for one in artefact.warnings] == ["unknown-pre-tokenizer"]
    small = quantized(model_of("llama", vocab_size=96, num_hidden_layers=1))
    with pytest.raises(PlanError) as caught:
        small.export(path, artefact="gguf", tokenizer=other)
    assert [problem.code for problem in caught.value.problems] == ["other-tokenizer"]


def test_check_compares_tokenizers(tmp_path: Path) -> None:
    source, words = write_folder(tmp_path / "tiny", num_hidden_layers=1), write_text(tmp_path / "text.txt")
    workload = bw.load_workload(f"hf:{source},text={words},sequence=24,samples=4")
    made = bw.quantize(workload.model, workload.calibration, "w4a16", group=32, measure=False)
    made.export(tmp_path / "m.gguf", artefact="gguf")
    assert "tokenizer-differs" not in [one.code for one in made.check(tmp_path / "m.gguf").warnings]
    made.export(tmp_path / "m.gguf", artefact="gguf", tokenizer=byte_level([tokenizers_digits()]))
    assert "tokenizer-differs" in [one.code for one in made.check(tmp_path / "m.gguf").warnings]


def tokenizers_digits() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False)


def test_perplexity_is_that_of_the_simulation(tmp_path: Path) -> None:
    source, words = write_folder(tmp_path / "tiny", model=make_llama()), write_text(tmp_path / "text.txt")
    workload = bw.load_workload(f"hf:{source},text={words},sequence=32,samples=8")
    for precision in ("w4a16", "w8a16"):
        made = bw.quantize(workload.model, workload.calibration, precision, group=32, measure=False)
        made.export(tmp_path / "m.gguf", artefact="gguf")
        simulated = bw.evaluate(workload, made.model)["perplexity"]
        real = bw.open_runtime("llamacpp", tmp_path / "m.gguf").accuracy(workload)["perplexity"]
        np.testing.assert_allclose(real, simulated, rtol=0.01)
        bw.strip(workload.model)


def test_a_file_is_a_workload_again(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "tiny")
    workload = bw.load_workload(f"hf:{source}")
    made = bw.quantize(workload.model, text(), "w4a16", group=32, measure=False)
    made.export(tmp_path / "m.gguf", artefact="gguf")
    again = bw.load_workload(f"gguf:{tmp_path / 'm.gguf'}")
    with torch.no_grad():
        found, expected = again.model(**text()[0]).logits, made.model(**text()[0]).logits
    assert float((found - expected).norm() / expected.norm()) < 5e-3
