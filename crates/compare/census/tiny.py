"""Tiny configurations of every model that transformers knows, made from its own configuration classes.

Sizes are odd on purpose: 6 heads share 2 key heads where a family groups them, and a head that has a width of its own is
wider than `hidden_size / heads`.
"""

import importlib
import inspect
import re
import typing

import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from parts import module_of
from special import CONFIGS, OPTIONS
from versions import PreTrainedConfig, field_of, fields_of, spelled

# The first pattern that matches the whole name of a numeric field determines its size.
SIZES = [
    (r"(text_|decoder_|encoder_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|dim|model_dim|embedding_size|n_embed)", 48),
    (r"(decoder_|encoder_|vision_|cross_|mm_)?(output_)?(hidden|embed|projection|proj)_(size|dim)", 48),
    (r"(word_embed_proj_dim|entity_emb_size|width|hidden_dim_out|out_hidden_size|vision_embed_dim)", 48),
    (r"(\w+_)?(num_attention_heads|num_heads|n_heads?|attention_heads|num_attn_heads)", 6),
    (r"(\w+_)?(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)", 2),
    (r"(\w+_)?(head_dim|attention_head_dim|attention_head_size)", 16),
    (r"d_kv", 10),
    (r"(\w+_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_blocks|num_layer)", 2),
    (r"num_(encoder|decoder|hidden)_(blocks|layers)", 2),
    (r"(\w+_)?(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|n_inner|d_inner|feed_forward_dim)", 40),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_experts_per_layer)", 4),
    (r"(num_experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k_experts|moe_top_k)", 2),
    (r"(n_shared_experts|num_shared_experts|n_group|topk_group|moe_num_shared_experts)", 1),
    (r"(moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size)", 24),
    (r"(\w+_)?(vocab_size|vocab_size_per_layer_input|vocab_size_or_config_json_file)", 99),
    (r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_length)", 64),
    (r"(max_source_positions|max_target_positions)", 32),
    (r"(sliding_window|attention_window_size|local_window_size|sliding_window_size)", 5),
    (r"attention_chunk_size", 8),
    (r"type_vocab_size", 2),
    (r"(num_mel_bins|feature_size|num_mel_channels)", 16),
    (r"(image_size|img_size|input_size|vision_feature_size)", 32),
    (r"(patch_size|encoder_patch_size)", 8),
    (r"first_k_dense_replace", 1),
    (r"q_lora_rank", 14),
    (r"kv_lora_rank", 10),
    (r"qk_nope_head_dim", 6),
    (r"(qk_rope_head_dim)", 4),
    (r"v_head_dim", 5),
    (r"(\w+_)?(pad_token_id|padding_idx|pad_index)", 0),
    (r"(\w+_)?(bos_token_id|decoder_start_token_id|unk_token_id|sep_token_id|cls_token_id|mask_token_id)", 1),
    (r"(\w+_)?eos_token_id", 2),
    (r"(image|video|audio|vision_start|vision_end|boi|eoi|boa|eoa|vision)_token_(id|index)", 3),
]
# Kinds of layers that are no softmax attention over their own keys.
RECURRENT = {"linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"}


def size_of(name):
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size
    return None


def tiny(config_class, **fields):
    """A tiny configuration of a class."""
    return config_class(**overrides(config_class) | fields)


def overrides(config_class):
    own = CONFIGS.get(config_class.model_type, {})
    usual = config_class()
    sizes = {}
    sub_configs = set(usual.sub_configs)
    for name in fields_of(config_class):
        value = field_of(usual, name)
        if name in sub_configs:
            if isinstance(value, PreTrainedConfig):
                sizes[name] = overrides(type(value)) | {"model_type": value.model_type}
            continue
        size = size_of(name)
        if size is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, type(None))):
            continue
        if value is None and not re.search(r"token_id|pad|num_key_value_heads|^head_dim$", name):
            continue
        if re.search("key_value|kv_heads", name) and value is not None and value == 1:
            continue
        sizes[name] = size
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 6}
        sizes.pop("head_dim", None)
    rope = getattr(usual, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        half = sizes.get("head_dim", 8) // 2
        sizes["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    kinds = getattr(usual, "layer_types", None)
    if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
        chosen = sorted(set(kinds), key=kinds.index)
        chosen = (chosen * 2)[: max(2, len(chosen))]
        layers = next((name for name in sizes if re.fullmatch("num_hidden_layers|n_layers?|num_layers", name)), None)
        if "layer_types" in fields_of(config_class):
            sizes["layer_types"] = chosen
            if layers:
                sizes[layers] = len(chosen)
    if "use_mamba_kernels" in fields_of(config_class):
        sizes["use_mamba_kernels"] = False
    return spelled(usual, sizes | own)


# Flags and numbers that change attention, or might, and what a second model has instead of the default.
FLAGS = (
    r"attention_bias|qkv_bias|qv_bias|use_bias|bias|no_bias|enable_bias|use_qkv_bias|attention_out_bias|is_decoder|causal"
    r"|use_qk_norm|qk_layernorm|scale_attn_weights|scale_attn_by_inverse_layer_idx|reorder_and_upcast_attn|multi_query"
    r"|rope_interleave|alibi|new_decoder_architecture|parallel_attn|use_bidirectional_attention|use_sliding_window"
    r"|attention_k_eq_v|use_prompt|use_attention_gate|pre_norm|do_stable_layer_norm|use_task_id|is_encoder"
)
NUMBERS = {"gating": "per-element", "clip_qkv": 0.7, "attn_logit_softcapping": 5.0, "attention_multiplier": 0.4, "max_window_layers": 1}


def options(config_class):
    """Fields that a second model of the class has beside those of the first."""
    usual = tiny(config_class)
    changed = {}
    for name in fields_of(config_class):
        value = field_of(usual, name)
        if re.fullmatch(FLAGS, name) and isinstance(value, (bool, type(None))):
            changed[name] = not value
        elif name in NUMBERS:
            changed[name] = NUMBERS[name]
        elif re.fullmatch(r"(rms_norm|layer_norm|norm)_eps", name):
            changed[name] = 0.05
        elif name == "sliding_window" and not isinstance(value, bool):
            changed[name] = 4
        elif name == "rope_theta":
            changed[name] = 300.0
        elif name == "rope_parameters" and isinstance(value, dict):
            # Each kind of layer may have its own.
            kinds = {kind: own | {"rope_theta": 300.0} for kind, own in value.items() if isinstance(own, dict)}
            changed[name] = value | (kinds or {"rope_theta": 300.0})
    return changed | OPTIONS.get(config_class.model_type, {})


def model_classes(config_class):
    """Classes of models that take this configuration, those with a head first, as published checkpoints are."""
    names = []
    for mapping in HEADS + ["MODEL_MAPPING_NAMES"]:
        found = getattr(modeling_auto, mapping, {}).get(config_class.model_type)
        names += [found] if isinstance(found, str) else list(found or [])
    module = module_of(config_class)
    classes = [getattr(module, name) for name in dict.fromkeys(names) if hasattr(module, name)]
    own = [
        candidate
        for _, candidate in inspect.getmembers(module, inspect.isclass)
        if issubclass(candidate, PreTrainedModel) and candidate.__module__ == module.__name__
    ]
    classes += [candidate for candidate in own if config_of(candidate) is config_class and candidate not in classes]
    classes = classes or [candidate for candidate in own if made_with(candidate) is config_class]
    # The base classes of models, but not those that are models in spite of their names, as the images of Qwen2-VL.
    is_base = lambda found: "PreTrained" in found.__name__ or found.__name__.endswith("PretrainedModel")
    return [found for found in classes if not is_base(found) or "VisionTransformer" in found.__name__]


def config_of(model_class):
    own = model_class.__dict__.get("config_class")
    if own is not None:
        return own
    try:
        hint = typing.get_type_hints(model_class).get("config")
    except Exception:
        hint = None
    hint = hint if isinstance(hint, type) else None
    return hint or getattr(model_class, "config_class", None)


def made_with(model_class):
    """The configuration that a class is made with, where older versions say another in `config_class`."""
    parameter = inspect.signature(model_class.__init__).parameters.get("config")
    return parameter and parameter.annotation


HEADS = [
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
]
