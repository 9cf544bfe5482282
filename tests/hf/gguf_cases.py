"""The models of `gguf_models/`: tiny ones of llama.cpp's architectures. A case's name begins with the architecture's."""

from dataclasses import replace
from functools import partial

from transformers import AutoModelForImageTextToText

import cases
from cases import ALTERNATING, BLOOM_PLACES, GPT2_PLACES, decoder, rope
from cases import CASES as CHECKPOINTS

# Fields that differ from the sizes of other models.
OF_FILES = {"hidden_size": 16, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
SIZES = cases.SIZES | OF_FILES
UNGROUPED = cases.UNGROUPED | OF_FILES
GPT2_SIZES = cases.GPT2_SIZES | {"n_embd": 16, "n_inner": 64}
# Heads that are wider than `hidden_size / heads`.
WIDE = {"head_dim": 8}
# For architectures whose pattern llama.cpp does not read.
FULL_LAST = {
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 5, "num_hidden_layers": 4,
}
FULL_FIRST = FULL_LAST | {"layer_types": ["full_attention"] + ["sliding_attention"] * 3}
FULL_SIXTH = FULL_LAST | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_hidden_layers": 6}
TIED = {"tie_word_embeddings": True}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, "norm_topk_prob": True,
}
VISION = {
    "depth": 1, "hidden_size": 8, "embed_dim": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16,
    "num_position_embeddings": 4, "patch_size": 2, "deepstack_visual_indexes": [],
}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 4,
    "beta_fast": 32.0, "beta_slow": 1.0,
}

small = partial(decoder, sizes=SIZES)

# Parameters that are zero, so that no GELU counts, which llama.cpp reads from a table in f16.
WITHOUT_GELU = r"mlp\.down_proj|per_layer_projection\."
ZEROED = {
    "falcon": "dense_4h_to_h",
    "falcon_multi_query": "dense_4h_to_h",
    "gemma": WITHOUT_GELU,
    "gemma2": WITHOUT_GELU,
    "gemma3": WITHOUT_GELU,
    "gemma3n": WITHOUT_GELU,
    "gemma4": WITHOUT_GELU,
    "gemma4_keys_as_values": WITHOUT_GELU,
    "qwen3vlmoe": "experts",
}
# The layers of a file, where they are not the first four.
KEPT = {"gemma3": [0, 5], "gemma3n": [0, 18, 19, 20, 21]}


def add_unused_keys(_, tensors):
    """Adds the projections of keys and values that published checkpoints of Gemma 3n have in all layers."""
    for name, tensor in list(tensors.items()):
        for part in ("k_proj", "v_proj", "k_norm"):
            if f".layers.0.self_attn.{part}." in name:
                for layer in (20, 21):
                    tensors[name.replace(".layers.0.", f".layers.{layer}.")] = tensor.clone()


def transpose_experts(_, tensors):
    """Transposes experts, which published checkpoints of Qwen3-VL have in the other order."""
    for name, tensor in tensors.items():
        if "experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()


def list_experts(fields, _):
    """Sets a number for each layer, as published configurations of Hunyuan have it."""
    fields.update({"moe_topk": [2, 2], "num_shared_expert": [1, 1], "moe_intermediate_size": [24, 24]})


# Changes of checkpoints to what is published: (config, tensors).
PUBLISHED = {
    "gemma3n": add_unused_keys,
    "gpt2": lambda fields, _: fields.update(n_ctx=64),
    "hunyuan-moe": list_experts,
    "mpt": lambda fields, _: fields.update(architectures=["MPTForCausalLM"]),
    "qwen3vlmoe": transpose_experts,
}

CASES = {
    "afmoe": small("afmoe", WIDE, FULL_LAST, EXPERTS, {
        "num_dense_layers": 4, "num_shared_experts": 1, "mup_enabled": True,
    }),
    "apertus": small("apertus", rope()),
    "arcee": small("arcee", WIDE, rope()),
    "bloom": small("bloom", sizes={"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 6}, **BLOOM_PLACES),
    "cohere2moe": small("cohere2_moe", WIDE, ALTERNATING, EXPERTS),
    "command-r": small("cohere", rope(), TIED),
    "dbrx": small(
        "dbrx",
        {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 500.0}},
        rope(),
        {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}}},
        sizes={"vocab_size": 61, "pad_token_id": 0},
        layers="blocks",
        attention="norm_attn_norm.attn",
        out_proj="norm_attn_norm.attn.out_proj",
    ),
    "dots1": small("dots1", WIDE, rope(), {
        "num_key_value_heads": 4, "scoring_func": "sigmoid",
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }),
    "ernie4_5": small("ernie4_5", WIDE, rope()),
    "ernie4_5-moe": small("ernie4_5_moe", rope(), {
        "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 12,
        "moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_layer_end_index": 1,
    }),
    "exaone-moe": small("exaone_moe", WIDE, FULL_LAST, rope(), EXPERTS, {
        "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "first_k_dense_replace": 1, "scoring_func": "sigmoid",
    }),
    "exaone4": small("exaone4", rope(), {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    # llama.cpp knows the size with windows by its number of layers.
    "exaone4_windows": small("exaone4", FULL_LAST, rope(), {
        "num_hidden_layers": 64, "layer_types": FULL_LAST["layer_types"] * 16,
    }),
    "falcon": small("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}, TIED, **BLOOM_PLACES),
    "falcon_multi_query": small("falcon", {"num_kv_heads": 1}, TIED, sizes=UNGROUPED, **BLOOM_PLACES),
    "gemma": small("gemma", WIDE, TIED, {"num_key_value_heads": 1}),
    "gemma2": small("gemma2", WIDE, TIED, ALTERNATING, {
        "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0,
    }),
    "gemma3": small("gemma3_text", WIDE, TIED, FULL_SIXTH, {"query_pre_attn_scalar": 8, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }}),
    # llama.cpp reads no number of layers with their own keys: 20.
    "gemma3n": small("gemma3n_text", WIDE, {
        "layer_types": ["sliding_attention", "full_attention"] * 11, "num_hidden_layers": 22, "num_kv_shared_layers": 2,
        "sliding_window": 5, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 61, "laurel_rank": 64,
        "intermediate_size": [24] * 22, "activation_sparsity_pattern": [0.0] * 22,
    }),
    "gemma4": small("gemma4_text", WIDE, {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "sliding_window": 5, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 61, "global_head_dim": 16,
        "final_logit_softcapping": 30.0,
    }),
    "gemma4_keys_as_values": small("gemma4_text", WIDE, ALTERNATING, {
        "hidden_size_per_layer_input": 0, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
    }),
    "glm4": small("glm4", WIDE, rope(partial_rotary_factor=0.5)),
    "glm4_moe": small("glm4_moe", WIDE, rope(partial_rotary_factor=0.5), {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True,
        "num_nextn_predict_layers": 0,
    }),
    "gpt-oss": small("gpt_oss", WIDE, ALTERNATING, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": small("gpt2", sizes=GPT2_SIZES, **GPT2_PLACES),
    "granite": small("granite", rope(), {"attention_multiplier": 0.3}),
    "granite_swa": small("granite_swa", ALTERNATING, {"attention_multiplier": 0.3}),
    "granitemoe": small("granitemoe", EXPERTS, rope(), {"attention_multiplier": 0.3}),
    "granitemoe_shared": small("granitemoeshared", EXPERTS, rope(), {
        "attention_multiplier": 0.3, "shared_intermediate_size": 8,
    }),
    "hunyuan-dense": small("hunyuan_v1_dense", WIDE, rope()),
    "hunyuan-moe": small("hunyuan_v1_moe", WIDE, rope(), EXPERTS, {
        "moe_topk": 2, "num_shared_expert": 1, "moe_intermediate_size": 24,
    }),
    "hy_v3": small("hy_v3", WIDE, rope(), EXPERTS, {"num_shared_experts": 1, "first_k_dense_replace": 1}),
    "jais2": small("jais2", WIDE, rope()),
    "laguna": small("laguna", WIDE, FULL_FIRST, EXPERTS, {
        "num_attention_heads_per_layer": [4, 2, 2, 2], "mlp_layer_types": ["dense"] + ["sparse"] * 3, "gating": True,
    }),
    "lfm2": small("lfm2", rope(), {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
                  out_proj="self_attn.out_proj"),
    "lfm2moe": small("lfm2_moe", rope(), EXPERTS, TIED, {
        "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
    }, out_proj="self_attn.out_proj"),
    "llama": small("llama", WIDE, {"attention_bias": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }}),
    "llama_yarn": small("llama", WIDE, {"rope_parameters": YARN}),
    "llama4": replace(CHECKPOINTS["llama4"], config={**SIZES, **WIDE, **rope(), **{
        "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4, "interleave_moe_layer_step": 1,
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24,
    }}),
    "mellum": small("mellum", WIDE, ALTERNATING, EXPERTS, {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }}),
    "minimax-m2": small("minimax_m2", WIDE, EXPERTS, rope(), {"rotary_dim": 4, "scoring_func": "sigmoid"}),
    "mistral3": small("ministral3", WIDE, {"rope_parameters": YARN | {
        "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0,
    }}),
    "mistral3_without_scaling": small("mistral", WIDE, rope()),
    "mpt": small(
        "mpt",
        {"d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 64, "attn_config": {"clip_qkv": 0.7}},
        sizes={"vocab_size": 61}, layers="blocks", attention="attn", out_proj="attn.out_proj",
    ),
    "nemotron": small("nemotron", rope(partial_rotary_factor=0.5)),
    "olmo": small("olmo", {"clip_qkv": 0.7}, rope()),
    "olmo2": small("olmo2", rope()),
    "olmo2_windows": small("olmo3", rope(), FULL_LAST),
    "olmoe": small("olmoe", rope(), EXPERTS, {"num_key_value_heads": 4, "norm_topk_prob": False}),
    "phi2": small("phi", {"intermediate_size": 64}, rope(partial_rotary_factor=0.5),
                  sizes=UNGROUPED, out_proj="self_attn.dense"),
    "phi3": small("phi3", rope(), {"sliding_window": None}),
    "qwen2": small("qwen2", rope()),
    "qwen2moe": small("qwen2_moe", EXPERTS, rope(), {"norm_topk_prob": False}),
    "qwen2vl": small("qwen2_vl", {
        "text_config": {**SIZES, **rope(mrope_section=[1, 1, 0])}, "vision_config": VISION, "vocab_size": 61,
    }, sizes={}, layers="language_model.layers", auto_class=AutoModelForImageTextToText),
    "qwen3": small("qwen3", WIDE, rope()),
    "qwen3moe": small("qwen3_moe", WIDE, EXPERTS, rope()),
    "qwen3vl": small("qwen3_vl", {
        "text_config": {**SIZES, **WIDE, **rope(mrope_section=[2, 1, 1])}, "vision_config": VISION, "vocab_size": 61,
    }, sizes={}, layers="language_model.layers", auto_class=AutoModelForImageTextToText),
    "qwen3vlmoe": small("qwen3_vl_moe", {
        "text_config": {**SIZES, **WIDE, **EXPERTS, **rope(mrope_section=[2, 1, 1])}, "vision_config": VISION,
        "vocab_size": 61,
    }, sizes={}, layers="language_model.layers", auto_class=AutoModelForImageTextToText),
    "seed_oss": small("seed_oss", WIDE, rope(), {"attention_bias": True}),
    "smollm3": small("smollm3", rope(), {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "starcoder": small("gpt_bigcode", sizes=GPT2_SIZES, **GPT2_PLACES),
    "starcoder2": small("starcoder2", rope()),
}
