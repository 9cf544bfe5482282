"""The models of `gguf_models/` with latent attention, with linear attention or other recurrences, and encoders."""

from functools import partial

from transformers import AutoModel, AutoModelForSeq2SeqLM, T5EncoderModel

import gguf_cases
from cases import decoder, rope

SIZES = gguf_cases.SIZES | {"vocab_size": 64, "hidden_size": 32}
ROPE = rope()
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "first_k_dense_replace": 2, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "dense"],
}
# YaRN as DeepSeek V3 has it; DeepSeek V2 has 0.707.
YARN = gguf_cases.YARN | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2, "head_dim": 16,
    "linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
AXES = rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "decoder_sparse_step": 1,
}
KIMI = {
    "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 16,
}
NEMOTRON = {
    "num_hidden_layers": 3, "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "n_groups": 1, "conv_kernel": 4, "expand": 2, "chunk_size": 16,
}
T5 = {
    "vocab_size": 61, "d_model": 32, "d_kv": 10, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "pad_token_id": 0, "decoder_start_token_id": 0,
    # llama.cpp reads the activation of other models from a table in f16.
    "feed_forward_proj": "relu", "tie_word_embeddings": False,
}
T5_PLACES = {
    "layers": "encoder.block", "attention": "layer.0.SelfAttention", "out_proj": "layer.0.SelfAttention.o",
}
T5_DECODER = {
    "decoder": ("decoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o"),
    "cross": ("decoder.block", "layer.1.EncDecAttention", "layer.1.EncDecAttention.o"),
}

small = partial(decoder, sizes=SIZES)
encoder = partial(small, encoder=True, auto_class=AutoModel)

CASES = {
    "bert_of_roberta": encoder(
        "xlm-roberta", {"num_key_value_heads": 4},
        layers="encoder.layer", attention="attention.self", out_proj="attention.output.dense",
    ),
    "deepseek2": small("deepseek_v3", LATENT, {"q_lora_rank": 14, "rope_parameters": YARN}),
    "deepseek2_lite": small("deepseek_v2", LATENT, ROPE, {"q_lora_rank": None, "num_hidden_layers": 27,
                            "first_k_dense_replace": 27, "norm_topk_prob": False}),
    "deepseek2_glm": small("glm4_moe_lite", LATENT, ROPE, {"q_lora_rank": 14}),
    "deepseek2_v2": small("deepseek_v2", LATENT, {"q_lora_rank": 14, "rope_parameters": YARN | {
        "mscale": 0.707, "mscale_all_dim": 0.707,
    }}),
    "eurobert": encoder("eurobert", ROPE, {"classifier_pooling": "mean"}),
    "falcon-h1": small("falcon_h1", MAMBA, ROPE, {
        "mamba_d_ssm": 64, "key_multiplier": 0.7, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0,
        "head_dim": 16,
    }),
    "gemma-embedding": encoder("gemma3_text", {
        "head_dim": 16, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 6,
        "num_hidden_layers": 6,
        "use_bidirectional_attention": True, "query_pre_attn_scalar": 16,
    }),
    "granitehybrid": small("granitemoehybrid", MAMBA, {
        "layer_types": ["mamba", "attention"], "attention_multiplier": 0.3, "position_embedding_type": None,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 24,
    }),
    "jamba": small("jamba", {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_dt_rank": 2, "use_mamba_kernels": False,
    }),
    "jina-bert-v3": encoder("jina_embeddings_v3", ROPE, {"num_key_value_heads": 4}),
    "kimi-linear": small("kimi_linear", KIMI),
    # The converter does not write the base of rotary positions.
    "minicpm3": small("minicpm3", LATENT, {
        "q_lora_rank": 14, "v_head_dim": 8, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    }),
    "nemotron_h": small("nemotron_h", NEMOTRON, {
        "layers_block_type": ["mamba", "attention", "mlp"],
    }, attention="mixer", out_proj="mixer.o_proj"),
    "nemotron_h_moe": small("nemotron_h", NEMOTRON, {
        "layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8, "n_group": 1,
        "topk_group": 1,
    }, attention="mixer", out_proj="mixer.o_proj"),
    "qwen35": small("qwen3_5_text", LINEAR, AXES),
    "qwen35moe": small("qwen3_5_moe_text", LINEAR, AXES, EXPERTS),
    "qwen3next": small("qwen3_next", LINEAR, EXPERTS),
    "t5": small("mt5", sizes=T5, auto_class=AutoModelForSeq2SeqLM, decoder=T5_DECODER, encoder=True, **T5_PLACES),
    "t5_of_umt5": small("umt5", sizes=T5, auto_class=AutoModelForSeq2SeqLM, decoder=T5_DECODER, encoder=True,
                        **T5_PLACES),
    "t5encoder": small("t5", sizes=T5, auto_class=T5EncoderModel, encoder=True, **T5_PLACES),
}


def kimi_linear(config, tensors):
    """Changes a checkpoint to the names of the published one, which has dense layers under another name."""
    kinds = config["layer_types"]
    numbers = {kind: [i + 1 for i, own in enumerate(kinds) if own == kind] for kind in kinds}
    config["linear_attn_config"] = {
        "full_attn_layers": numbers["full_attention"], "kda_layers": numbers["linear_attention"],
        "num_heads": config["linear_num_heads"], "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    }
    config["moe_router_activation_func"] = "sigmoid"
    config["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    for name in [name for name in tensors if ".0.block_sparse_moe." in name]:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)


def granite_hybrid(config, _):
    """Names the kinds of layers as published checkpoints do."""
    config["layer_types"] = ["attention" if kind == "full_attention" else "mamba" for kind in config["layer_types"]]


def nemotron_h(config, _):
    """Names the kinds of layers as published checkpoints do."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config["layers_block_type"])
    if "moe" not in config["layers_block_type"]:
        for name in ("num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group"):
            config.pop(name, None)
        # The converter reads the file itself where transformers does not know the model, without defaults for experts.
        config["model_type"] = "published"


def jina_embeddings_v3(config, _):
    """Changes a config to that of the published checkpoint, which has adapters."""
    config |= {"architectures": ["XLMRobertaModel"], "lora_adaptations": ["none"], "position_embedding_type": "rotary"}


# Changes of the checkpoints that transformers saves to what llama.cpp's converter reads: (config, tensors).
PUBLISHED = {
    "granitehybrid": granite_hybrid, "jina-bert-v3": jina_embeddings_v3, "kimi-linear": kimi_linear,
    "nemotron_h": nemotron_h, "nemotron_h_moe": nemotron_h,
}
# The factor by which transformers multiplies logits and llama.cpp does not.
LOGIT_FACTORS = {"t5_of_umt5": T5["d_model"] ** -0.5}
