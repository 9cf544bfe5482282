"""The weight layouts of common models, each a tiny layer: the layout is theirs, the numbers are random.

Positions (rotary, ALiBi), norms and residuals are left out: these folders test how weights are read.
"""

import torch
from torch import nn

from . import loops
from .book import BOOK_NAMES, IN_OUT, SingleHead
from .facts import grid, randomise
from .record import Layer, layer_of

EMBED_DIM = 12
SEED = 2024
DRAWN = (f"Every parameter, biases too, is uniform in (-0.5, 0.5), from a torch.Generator with seed {SEED}.",)
BARE = ("Positions, norms and residuals of the model are left out.",)


class Conv1D(nn.Module):
    """A linear layer that stores its weight as (in, out), as GPT-2 does."""

    def __init__(self, size_in, size_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_in, size_out))
        self.bias = nn.Parameter(torch.empty(size_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Inner(nn.Module):
    """BERT's inner module: the three projections."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))


class Outer(nn.Module):
    """BERT's output module, without its dropout, norm and residual."""

    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, width)


def attend(q, k, v, hidden):
    """q (B, H, T, D), k and v (B, H_kv, T, D), hidden up to (B, H, T, T): context (B, T, H * D) and weights."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return (weights @ v).transpose(1, 2).flatten(-2), weights


def future(x):
    return torch.ones(x.shape[1], x.shape[1]).triu(1).bool()


class Packed(nn.Module):
    """One projection for queries, keys and values, under the names of some model, causal."""

    def __init__(self, packed, out, num_heads, num_kv_heads, by_group, linear, out_bias):
        super().__init__()
        self.names, self.by_group = (packed, out), by_group
        self.heads = (num_heads, num_kv_heads)
        self.width = EMBED_DIM // num_heads
        setattr(self, packed, linear(EMBED_DIM, (num_heads + 2 * num_kv_heads) * self.width))
        setattr(self, out, linear(EMBED_DIM, EMBED_DIM) if out_bias else nn.Linear(EMBED_DIM, EMBED_DIM, bias=False))

    def forward(self, x):
        packed, out = (getattr(self, name) for name in self.names)
        rows = packed(x).unflatten(-1, (-1, self.width))  # (B, T, H + 2 H_kv, D)
        heads, kv = self.heads
        if self.by_group:
            groups = rows.unflatten(2, (kv, -1))  # (B, T, H_kv, queries + key + value, D)
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        else:
            q, k, v = rows.split((heads, kv, kv), dim=2)
        context, weights = attend(*(t.transpose(1, 2) for t in (q, k, v)), future(x))
        return out(context), weights


class BertSelf(nn.Module):
    """BERT's names: self.query, self.key, self.value, output.dense. Padding is hidden, nothing else."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.self = Inner(width)
        self.output = Outer(width)

    def forward(self, x, key_padding_mask):
        parts = (self.self.query, self.self.key, self.self.value)
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        hidden = torch.zeros(1).bool() if key_padding_mask is None else key_padding_mask[:, None, None]
        context, weights = attend(q, k, v, hidden)
        return self.output.dense(context), weights


def cases(width=EMBED_DIM):
    return {
        "main": {"x": grid(f"packed, main of width {width}", 2, 6, width)},
        "other": {"x": grid(f"packed, other of width {width}", 1, 3, width)},
        "one_token": {"x": grid(f"packed, one token of width {width}", 1, 1, width)},
    }


def packed_layer(
    name, summary, source, names, layout, heads, conventions, by_group=False, linear=nn.Linear, out_bias=True
):
    """A causal layer whose queries, keys and values share a weight; `heads`: query heads, key/value heads."""

    def run(state, inputs):
        projections = [loops.linear(state, part) for part in names]
        if linear is Conv1D:
            projections = [(loops.transpose(weight), bias) for weight, bias in projections]
        read = loops.packed_by_group if by_group else loops.packed_by_part
        x = inputs["x"]
        return loops.multi_head(read(projections[0], *heads), projections[1], x, x, x, loops.causal)

    facts = layer_of(layout, EMBED_DIM, heads[0], EMBED_DIM // heads[0], num_kv_heads=heads[1])
    return Layer(
        name=name,
        summary=summary,
        source=source,
        conventions=conventions + BARE + DRAWN,
        class_name=source,
        args={"embed_dim": EMBED_DIM, "num_heads": heads[0], "num_kv_heads": heads[1]},
        make=lambda: randomise(Packed(*names, *heads, by_group, linear, out_bias), SEED),
        layer=facts | {"qkv_bias": True, "out_proj": True, "out_bias": out_bias, "causal": True},
        loops=run,
        cases=cases(),
    )


def bert():
    hidden = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]).bool()
    inputs = {case: tensors | {"key_padding_mask": None} for case, tensors in cases().items()}
    inputs["padding"] = inputs["main"] | {"key_padding_mask": hidden}

    def run(state, x):
        heads, out = loops.separate(state, ("self.query", "self.key", "self.value", "output.dense"), 3)
        return loops.multi_head(heads, out, x["x"], x["x"], x["x"], loops.by_masks(None, x["key_padding_mask"]))

    return Layer(
        name="bert_self",
        summary="BERT's names: an inner module of three projections, an outer one with the fourth",
        source="The attention of BERT and similar models",
        conventions=("No causal mask; in key_padding_mask 1 means masked.", "The output includes output.dense.")
        + BARE
        + DRAWN,
        class_name="BertAttention",
        args={"embed_dim": EMBED_DIM, "num_heads": 3},
        make=lambda: randomise(BertSelf(EMBED_DIM, 3), SEED),
        layer=layer_of("bert", EMBED_DIM, 3, EMBED_DIM // 3, qkv_bias=True, out_proj=True, out_bias=True),
        loops=run,
        cases=inputs,
    )


def raw_square():
    def run(state, inputs):
        x = inputs["x"]
        return loops.multi_head([loops.one_head(state, BOOK_NAMES, raw=True)], None, x, x, x)

    return Layer(
        name="raw_square",
        summary="Square raw matrices, whose shape does not distinguish (in, out) from (out, in)",
        source="Made for this project",
        conventions=IN_OUT
        + (
            "Detection refuses this file and names both readings, for a square matrix fits either; the right one is (in, out).",
            "No mask and no output projection; attn_weights are (B, T, T).",
        )
        + DRAWN,
        class_name="SelfAttention_v1",
        args={"d_in": 4, "d_out": 4},
        make=lambda: randomise(SingleHead(BOOK_NAMES, 4, 4, raw=True), SEED),
        layer=layer_of("raw:book", 4, 1, 4),
        loops=run,
        cases=cases(4),
    )


def systems():
    return [
        packed_layer(
            "gpt2_conv1d",
            "GPT-2's c_attn and c_proj, stored as (in, out)",
            "The attention of GPT-2",
            ("c_attn", "c_proj"),
            "conv1d",
            (3, 3),
            ("Weights are (in, out), applied as x @ W + b; the columns of c_attn are queries, keys, values.",),
            linear=Conv1D,
        ),
        packed_layer(
            "packed_by_part",
            "Phi-3's qkv_proj, rows by part, grouped-query",
            "The attention of Phi-3",
            ("qkv_proj", "o_proj"),
            "packed:qkv_proj",
            (4, 2),
            (
                "Rows of qkv_proj: all queries, then all keys, then all values.",
                "Phi-3 has no biases; here qkv_proj has one, so that a split of it is tested.",
            ),
            out_bias=False,
        ),
        packed_layer(
            "packed_wqkv",
            "MPT's Wqkv, rows by part",
            "The attention of MPT",
            ("Wqkv", "out_proj"),
            "packed:Wqkv",
            (3, 3),
            ("Rows of Wqkv: all queries, then all keys, then all values.",),
        ),
        packed_layer(
            "packed_by_head",
            "GPT-NeoX's query_key_value, rows by head",
            "The attention of GPT-NeoX and Bloom",
            ("query_key_value", "dense"),
            "packed:query_key_value:by-head",
            (3, 3),
            ("Rows of query_key_value are (H, 3, D): each head's query, key and value.",),
            by_group=True,
        ),
        packed_layer(
            "packed_by_group",
            "Falcon's query_key_value, rows by key/value group",
            "The attention of Falcon",
            ("query_key_value", "dense"),
            "packed:query_key_value:by-head",
            (4, 2),
            ("Rows of query_key_value are (H_kv, H / H_kv + 2, D): a group's queries, its key, its value.",),
            by_group=True,
        ),
        bert(),
        raw_square(),
    ]
