"""Makes x_transformers.safetensors: attention layers of x-transformers, an input and the output of each.

    pip install torch safetensors x-transformers==2.31.10
    python tests/weights/make_x_transformers.py

Also makes x_transformers.json: the parameters that an option adds to a layer, by name and shape.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from x_transformers.x_transformers import Attention

DIM = 16

LAYERS = {
    "a_key_head_for_each": dict(heads=4, dim_head=4),
    "two_key_heads": dict(heads=4, kv_heads=2, dim_head=4),
    "three_key_heads": dict(heads=6, kv_heads=3, dim_head=4, causal=True),
    "two_of_six_key_heads": dict(heads=6, kv_heads=2, dim_head=8),
    "wide_values": dict(heads=8, kv_heads=4, dim_head=2, value_dim_head=5),
    "one_key_head": dict(heads=4, kv_heads=1, dim_head=4),
    "other_output": dict(heads=4, kv_heads=2, dim_head=4, dim_out=10),
}

OPTIONS = {
    "num_mem_kv": dict(num_mem_kv=2),
    "head_scale": dict(head_scale=True),
    "qk_norm": dict(qk_norm=True, qk_norm_dim_scale=True),
    "qk_rmsnorm": dict(qk_rmsnorm=True),
    "value_rmsnorm": dict(value_rmsnorm=True),
    "head_learned_sink": dict(head_learned_sink=True),
    "pre_talking_heads": dict(pre_talking_heads=True),
    "post_talking_heads": dict(post_talking_heads=True),
    "pre_scale_post_talking_heads": dict(pre_scale_post_talking_heads=True),
    "gate_values": dict(gate_values=True),
    "gate_value_heads": dict(gate_value_heads=True),
    "output_gate": dict(output_gate=True),
    "use_cope": dict(use_cope=True, causal=True),
    "use_rel_proj_pos_bias": dict(use_rel_proj_pos_bias=True),
    "data_dependent_alibi": dict(data_dependent_alibi=True, causal=True),
    "learned_value_residual_mix": dict(learned_value_residual_mix=True),
    "use_latent_q": dict(use_latent_q=True, dim_latent_q=8),
    "use_latent_kv": dict(use_latent_kv=True, dim_latent_kv=8),
}

# The layer's own, of which an option may make others in their place.
USUAL = {"to_q.weight", "to_k.weight", "to_v.weight", "to_out.weight"}


def main():
    torch.manual_seed(11)
    here = Path(__file__).parent
    tensors = {}
    for name, options in LAYERS.items():
        layer = Attention(DIM, **options).eval()
        xs = torch.randn(2, 7, DIM)
        with torch.no_grad():
            ys = layer(xs)
        for parameter, weight in layer.state_dict().items():
            tensors[f"{name}.{parameter}"] = weight.contiguous()
        tensors[f"{name}.in"], tensors[f"{name}.out"] = xs, ys.contiguous()
    save_file(tensors, here / "x_transformers.safetensors")

    added = {}
    for name, options in OPTIONS.items():
        layer = Attention(DIM, heads=4, dim_head=4, **options)
        own = {parameter: list(weight.shape) for parameter, weight in layer.state_dict().items()}
        added[name] = {parameter: shape for parameter, shape in own.items() if parameter not in USUAL}
    text = json.dumps(added, indent=2)
    (here / "x_transformers.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
