"""Makes `models/`: tiny random decoders, whole, with the logits that transformers gives.

python tests/causal_lm/make.py [FOLDER ..]     (packages: tests/hf/requirements.txt)

A folder holds `config.json` and `model.safetensors` as `save_pretrained` writes them, and `golden.safetensors`: `ids`
(2, 11), `logits` (2, 11, V), and `greedy` (2, 6), the tokens that follow the first 7 of each row. Eager attention, f32.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
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
    # A limit that some of the numbers exceed.
    "gpt_oss": {
        "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "swiglu_limit": 0.5,
    },
    # Experts as published: blocks of 32 numbers of 4 bits with a scale each.
    "gpt_oss_mxfp4": {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "head_dim": 6, "num_local_experts": 3,
        "num_experts_per_tok": 2, "sliding_window": 4,
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


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        options = dict(MODELS[name])
        model_type = options.pop("model_type", name)
        sizes = {} if "n_embd" in options else SIZES
        torch.manual_seed(sum(map(ord, name)))
        config = AutoConfig.for_model(model_type, **{**sizes, **options})
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            # Norms and biases too are to matter; embeddings of one size keep scores and logits of one size.
            torch.nn.init.normal_(parameter, std=0.4)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.1)
        quantized = quantize_experts(model) if name.endswith("mxfp4") else {}
        ids = torch.randint(2, 37, (2, 11))
        with torch.no_grad():
            logits = model(ids).logits
            row = ids[:, :7]
            for _ in range(6):
                row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], 1)
        folder = ROOT / name
        model.save_pretrained(folder)
        if quantized:
            store_experts(folder, quantized)
        (folder / "generation_config.json").unlink(missing_ok=True)
        golden = {"ids": ids.to(torch.uint32), "logits": logits, "greedy": row[:, 7:].to(torch.uint32)}
        save_file({key: value.contiguous() for key, value in golden.items()}, folder / "golden.safetensors")
        print(name, file=sys.stderr)


if __name__ == "__main__":
    main()
