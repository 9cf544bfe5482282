"""Makes `linear_models/`, layers of linear attention of tiny random Hugging Face models.

python tests/hf/make_linear.py             every folder
python tests/hf/make_linear.py --check     writes nothing; names what differs from the files that are there

A folder holds `config.json` as `save_pretrained` writes it, `model.safetensors` with the weights of layer 0 alone, under
the names of that file, and `golden.safetensors`: for inputs `in` (B, T, E) the outputs `out`, under an `attention_mask`
with padding on the left `padded`, and of `sum(out * probe)` the gradient `grad.in`, and where the file has the names of
the modules those of the parameters, `grad.{name}`. Everything is f32, by the implementations in PyTorch alone.
"""

import argparse
import re
import sys
import tempfile
import zlib
from pathlib import Path

sys.dont_write_bytecode = True

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from transformers.utils import logging

from make import keep
from randomise import randomise

ROOT = Path(__file__).resolve().parent
BATCH, LENGTH, PADDED = 2, 9, 4
SIZES = {
    "vocab_size": 31,
    "hidden_size": 20,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
SHARED_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 8}
HEADS = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 4}
KIMI_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_shared_experts": 1}
KIMI_HEADS = {"linear_num_heads": 3, "linear_head_dim": 6, "linear_conv_kernel_dim": 4}

CASES = {
    "qwen3_next": ("qwen3_next", SIZES | SHARED_EXPERTS | HEADS | {"head_dim": 8}),
    "qwen3_5": ("qwen3_5_text", SIZES | HEADS | {"head_dim": 16}),
    "qwen3_5_moe": ("qwen3_5_moe_text", SIZES | SHARED_EXPERTS | HEADS | {"head_dim": 16}),
    "qwen4_exp": (
        "qwen4_exp_text",
        SIZES | SHARED_EXPERTS | HEADS
        | {"layer_types": ["linear_attention", "indexed_attention"], "head_dim": 16, "output_gate_type": "sigmoid",
           "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
           "indexer_compress_ratio": 2, "hc_lowrank": 4},
    ),
    "olmo_hybrid": ("olmo_hybrid", SIZES | {"num_key_value_heads": 4, "linear_conv_kernel_dim": 4}),
    "olmo_hybrid_grouped": ("olmo_hybrid", SIZES | HEADS | {"linear_allow_neg_eigval": False}),
    "kimi_linear": (
        "kimi_linear",
        SIZES | KIMI_EXPERTS | KIMI_HEADS | LATENT | {"num_key_value_heads": 4, "qk_rope_head_dim": 4},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        SIZES | KIMI_EXPERTS | LATENT
        | {"num_key_value_heads": 4, "qk_rope_head_dim": 4, "head_dim": 6, "short_conv_kernel_size": 4,
           "n_group": 1, "topk_group": 1, "num_mtp_layers": 0},
    ),
    "bailing_hybrid_softplus": (
        "bailing_hybrid",
        SIZES | KIMI_EXPERTS | LATENT
        | {"num_key_value_heads": 4, "qk_rope_head_dim": 4, "head_dim": 6, "short_conv_kernel_size": 4,
           "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "kda_safe_gate": False},
    ),
    "glm5_next": (
        "glm5_next_text",
        SIZES | KIMI_HEADS | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
           "n_shared_experts": 1, "q_lora_rank": 6, "qk_rope_head_dim": 0, "index_topk": 4, "index_head_dim": 4,
           "index_n_heads": 2, "index_kpool": 2, "mlp_layer_types": ["dense", "dense"],
           "layer_types": ["linear_attention", "indexed_attention"]},
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    differing = []
    for name, (model_type, config) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            record(name, model_type, config, Path(folder))
            differing += keep(Path(folder), ROOT / "linear_models" / name, arguments.check)
    print("\n".join(["would change:", *differing]) if differing else "done")
    return 1 if differing else 0


def record(name, model_type, config, folder):
    torch.manual_seed(zlib.crc32(name.encode()))
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **config)).float().eval()
    randomise(model, lambda parameter: parameter[0].numel())
    path, attention = next(child for child in model.layers[0].named_children() if child[0].endswith("_attn"))
    tensors = run(attention)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored = {key: tensor for key, tensor in stored.items() if re.search(r"layers\.0\.(attention|self_attn|linear_attn)\.", key)}
    split_convolutions(attention, stored)
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    for parameter, tensor in attention.named_parameters():
        key = f"layers.0.{path}.{parameter}"
        if key in stored:
            tensors[f"grad.{key}"] = tensor.grad
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "golden.safetensors")


def split_convolutions(attention, stored):
    """Published files have a convolution each for queries, keys and values; transformers saves thirds of all rows."""
    names = [next((key for key in stored if key.endswith(f"{part}_conv1d.weight")), None) for part in "qkv"]
    if all(names):
        widths = [stored[name.replace("conv1d", "proj")].shape[0] for name in names]
        for name, tensor in zip(names, attention.conv1d.weight.detach().split(widths)):
            stored[name] = tensor.clone()


def run(attention):
    xs = torch.randn(BATCH, LENGTH, SIZES["hidden_size"], requires_grad=True)
    probe = torch.randn(BATCH, LENGTH, SIZES["hidden_size"])
    ys = attention(xs)
    (ys * probe).sum().backward()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :PADDED] = 0
    with torch.no_grad():
        padded = attention(xs, attention_mask=mask)
    tensors = {"in": xs, "out": ys, "probe": probe, "grad.in": xs.grad, "padded": padded}
    tensors = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    return tensors | {"attention_mask": mask.to(torch.uint8)}


if __name__ == "__main__":
    sys.exit(main())
