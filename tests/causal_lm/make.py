"""Makes `models/`: tiny random decoders, whole, with the logits that transformers gives.

python tests/causal_lm/make.py [FOLDER ..]     (packages: tests/hf/requirements.txt)

A folder holds `config.json` and `model.safetensors` as `save_pretrained` writes them, and `golden.safetensors`: `ids`
(2, T), `logits` (2, T, V), and `greedy` (2, 6), the tokens that follow the first 7 of each row. Eager attention, f32.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROOT = Path(__file__).resolve().parent / "models"
SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GPT_SIZES = {
    "vocab_size": 37,
    "n_embd": 16,
    "n_inner": 20,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LATENT = {
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "num_key_value_heads": 4,
    "n_routed_experts": 4, "moe_intermediate_size": 12,
}
INDEXER = {
    "q_lora_rank": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
    # Of few heads, several scores would be 0, and equal.
    "index_n_heads": 12, "index_head_dim": 8, "index_topk": 4,
}
# Key heads that serve two value heads each, in three layers of four.
LINEAR = {
    "num_hidden_layers": 4, "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "max_position_embeddings": 128,
}
AXES = {"rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1],
    "mrope_interleaved": True,
}}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
MODELS = {
    "llama": {"mlp_bias": True},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 6},
    "gemma2": {**WINDOWS, "head_dim": 6, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {**WINDOWS, "head_dim": 6, "query_pre_attn_scalar": 8},
    # Gemma 3 from 4B on has the scaling, its 27B the other scale of scores.
    "gemma3_scaled": {
        **WINDOWS, "model_type": "gemma3_text", "head_dim": 6, "query_pre_attn_scalar": 8, "num_key_value_heads": 1,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {},
    # The window of Phi 3's 4k, the scaling of its 128k.
    "phi3_scaled": {
        "model_type": "phi3", "sliding_window": 4, "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1, 1.5], "long_factor": [2.0, 3.5],
        },
    },
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0, "attention_multiplier": 0.2,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt2": GPT_SIZES,
    "gpt_bigcode": GPT_SIZES,
    "gptj": {**GPT_SIZES, "rotary_dim": 2},
    "gemma": {"head_dim": 6, "num_key_value_heads": 1},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "stablelm_parallel": {"model_type": "stablelm", "partial_rotary_factor": 0.5, "use_parallel_residual": True},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.5},
    "gpt_neox_sequential": {
        "model_type": "gpt_neox", "num_key_value_heads": 4, "rotary_pct": 0.5, "use_parallel_residual": False,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "falcon": {"num_key_value_heads": 1},
    "falcon_grouped": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon_sequential": {"model_type": "falcon", "parallel_attn": False, "num_key_value_heads": 1},
    "bloom": {"n_layer": 2, "n_head": 4, "num_key_value_heads": 4},
    "mpt": {
        "d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32, "expansion_ratio": 2, "num_key_value_heads": 4,
    },
    "opt": {"num_key_value_heads": 4, "ffn_dim": 20, "word_embed_proj_dim": 16},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {**WINDOWS, "logit_scale": 0.5},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "starcoder2": {"sliding_window": 4},
    # A dense layer and one of experts in two groups, of which one is chosen for each token.
    "deepseek_v2": {
        **LATENT, "q_lora_rank": 12, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
    },
    "deepseek_v2_lite": {
        **LATENT, "model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 1, "num_experts_per_tok": 3,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {
        **LATENT, "q_lora_rank": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
    },
    "deepseek_v3_halves": {
        **LATENT, "model_type": "deepseek_v3", "q_lora_rank": 12, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "num_experts_per_tok": 2, "first_k_dense_replace": 0, "rope_interleave": False, "attention_bias": True,
    },
    # A layer of each kind: a window alone, keys that an indexer chooses, and all compressed keys. In the first one the
    # experts of a token follow from its id; a limit that some of the numbers exceed.
    "deepseek_v4": {
        "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "partial_rotary_factor": 0.5, "q_lora_rank": 12,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, "sliding_window": 3,
        "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 12, "index_head_dim": 8, "index_topk": 3, "hc_mult": 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "swiglu_limit": 0.5,
    },
    # Each query attends to 4 keys that an indexer chooses; there are enough tokens to choose from.
    "deepseek_v32": {**LATENT, **INDEXER, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    "glm_moe_dsa": {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1},
    # The second layer attends to the keys that the first one chose.
    "glm_moe_dsa_shared": {
        "model_type": "glm_moe_dsa", **LATENT, **INDEXER, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3,
        "first_k_dense_replace": 3, "indexer_types": ["full", "shared", "full"],
    },
    # Experts without groups, norms with gates.
    "axk2": {**LATENT, **INDEXER, "gated_norm_rank": 3},
    # A layer with rotary positions and one without; as published, with other names than in transformers.
    "mistral_large4": {
        "text_config": {
            "model_type": "mistral_large4_text", **SIZES, **LATENT, **INDEXER, "n_group": 1, "topk_group": 1,
            "no_rope_layers": [1, 0], "final_logit_softcapping": 3.0,
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "patch_size": 2, "image_size": 8,
        },
    },
    # A layer with an indexer and one with a window.
    "dots3_note_text": {
        **LATENT, **INDEXER, "n_group": 2, "topk_group": 1, "layer_types": ["indexed_attention", "sliding_attention"],
        "sliding_window": 4, "shared_experts_intermediate_size": 10, "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 6, "swa_head_dim": 10,
        "swa_qk_nope_head_dim": 6, "swa_v_head_dim": 7,
    },
    # A dense layer that attends to all keys, and one of experts that attends to two blocks of keys.
    "minimax_m3_vl_text": {
        "head_dim": 6, "dense_intermediate_size": 20, "shared_intermediate_size": 10, "swiglu_limit": 0.5,
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"], "index_n_heads": 2, "index_head_dim": 6, "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    # A limit that some of the numbers exceed.
    "gpt_oss": {
        "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "swiglu_limit": 0.5,
    },
    # Experts as published: blocks of 32 numbers of 4 bits with a scale each.
    "gpt_oss_mxfp4": {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "head_dim": 6, "num_local_experts": 3,
        "num_experts_per_tok": 2, "sliding_window": 4,
    },
    # Experts in every layer but one.
    "qwen3_next": {**LINEAR, **EXPERTS, "mlp_only_layers": [1]},
    "qwen3_5_text": {**LINEAR, **AXES, "tie_word_embeddings": True},
    # Published checkpoints read images as well: the text's names and config are below the whole model's.
    "qwen3_5_moe": {
        "text_config": {**SIZES, **LINEAR, **AXES, **EXPERTS},
        "vision_config": {
            "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16,
            "num_position_embeddings": 4, "patch_size": 2, "rope_parameters": None,
        },
    },
    # A dense layer and three of experts, latent attention without positions; enough tokens for two chunks of 64.
    "kimi_linear": {
        "num_hidden_layers": 4, "max_position_embeddings": 128, "num_key_value_heads": 4, "linear_num_heads": 4,
        "linear_head_dim": 7, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "num_local_experts": 4, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 2, "moe_intermediate_size": 8,
        "layer_types": [*["linear_attention"] * 3, "full_attention"], "tokens": 70,
    },
    # Of which linear layers have norms before the sums, and the others behind them; as published, without positions.
    "olmo_hybrid": {
        "num_hidden_layers": 4, "max_position_embeddings": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 6, "tokens": 70,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
}


@torch.no_grad()
def quantize_experts(model):
    """Gives the experts of GPT-OSS weights that MXFP4 has, and returns its tensors."""
    quantized = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = parameter.shape
            blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
            scales = torch.randint(123, 127, (experts, outer, inner // 32), dtype=torch.uint8)
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return quantized


def store_experts(folder, quantized):
    """Replaces the experts of a checkpoint, and says so in its config, as the published ones do."""
    tensors = load_file(folder / "model.safetensors")
    for name in quantized:
        tensors.pop(name.removesuffix("_blocks"), None)
    save_file(tensors | quantized, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def publish(folder, key_width=16):
    """Stores as published what transformers saves in other pieces: the experts of Qwen3.5, which are one tensor, and the
    convolutions of OLMo hybrid, which it cuts into thirds."""
    tensors = load_file(folder / "model.safetensors")
    for at in {name.split("experts.0.")[0] for name in tensors if "language_model" in name and "experts.0." in name}:
        take = lambda part: torch.stack([tensors.pop(f"{at}experts.{i}.{part}_proj.weight") for i in range(4)])
        gate_up = torch.cat([take("gate"), take("up")], 1)
        tensors |= {f"{at}experts.gate_up_proj": gate_up, f"{at}experts.down_proj": take("down")}
    for at in {name.split("q_conv1d")[0] for name in tensors if "linear_attn.q_conv1d" in name}:
        names = [f"{at}{part}_conv1d.weight" for part in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).tensor_split([key_width, 2 * key_width])
        tensors |= {name: part.contiguous() for name, part in zip(names, parts)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        options = dict(MODELS[name])
        model_type = options.pop("model_type", name)
        tokens = options.pop("tokens", 11)
        sizes = {} if {"n_embd", "text_config"} & options.keys() else SIZES
        torch.manual_seed(sum(map(ord, name)))
        config = AutoConfig.for_model(model_type, **{**sizes, **options})
        config._attn_implementation = "eager"
        kind = AutoModelForImageTextToText if "text_config" in options else AutoModelForCausalLM
        model = kind.from_config(config).float().eval()
        for parameter in model.parameters():
            # Norms and biases too are to matter; embeddings of one size keep scores and logits of one size.
            torch.nn.init.normal_(parameter, std=0.4)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "rotary_emb.alpha")):
                torch.nn.init.normal_(buffer, std=0.1)
            if buffer_name.endswith("tid2eid"):
                # Different experts of a token.
                buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) * 3 % 4)
        quantized = quantize_experts(model) if name.endswith("mxfp4") else {}
        ids = torch.randint(2, 37, (2, tokens))
        with torch.no_grad():
            logits = model(ids).logits
            row = ids[:, :7]
            for _ in range(6):
                row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], 1)
        folder = ROOT / name
        model.save_pretrained(folder)
        if quantized:
            store_experts(folder, quantized)
        if name in ("qwen3_5_moe", "olmo_hybrid"):
            publish(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        golden = {"ids": ids.to(torch.uint32), "logits": logits, "greedy": row[:, 7:].to(torch.uint32)}
        save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
        print(name, file=sys.stderr)


if __name__ == "__main__":
    main()
