"""Tiny random members of any model type of `transformers`: the numbers of its configuration, made small.

`architectures.py` has models that somebody chose settings for; here a rule per field does it (hidden size 32, two
layers, four heads, vocabulary 100, images 32x32, four experts), so that many more types are covered. Mixtures of
experts keep their default implementation.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQUENCE, IMAGE = 2, 10, 32

# model type -> class. Types that were tried and left out: torch.onnx can't export the float model of llama4_text, vilt,
# fsmt, prophetnet and xlnet; vit_mae drops random patches, and groupvit's hard assignments flip with any rounding.
AUTOMATIC: dict[str, str] = {
    "altclip": "AltCLIPModel",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "big_bird": "BigBirdForCausalLM",
    "bigbird_pegasus": "BigBirdPegasusForCausalLM",
    "biogpt": "BioGptForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "blenderbot-small": "BlenderbotSmallForCausalLM",
    "blip-2": "Blip2ForConditionalGeneration",
    "canine": "CanineModel",
    "clipseg": "CLIPSegModel",
    "cohere2": "Cohere2ForCausalLM",
    "cpmant": "CpmAntForCausalLM",
    "ctrl": "CTRLLMHeadModel",
    "data2vec-text": "Data2VecTextForCausalLM",
    "data2vec-vision": "Data2VecVisionForImageClassification",
    "deberta": "DebertaForMaskedLM",
    "diffllama": "DiffLlamaForCausalLM",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "dinov3_vit": "DINOv3ViTModel",
    "doge": "DogeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "dpt": "DPTModel",
    "ernie": "ErnieForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "esm": "EsmForMaskedLM",
    "eurobert": "EuroBertForMaskedLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "flaubert": "FlaubertWithLMHeadModel",
    "flava": "FlavaModel",
    "focalnet": "FocalNetForImageClassification",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glpn": "GLPNModel",
    "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "helium": "HeliumForCausalLM",
    "hgnet_v2": "HGNetV2Backbone",
    "hiera": "HieraForImageClassification",
    "ibert": "IBertForMaskedLM",
    "ijepa": "IJepaForImageClassification",
    "imagegpt": "ImageGPTForImageClassification",
    "jamba": "JambaForCausalLM",
    "jetmoe": "JetMoeForCausalLM",
    "layoutlm": "LayoutLMForMaskedLM",
    "lfm2": "Lfm2ForCausalLM",
    "longt5": "LongT5ForConditionalGeneration",
    "luke": "LukeForMaskedLM",
    "markuplm": "MarkupLMModel",
    "megatron-bert": "MegatronBertForCausalLM",
    "metaclip_2": "MetaClip2ForImageClassification",
    "minimax": "MiniMaxForCausalLM",
    "modernbert-decoder": "ModernBertDecoderForCausalLM",
    "mra": "MraForMaskedLM",
    "mvp": "MvpForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "nomic_bert": "NomicBertForMaskedLM",
    "olmo": "OlmoForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "owlvit": "OwlViTModel",
    "parakeet_encoder": "ParakeetEncoder",
    "pegasus_x": "PegasusXForConditionalGeneration",
    "perceiver": "PerceiverForMaskedLM",
    "persimmon": "PersimmonForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "plbart": "PLBartForCausalLM",
    "pvt_v2": "PvtV2ForImageClassification",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rembert": "RemBertForCausalLM",
    "roberta-prelayernorm": "RobertaPreLayerNormForCausalLM",
    "roc_bert": "RoCBertForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "sew-d": "SEWDForCTC",
    "smollm3": "SmolLM3ForCausalLM",
    "splinter": "SplinterModel",
    "starcoder2": "Starcoder2ForCausalLM",
    "swiftformer": "SwiftFormerForImageClassification",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
    "tapas": "TapasForMaskedLM",
    "umt5": "UMT5ForConditionalGeneration",
    "unispeech-sat": "UniSpeechSatForCTC",
    "visual_bert": "VisualBertModel",
    "vit_msn": "ViTMSNForImageClassification",
    "wav2vec2-conformer": "Wav2Vec2ConformerForCTC",
    "xglm": "XGLMForCausalLM",
    "xlm": "XLMWithLMHeadModel",
    "xlm-roberta-xl": "XLMRobertaXLForCausalLM",
    "yoso": "YosoForMaskedLM",
}

# field of a configuration -> value; smaller values stay
_RULES: list[tuple[str, int]] = [
    (
        r"hidden_size|d_model|n_embd|embed_dim|dim|embedding_size|hidden_dim|embedding_dim|encoder_hidden_size"
        r"|decoder_hidden_size|word_embed_proj_dim|attention_hidden_size|output_dim|entity_emb_size|text_hidden_size"
        r"|vision_hidden_size|pooler_hidden_size|d_latents|hidden_size_per_layer_input|lru_width|projection_dim"
        r"|image_text_hidden_size|projection_size|out_hidden_size",
        32,
    ),
    (
        r"intermediate_size|ffn_dim|d_ff|encoder_ffn_dim|decoder_ffn_dim|ffn_hidden_size|n_inner|dim_ff|mlp_dim"
        r"|dim_feedforward|d_inner|inner_dim|shared_intermediate_size",
        64,
    ),
    (r"moe_intermediate_size|shared_expert_intermediate_size", 32),
    (
        r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_encoder_layers|num_decoder_layers"
        r"|depth|num_blocks|num_hidden_groups",
        2,
    ),
    (
        r"num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads|attention_heads"
        r"|num_global_key_value_heads|mamba_n_heads",
        4,
    ),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads", 2),
    (r"head_dim|d_kv|d_head|attention_head_size|qk_nope_head_dim|v_head_dim|mamba_d_head|qk_head_dim", 8),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"q_lora_rank|kv_lora_rank", 16),
    (r"vocab_size|decoder_vocab_size|text_vocab_size|vocab_size_per_layer_input", 100),
    (
        r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_source_positions"
        r"|max_target_positions|max_encoder_position_embeddings|max_decoder_position_embeddings|n_ctx"
        r"|max_2d_position_embeddings",
        64,
    ),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|top_k_experts|moe_k|moe_top_k", 2),
    (r"n_shared_experts|moe_num_shared_experts|num_shared_experts|n_group|topk_group|first_k_dense_replace", 1),
    (r"image_size", IMAGE),
    (r"patch_size|state_size|ssm_state_size|mamba_d_state|num_queries|num_query_tokens", 8),
    (r"num_mel_bins|num_conv_pos_embeddings", 16),
    (r"time_step_rank|mamba_dt_rank|sliding_window|attention_window|local_attention|window_size|chunk_size", 4),
    (r"num_labels", 10),
    (r"conv_kernel_size|num_feat_extract_layers", 3),
    (r"type_vocab_size|num_conv_pos_embedding_groups|linear_num_key_heads", 2),
    (r"num_nextn_predict_layers|mtp_num_hidden_layers", 0),
    (r"linear_key_head_dim|linear_value_head_dim", 8),
    (r"linear_num_value_heads", 4),
]
_OPTIONAL = re.compile(  # None means something else there
    r"head_dim|kv_lora_rank|q_lora_rank|embedding_size|sliding_window|window_size|n_inner|num_local_experts"
    r"|num_experts|depth|projection_dim"
)
_LISTS: dict[str, list[int]] = {
    "hidden_sizes": [8, 16, 24, 32],
    "num_attention_heads": [1, 2, 2, 4],
    "num_heads": [1, 2, 2, 4],
    "depths": [1, 1, 1, 1],
    "conv_dim": [32, 32, 32],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 2],
}
_FIXED: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "image_token_id": 95,
    "image_token_index": 95,
    "mask_token_id": 4,
}


def _small(config: Any) -> dict[str, Any]:
    """Settings that make a model of this configuration tiny."""
    found: dict[str, Any] = {}
    fields = {name: getattr(config, name, value) for name, value in config.to_dict().items()}
    for name, value in fields.items():
        if hasattr(value, "to_dict"):
            found[name] = {**_small(value), "model_type": value.model_type}
        elif name in _FIXED:
            found[name] = _FIXED[name]
        elif isinstance(value, (list, tuple)) and name in _LISTS:
            found[name] = _LISTS[name][-len(value) :]
        elif not isinstance(value, (bool, list, tuple, dict, str)):
            size = next((size for rule, size in _RULES if re.fullmatch(rule, name)), None)
            if size is not None and (value is not None or not _OPTIONAL.fullmatch(name)):
                found[name] = value if isinstance(value, int) and 0 <= value < size != 100 else size
    kinds = list(dict.fromkeys(fields.get("layer_types") or ()))  # one layer of each kind
    if kinds:
        count = max(2, len(kinds))
        found["layer_types"] = (kinds * 2)[:count]
        found.update({name: count for name in ("num_hidden_layers", "n_layer", "num_layers") if name in found})
    mixtures = list(dict.fromkeys(fields.get("mlp_layer_types") or ()))
    if mixtures:
        found["mlp_layer_types"] = (mixtures * found["num_hidden_layers"])[: found["num_hidden_layers"]]
    return found


def _inputs(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """What the model's forward asks for, by name."""
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", IMAGE)
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[1, -2:] = 0
    corner = torch.randint(0, 30, (BATCH, SEQUENCE, 2))
    known = {
        "input_ids": torch.randint(5, 89, (BATCH, SEQUENCE)),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(5, 89, (BATCH, 6)),
        "pixel_values": torch.randn(BATCH, 3, *([size] * 2 if isinstance(size, int) else size)),
        "input_values": torch.randn(BATCH, 400),
        "input_features": torch.randn(BATCH, 40, getattr(config, "num_mel_bins", 16)),
        "bbox": torch.cat([corner, corner + 20], -1),
    }
    names = inspect.signature(model.forward).parameters
    wanted = {name: value for name, value in known.items() if name in names}
    return wanted if "input_ids" in names else {k: v for k, v in wanted.items() if k != "attention_mask"}


def build_automatically(kind: str, model: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny random model of a class for a model type, with example inputs."""
    import transformers

    torch.manual_seed(0)
    config_class = transformers.CONFIG_MAPPING[kind]
    config = config_class(**_small(config_class()))
    instance = getattr(transformers, model)(config).eval()
    examples = _inputs(instance, config)
    with torch.no_grad():
        for parameter in instance.parameters():
            if parameter.numel() > 1 and parameter.is_floating_point() and parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return instance, examples
