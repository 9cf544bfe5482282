"""x-transformers' Attention with memory keys and values: several learned ones, to which every query attends."""

from importlib.metadata import version

import torch
from safetensors.torch import save_file
from torch import nn
from x_transformers.x_transformers import Attention, RotaryEmbedding

from layers import Recorded, draw


def record():
    recorded = Recorded("x_transformers", version("x-transformers"))
    torch.manual_seed(9)
    model = nn.Module()
    model.layers = nn.ModuleList()
    xs = torch.from_numpy(draw(9, 2, 6, 12))
    layers = (
        dict(options=dict(heads=4, dim_head=4, num_mem_kv=3), rotary=False),
        dict(options=dict(heads=4, kv_heads=2, dim_head=4, causal=True, num_mem_kv=2), rotary=False),
        dict(options=dict(heads=6, kv_heads=3, dim_head=4, causal=True, num_mem_kv=4), rotary=True),
    )
    for layer in layers:
        options = layer["options"]
        attention = Attention(12, **options).eval()
        config = dict(
            embed_dim=12,
            num_heads=options["heads"],
            num_kv_heads=options.get("kv_heads", options["heads"]),
            head_dim=4,
            out_dim=12,
            causal=options.get("causal", False),
            num_mem_kv=options["num_mem_kv"],
        )
        positions = None
        if layer["rotary"]:
            positions = RotaryEmbedding(4).forward_from_seq_len(6)
            config["rope"] = dict(base=10000.0, style="interleaved")
        with torch.no_grad():
            ys = attention(xs, rotary_pos_emb=positions)
        recorded.add(f"layers.{len(model.layers)}", "x-transformers", config, ys, queries=xs)
        model.layers.append(attention)
    save_file(model.state_dict(), recorded.file)
    return recorded
