"""Configurations in the spellings that published checkpoints use, and what transformers makes of them.

`raw` is a config.json, old or sparse; `saved` the same configuration as this version of transformers writes it, every
default filled in. Both must give the same attention.
"""

from copy import deepcopy

from transformers import AutoConfig, PreTrainedConfig

from cases import CASES

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3_TEXT = {"sliding_window": 512, "head_dim": 256, "num_hidden_layers": 8, "query_pre_attn_scalar": 256}
DEEPSEEK_SCALING = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
DEEPSEEK_V4_SCALING = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONGROPE_SCALING = {"short_factor": [1.0 + i / 50 for i in range(48)], "long_factor": [1.5 + i for i in range(48)]}

RAW = [
    ("llama", {"hidden_size": 2048, "num_key_value_heads": 4, "rope_scaling": None}),
    ("llama", {"num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": None, "head_dim": None}),
    ("llama", {"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": LLAMA3_SCALING}),
    ("llama", {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}}),
    # Without it, the context of the training is taken to be the model's.
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 16.0}, "max_position_embeddings": 4096}),
    ("llama", {"rope_scaling": LLAMA3_SCALING | {"rope_theta": 1000.0}, "rope_theta": 7000.0}),
    ("mistral", {"sliding_window": 4096, "rope_theta": 10000.0, "num_key_value_heads": 8}),
    ("mistral", {"sliding_window": None, "rope_theta": 1000000.0, "head_dim": 128, "hidden_size": 5120}),
    ("mixtral", {"sliding_window": None, "rope_theta": 1e6, "num_key_value_heads": 8}),
    (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24, "num_key_value_heads": 2},
    ),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3, "num_hidden_layers": 6}),
    (
        "qwen2",
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    ),
    ("qwen3", {"rope_theta": 1e6, "sliding_window": None, "num_key_value_heads": 8, "hidden_size": 1024}),
    ("gemma", {"num_key_value_heads": 1, "num_attention_heads": 8, "hidden_size": 2048, "rope_theta": 10000.0}),
    ("gemma2", {"num_hidden_layers": 4, "query_pre_attn_scalar": 144, "head_dim": 128, "attn_logit_softcapping": None}),
    ("gemma3_text", GEMMA3_TEXT | {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 10000}),
    ("gemma3_text", GEMMA3_TEXT | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", GEMMA3_TEXT | {"use_bidirectional_attention": True}),
    ("gemma3", {"text_config": {"hidden_size": 2560, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}),
    ("phi", {"partial_rotary_factor": 0.4, "hidden_size": 2560, "rope_theta": 10000.0, "rope_scaling": None}),
    ("phi3", {"sliding_window": 2047, "rope_theta": 10000.0, "rope_scaling": None}),
    ("phi3", {"max_position_embeddings": 131072, "rope_scaling": LONGROPE_SCALING | {"type": "longrope"}}),
    (
        "phi3",
        {
            "max_position_embeddings": 131072,
            "rope_scaling": LONGROPE_SCALING | {"type": "su", "original_max_position_embeddings": 4096},
        },
    ),
    ("phi3", {"partial_rotary_factor": 0.75, "num_key_value_heads": 8, "num_attention_heads": 24}),
    ("olmo2", {"rope_theta": 500000, "num_key_value_heads": None}),
    ("cohere", {"rope_theta": 8000000.0, "use_qk_norm": False, "num_key_value_heads": 64}),
    ("cohere2", {"sliding_window_pattern": 4, "rope_theta": 50000, "num_hidden_layers": 8, "num_key_value_heads": 8}),
    ("glm", {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "attention_bias": True}),
    ("glm4", {"partial_rotary_factor": 1.0, "rope_theta": 5000.0, "attention_bias": False}),
    ("stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "rope_theta": 10000}),
    ("starcoder2", {"sliding_window": 4096, "rope_theta": 999999.4420358813, "use_bias": True}),
    ("granite", {"attention_multiplier": 0.015625, "num_key_value_heads": 8, "rope_theta": 10000.0}),
    (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    ("smollm3", {"no_rope_layer_interval": 3, "num_hidden_layers": 6, "rope_theta": 5000000.0}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}),
    ("gpt2", {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 3}),
    ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 20000, "hidden_size": 512, "num_attention_heads": 8}),
    ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("bloom", {"n_embed": 1024, "num_attention_heads": 16, "n_layer": 24}),
    ("falcon", {"multi_query": True, "num_kv_heads": 71, "new_decoder_architecture": False, "rope_theta": 9000.0}),
    ("falcon", {"new_decoder_architecture": True, "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8}),
    ("falcon", {"alibi": True, "multi_query": False, "hidden_size": 2048, "num_attention_heads": 32, "bias": True}),
    ("gpt_bigcode", {"n_embd": 2048, "n_head": 16, "multi_query": True}),
    ("mpt", {"d_model": 4096, "n_heads": 32, "attn_config": {"clip_qkv": 8.0, "softmax_scale": None}}),
    ("deepseek_v2", {"q_lora_rank": None, "rope_scaling": DEEPSEEK_SCALING, "rope_theta": 10000}),
    ("deepseek_v3", {"rope_scaling": DEEPSEEK_SCALING | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    # As it is published: layers by their numbers of tokens of a key, with one for the layer that predicts more tokens.
    (
        "deepseek_v4",
        {
            "num_hidden_layers": 5,
            "compress_ratios": [0, 0, 4, 128, 4, 0],
            "compress_rope_theta": 160000,
            "rope_scaling": DEEPSEEK_V4_SCALING,
            "qk_rope_head_dim": 64,
            "num_hash_layers": 3,
        },
    ),
    ("deepseek_v4", {"head_dim": 128, "qk_rope_head_dim": 32, "compress_rate_csa": 8, "compress_rate_hca": 64}),
    ("modernbert", {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 5000.0}),
    ("nomic_bert", {"rope_theta": 2000.0}),
    ("t5", {"d_kv": 64, "num_heads": 6, "d_model": 384}),
    ("umt5", {"num_layers": 4, "num_decoder_layers": None}),
    # As published: one object for the text and the whole, and the old name of positions on several axes.
    (
        "qwen2_vl",
        {
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "sliding_window": 32768,
            "max_window_layers": 28,
        },
    ),
    ("qwen3_next", {"full_attention_interval": 2, "num_hidden_layers": 4, "rope_theta": 1e7, "partial_rotary_factor": 0.5}),
    ("llama4_text", {"no_rope_layer_interval": 2, "num_hidden_layers": 4, "attn_temperature_tuning": False}),
    # The layers whose keys an earlier layer chooses.
    ("glm_moe_dsa", {"num_hidden_layers": 6, "index_topk_pattern": "FSSFFS"}),
    ("glm_moe_dsa", {"num_hidden_layers": 7, "index_topk_freq": 3, "index_skip_topk_offset": 2}),
    ("mistral_large4_text", {"no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    # As published: other names of the fields of some layers.
    (
        "dots3_note_text",
        {
            "num_hidden_layers": 4,
            "use_dsa": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window_size": 256,
            "rope_theta": 8000000.0,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 32,
            "swa_num_key_value_heads": 32,
            "swa_kv_lora_rank": 512,
        },
    ),
    (
        "minimax_m3_vl_text",
        {
            "num_hidden_layers": 3,
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 1, 1],
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 64,
                "sparse_block_size": 64,
                "sparse_topk_blocks": 8,
                "sparse_local_block": 2,
            },
        },
    ),
    # The usual names are the encoder's.
    ("marian", {"num_hidden_layers": 6, "decoder_layers": 3, "num_attention_heads": 8, "decoder_attention_heads": 4}),
    ("whisper", {"encoder_layers": 32, "decoder_layers": 2, "encoder_attention_heads": 20, "d_model": 1280}),
]


def variants():
    defaults = [(model_type, {}) for model_type in sorted({case.model_type for case in CASES.values()})]
    return [variant(model_type, raw) for model_type, raw in defaults + RAW]


def variant(model_type, raw):
    config = AutoConfig.for_model(model_type, **deepcopy(raw))  # which it changes
    return {"raw": {"model_type": model_type} | raw, "saved": without_generalities(config.to_dict())}


def without_generalities(saved):
    """Without what every configuration has, and without the other parts of a model of several."""
    general = PreTrainedConfig().to_dict().keys() - {"model_type"}
    kept = {key: value for key, value in saved.items() if key not in general and key != "vision_config"}
    return {
        key: without_generalities(value) if isinstance(value, dict) and "model_type" in value else value
        for key, value in kept.items()
    }
