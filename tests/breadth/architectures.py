"""Small, randomly initialised Hugging Face models: one entry per architecture.

Every model is built from its configuration class alone (hidden size 32, two layers,
vocabulary 100, images 32x32), so nothing is downloaded and a forward pass takes
milliseconds.  ``transformers`` is imported only when a model is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

Family = Literal["encoder", "decoder", "encoder-decoder", "vision", "audio", "multimodal"]
Inputs = dict[str, Tensor]

BATCH, SEQUENCE, VOCABULARY, IMAGE = 2, 10, 100, 32
FIRST_WORD, LAST_WORD = 3, 89  # ids outside this range are special tokens


@dataclass(frozen=True)
class Architecture:
    """A model family, and how to build a tiny member with example inputs."""

    name: str
    family: Family
    build: Callable[[], tuple[nn.Module, Inputs]]

    def __str__(self) -> str:
        return self.name


def fresh_inputs(inputs: Mapping[str, Tensor], seed: int) -> Inputs:
    """New random inputs of the same shapes: masks and special tokens stay as they are."""
    generator = torch.Generator().manual_seed(seed)

    def fresh(name: str, value: Tensor) -> Tensor:
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator)
        if not name.endswith("input_ids"):
            return value
        words = torch.randint(FIRST_WORD, LAST_WORD + 1, value.shape, generator=generator)
        return torch.where((value >= FIRST_WORD) & (value <= LAST_WORD), words, value)

    return {name: fresh(name, value) for name, value in inputs.items()}


# --- example inputs -----------------------------------------------------------------


def _words(length: int = SEQUENCE) -> Tensor:
    return torch.randint(FIRST_WORD, LAST_WORD + 1, (BATCH, length))


def _mask(length: int = SEQUENCE) -> Tensor:
    """The second sequence is padded by two tokens on the right."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[1, -2:] = 0
    return mask


def _text() -> Inputs:
    return {"input_ids": _words(), "attention_mask": _mask()}


def _text_without_mask() -> Inputs:
    return {"input_ids": _words()}


def _text_pair() -> Inputs:
    return {**_text(), "decoder_input_ids": _words(6)}


def _image(size: int = IMAGE) -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _waveform(samples: int = 400) -> Inputs:
    return {"input_values": torch.randn(BATCH, samples)}


def _caption() -> Inputs:
    """A text that ends with the end token (2), as CLIP-like models pool there."""
    words = _words()
    words[:, -1] = 2
    return {"input_ids": words, "attention_mask": torch.ones_like(words), **_image()}


# --- models -------------------------------------------------------------------------


def _build(
    model: str,
    inputs: Callable[[], Inputs],
    config: Mapping[str, Any],
) -> tuple[nn.Module, Inputs]:
    import transformers

    torch.manual_seed(0)
    name = _stem(model) + "Config"
    settings = {"initializer_range": 0.15, "init_std": 0.15, **config}
    instance = getattr(transformers, model)(getattr(transformers, name)(**settings)).eval()
    examples = inputs()
    with torch.no_grad():
        _stir(instance, examples)
    return instance, examples


def _stem(model: str) -> str:
    """``BertForMaskedLM`` and ``BertModel`` -> ``Bert``."""
    return re.sub(r"(For[A-Z].*|(LMHead|MT)?Model)$", "", model)


def _stir(model: nn.Module, inputs: Inputs) -> None:
    """Make constant parameters random and fit the batch statistics, so that none is neutral.

    Without the fit the signal dies out in deep convolutional models: the output would
    depend on the biases only, and comparing outputs would show nothing.
    """
    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.min() == parameter.max():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    model(**{name: torch.randn(16, *value.shape[1:]) for name, value in inputs.items()})
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


_SPECIAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.15,
}
_TEXT: dict[str, Any] = {**_SPECIAL, **_SIZE, "max_position_embeddings": 64}
_DECODER: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "use_cache": False}
_GPT: dict[str, Any] = {
    **_SPECIAL,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "use_cache": False,
}
_SEQ2SEQ: dict[str, Any] = {
    **_SPECIAL,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "use_cache": False,
}
_T5: dict[str, Any] = {
    **_SPECIAL,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
_PATCHES: dict[str, Any] = {**_SIZE, "image_size": IMAGE, "patch_size": 8}
_SPEECH: dict[str, Any] = {
    **_SPECIAL,
    **_SIZE,
    "conv_dim": [32, 32, 32],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
}


def _encoder(
    name: str,
    model: str,
    base: Mapping[str, Any] = _TEXT,
    inputs: Callable[[], Inputs] = _text,
    **config: Any,
) -> Architecture:
    return Architecture(name, "encoder", partial(_build, model, inputs, {**base, **config}))


def _decoder(name: str, model: str, base: Mapping[str, Any] = _DECODER, **config: Any) -> Architecture:
    return Architecture(name, "decoder", partial(_build, model, _text, {**base, **config}))


def _seq2seq(name: str, model: str, base: Mapping[str, Any] = _SEQ2SEQ, **config: Any) -> Architecture:
    build = partial(_build, model, _text_pair, {**base, **config})
    return Architecture(name, "encoder-decoder", build)


def _vision(name: str, model: str, size: int = IMAGE, **config: Any) -> Architecture:
    settings = {"num_labels": 10, "image_size": size, **config}
    return Architecture(name, "vision", partial(_build, model, partial(_image, size), settings))


def _speech(name: str, model: str, **config: Any) -> Architecture:
    return Architecture(name, "audio", partial(_build, model, _waveform, {**_SPEECH, **config}))


def _features(name: str, model: str, inputs: Callable[[], Inputs], **config: Any) -> Architecture:
    return Architecture(name, "audio", partial(_build, model, inputs, config))


def _multimodal(name: str, model: str, inputs: Callable[[], Inputs] = _caption, **config: Any) -> Architecture:
    return Architecture(name, "multimodal", partial(_build, model, inputs, config))


def _whisper_inputs() -> Inputs:
    return {"input_features": torch.randn(BATCH, 16, 40), "decoder_input_ids": _words(6)}


def _speech2text_inputs() -> Inputs:
    return {"input_features": torch.randn(BATCH, 40, 16), "decoder_input_ids": _words(6)}


def _spectrogram() -> Inputs:
    return {"input_values": torch.randn(BATCH, 24, 16)}


def _caption_without_mask() -> Inputs:
    inputs = _caption()
    del inputs["attention_mask"]
    return inputs


_TOWERS: dict[str, Any] = {"text_config": _TEXT, "vision_config": _PATCHES, "projection_dim": 32}

ARCHITECTURES: list[Architecture] = [
    # encoders
    _encoder("bert", "BertModel"),
    _encoder("roberta", "RobertaForMaskedLM"),
    _encoder("distilbert", "DistilBertForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    _encoder("albert", "AlbertModel", embedding_size=16),
    _encoder("electra", "ElectraForPreTraining", embedding_size=16),
    _encoder("mpnet", "MPNetModel"),
    _encoder(
        "deberta-v2",
        "DebertaV2ForSequenceClassification",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pooler_hidden_size=32,
    ),
    _encoder("convbert", "ConvBertModel", embedding_size=16, conv_kernel_size=3),
    _encoder(
        "funnel",
        "FunnelModel",
        _SPECIAL,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    _encoder("squeezebert", "SqueezeBertModel", embedding_size=32),
    _encoder("roformer", "RoFormerModel", embedding_size=32),
    _encoder("modernbert", "ModernBertForMaskedLM", local_attention=4, cls_token_id=1, sep_token_id=2),
    _encoder("xlm-roberta", "XLMRobertaForTokenClassification"),
    _encoder("mobilebert", "MobileBertModel", embedding_size=16, intra_bottleneck_size=16),
    _encoder("camembert", "CamembertForQuestionAnswering"),
    _encoder(
        "nystromformer",
        "NystromformerModel",
        num_landmarks=SEQUENCE,  # with fewer landmarks its padding mask does not broadcast
        segment_means_seq_len=SEQUENCE,
        conv_kernel_size=3,
    ),
    _encoder("longformer", "LongformerModel", attention_window=4),
    _encoder("fnet", "FNetModel", inputs=_text_without_mask),
    # decoders
    _decoder("gpt2", "GPT2LMHeadModel", _GPT),
    _decoder("gptj", "GPTJForCausalLM", _GPT, rotary_dim=4),
    _decoder("codegen", "CodeGenForCausalLM", _GPT, rotary_dim=4),
    _decoder("gpt-bigcode", "GPTBigCodeForCausalLM", _GPT),
    _decoder(
        "gpt-neo",
        "GPTNeoForCausalLM",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    _decoder("gpt-neox", "GPTNeoXForCausalLM"),
    _decoder("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    _decoder("llama", "LlamaForCausalLM"),
    _decoder("mistral", "MistralForCausalLM", sliding_window=4),
    _decoder("qwen2", "Qwen2ForCausalLM"),
    _decoder("qwen3", "Qwen3ForCausalLM", head_dim=8),
    _decoder("gemma", "GemmaForCausalLM", head_dim=8),
    _decoder("gemma2", "Gemma2ForCausalLM", head_dim=8, sliding_window=4),
    _decoder("phi", "PhiForCausalLM"),
    _decoder("phi3", "Phi3ForCausalLM"),
    _decoder("falcon", "FalconForCausalLM", ffn_hidden_size=64),
    _decoder("bloom", "BloomForCausalLM", n_layer=2, n_head=4),
    _decoder("mpt", "MptForCausalLM", d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    _decoder("stablelm", "StableLmForCausalLM"),
    _decoder("mixtral", "MixtralForCausalLM", num_local_experts=4, experts_implementation="batched_mm"),
    _decoder("olmo2", "Olmo2ForCausalLM"),
    _decoder("cohere", "CohereForCausalLM"),
    _decoder("mamba", "MambaForCausalLM", state_size=8, time_step_rank=4),
    # encoder-decoders
    _seq2seq("t5", "T5ForConditionalGeneration", _T5),
    _seq2seq("mt5", "MT5ForConditionalGeneration", _T5),
    _seq2seq("bart", "BartForConditionalGeneration"),
    _seq2seq("mbart", "MBartForConditionalGeneration"),
    _seq2seq("pegasus", "PegasusForConditionalGeneration"),
    _seq2seq("marian", "MarianMTModel", decoder_vocab_size=VOCABULARY),
    _seq2seq("blenderbot", "BlenderbotForConditionalGeneration"),
    _seq2seq("m2m100", "M2M100ForConditionalGeneration"),
    _seq2seq(
        "led",
        "LEDForConditionalGeneration",
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    # vision
    _vision("vit", "ViTForImageClassification", **_PATCHES),
    _vision("deit", "DeiTForImageClassification", **_PATCHES),
    _vision("beit", "BeitForImageClassification", use_relative_position_bias=True, **_PATCHES),
    _vision("dinov2", "Dinov2ForImageClassification", **_PATCHES),
    _vision(
        "swin",
        "SwinForImageClassification",
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _vision(
        "swinv2",
        "Swinv2ForImageClassification",
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _vision(
        "convnext",
        "ConvNextForImageClassification",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
    ),
    _vision(
        "convnextv2",
        "ConvNextV2ForImageClassification",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
    ),
    _vision(
        "resnet",
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[2, 2],
    ),
    _vision(
        "regnet",
        "RegNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        groups_width=8,
    ),
    _vision("mobilenet-v1", "MobileNetV1ForImageClassification", depth_multiplier=0.25),
    _vision("mobilenet-v2", "MobileNetV2ForImageClassification", depth_multiplier=0.25),
    _vision(
        "efficientnet",
        "EfficientNetForImageClassification",
        width_coefficient=0.25,
        depth_coefficient=1.0,
        kernel_sizes=[3, 5],
        in_channels=[32, 16],
        out_channels=[16, 32],
        strides=[1, 2],
        num_block_repeats=[1, 2],
        expand_ratios=[1, 4],
        hidden_dim=320,
    ),
    _vision(
        "segformer",
        "SegformerForSemanticSegmentation",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    ),
    _vision(
        "poolformer",
        "PoolFormerForImageClassification",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
    ),
    _vision(
        "mobilevit",
        "MobileViTForImageClassification",
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
    ),
    _vision(
        "pvt",
        "PvtForImageClassification",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2],
    ),
    _vision(
        "levit",
        "LevitForImageClassification",
        size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    _vision(
        "cvt",
        "CvtForImageClassification",
        embed_dim=[8, 16, 32],
        num_heads=[1, 2, 4],
        depth=[1, 2, 3],
    ),
    # audio
    _speech("wav2vec2", "Wav2Vec2ForCTC"),
    _speech("hubert", "HubertModel"),
    _speech("wavlm", "WavLMModel", num_buckets=8, max_bucket_distance=16),
    _speech("sew", "SEWForCTC"),
    _speech("unispeech", "UniSpeechModel"),
    _speech("data2vec-audio", "Data2VecAudioModel"),
    _features(
        "whisper",
        "WhisperForConditionalGeneration",
        _whisper_inputs,
        **_SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=20,
        max_target_positions=64,
    ),
    _features(
        "speech-to-text",
        "Speech2TextForConditionalGeneration",
        _speech2text_inputs,
        **_SEQ2SEQ,
        input_feat_per_channel=16,
        conv_channels=32,
        max_source_positions=64,
        max_target_positions=64,
    ),
    _features(
        "ast",
        "ASTForAudioClassification",
        _spectrogram,
        **_SIZE,
        patch_size=8,
        frequency_stride=4,
        time_stride=4,
        max_length=24,
        num_mel_bins=16,
    ),
    # multimodal
    _multimodal("clip", "CLIPModel", **_TOWERS),
    _multimodal("chinese-clip", "ChineseCLIPModel", **_TOWERS),
    _multimodal(
        "siglip",
        "SiglipModel",
        _caption_without_mask,
        text_config={**_TEXT, "projection_size": 32},
        vision_config=_PATCHES,
    ),
    _multimodal(
        "blip",
        "BlipForImageTextRetrieval",
        text_config={**_TEXT, "encoder_hidden_size": 32, "sep_token_id": 2},
        vision_config=_PATCHES,
        projection_dim=32,
        image_text_hidden_size=16,
    ),
    _multimodal("git", "GitForCausalLM", vision_config=_PATCHES, **_DECODER),
]

# torch.export stops at ``is_index_global_attn.flatten().any().item()``: control flow that
# depends on the data.  The forward and backward passes are sound.
NOT_EXPORTABLE = frozenset({"longformer", "led"})
