"""torchtune's MultiHeadAttention, with its rotary positions.

torchtune 0.6.1 does not import with PyTorch 2.15, so only its files of attention and positions are imported.
"""

import importlib.util
import sys
import types
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from layers import Recorded, biases, draw


def record():
    root = Path(importlib.util.find_spec("torchtune").submodule_search_locations[0])
    for name in ("torchtune", "torchtune.modules", "torchtune.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from torchtune.modules.attention import MultiHeadAttention
    from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings

    recorded = Recorded("torchtune", version("torchtune"))
    torch.manual_seed(6)
    model = nn.Module()
    model.layers = nn.ModuleList()
    for heads, kv_heads, bias, rotary in ((4, 2, False, True), (3, 3, True, False)):
        block = nn.Module()
        block.attn = MultiHeadAttention(
            embed_dim=12,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=6,
            q_proj=nn.Linear(12, heads * 6, bias=bias),
            k_proj=nn.Linear(12, kv_heads * 6, bias=bias),
            v_proj=nn.Linear(12, kv_heads * 6, bias=bias),
            output_proj=nn.Linear(heads * 6, 12, bias=bias),
            pos_embeddings=RotaryPositionalEmbeddings(6, max_seq_len=32, base=500) if rotary else None,
            max_seq_len=32,
            is_causal=rotary,
        )
        xs = torch.from_numpy(draw(7, 2, 6, 12))
        config = dict(embed_dim=12, num_heads=heads, num_kv_heads=kv_heads, head_dim=6, out_dim=12, causal=rotary)
        config |= biases(bias)
        if rotary:
            config["rope"] = dict(base=500.0, style="interleaved")
        with torch.no_grad():
            ys = block.attn(xs, xs)
        recorded.add(f"layers.{len(model.layers)}.attn", "torchtune", config, ys, queries=xs)
        model.layers.append(block)
    save_file(model.state_dict(), recorded.file)
    return recorded
