"""Dive into Deep Learning: scoring functions and multi-head attention with valid lengths."""

import torch
from torch import nn

from . import loops
from .facts import D2L, grid
from .record import F32_TOLERANCE, Layer, Piece, compare_loops, gap, layer_of

FILL = -1e6
HIDING = (
    "Keys at and past the valid length get the score -1e6 after scaling, not -inf: with a length of 0, the result is therefore the mean over all keys.",
    "A length past the last key masks nothing.",
    "f16 cannot represent -1e6; the f16 results use the lowest finite f16, -65504, with the same weights.",
)
# No lengths, one for each sequence, one for each query, then the edges: zero, and longer than the six keys.
LENGTHS = {
    "none": None,
    "one_d": [3, 2, 6],
    "two_d": [[1, 2, 3, 4], [6, 5, 1, 2], [2, 2, 6, 3]],
    "zero_one_d": [0, 3, 1],
    "zero_two_d": [[0, 2, 3, 0], [6, 0, 1, 2], [2, 2, 6, 3]],
    "too_long": [6, 9, 100],
}


def masked_softmax(scores, valid_lens):
    """scores (N, T_q, T_kv); valid_lens None, (N,) or (N, T_q)."""
    if valid_lens is not None:
        lens = valid_lens.reshape(len(scores), -1, 1)
        hidden = torch.arange(scores.shape[-1]) >= lens
        scores = scores.masked_fill(hidden, max(FILL, torch.finfo(scores.dtype).min))
    return torch.softmax(scores, dim=-1)


def to_heads(x, num_heads):
    """(B, T, H * D) to (B * H, T, D), heads running fastest."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2).flatten(0, 1)


def from_heads(x, num_heads):
    """The way back from `to_heads`."""
    return x.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(-2)


class DotProductAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens):
        scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
        weights = self.dropout(masked_softmax(scores, valid_lens))
        return weights @ values, weights


class AdditiveAttention(nn.Module):
    def __init__(self, key_size, query_size, num_hiddens, dropout):
        super().__init__()
        self.W_k = nn.Linear(key_size, num_hiddens, bias=False)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens):
        sums = self.W_q(queries)[:, :, None] + self.W_k(keys)[:, None]
        weights = self.dropout(masked_softmax(self.w_v(torch.tanh(sums))[..., 0], valid_lens))
        return weights @ values, weights


class MultiHeadAttention(nn.Module):
    def __init__(self, key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(query_size, num_hiddens, bias=bias)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=bias)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.attention = DotProductAttention(dropout)

    def forward(self, queries, keys, values, valid_lens):
        parts = ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        q, k, v = (to_heads(project(x), self.num_heads) for project, x in parts)
        lens = None if valid_lens is None else valid_lens.repeat_interleave(self.num_heads, dim=0)
        context, weights = self.attention(q, k, v, lens)
        return self.W_o(from_heads(context, self.num_heads)), weights


def lengths(case):
    return None if LENGTHS[case] is None else torch.tensor(LENGTHS[case])


def sized_cases(query_size):
    """Three sequences, four queries, six keys of width 6, values of width 7, under every kind of length."""
    inputs = {
        "queries": grid(f"d2l, queries of width {query_size}", 3, 4, query_size),
        "keys": grid("d2l, keys", 3, 6, 6),
        "values": grid("d2l, values", 3, 6, 7),
    }
    return {case: inputs | {"valid_lens": lengths(case)} for case in LENGTHS}


def multi_head(name, summary, args, case_inputs, conventions):
    heads, width, bias = args["num_heads"], args["num_hiddens"], args["bias"]

    def run(state, x):
        names = ("W_q", "W_k", "W_v", "W_o")
        hidden = loops.past_lengths(x["valid_lens"])
        return loops.multi_head(
            *loops.separate(state, names, heads), x["queries"], x["keys"], x["values"], hidden, FILL
        )

    return Layer(
        name=name,
        summary=summary,
        source=D2L,
        conventions=conventions,
        class_name="MultiHeadAttention",
        args=args,
        seed=0,
        make=lambda: MultiHeadAttention(**args),
        layer=layer_of(
            "d2l",
            args["query_size"],
            heads,
            width // heads,
            kdim=args["key_size"],
            vdim=args["value_size"],
            qkv_bias=bias,
            out_proj=True,
            out_bias=bias,
            dropout=args["dropout"],
        ),
        extra_config={"fill": FILL},
        loops=run,
        cases=case_inputs,
    )


def additive():
    args = {"key_size": 6, "query_size": 5, "num_hiddens": 8, "dropout": 0.1}
    return Layer(
        name="d2l_additive",
        summary="Additive (Bahdanau) attention",
        source=D2L,
        conventions=(
            "The score of a query and a key is w_v · tanh(W_q q + W_k k), without a scale.",
            "There is no value projection: outputs are as wide as the values.",
        )
        + HIDING,
        class_name="AdditiveAttention",
        args=args,
        seed=0,
        make=lambda: AdditiveAttention(**args),
        layer=layer_of("additive", 5, 1, 8, out_dim=7, kdim=6, vdim=7, dropout=0.1),
        extra_config={"fill": FILL},
        loops=lambda state, x: loops.additive(
            state, x["queries"], x["keys"], x["values"], loops.past_lengths(x["valid_lens"])
        ),
        cases=sized_cases(5),
    )


def dot_product():
    equal_keys = {
        "queries": grid("d2l, queries before equal keys", 2, 1, 2),
        "keys": torch.ones(2, 10, 2),
        "values": torch.arange(40, dtype=torch.float32).reshape(1, 10, 4).repeat(2, 1, 1),
        "valid_lens": torch.tensor([2, 6]),
    }

    def run(_state, x):
        hidden, outputs, weights = loops.past_lengths(x["valid_lens"]), [], []
        for b, (q, k, v) in enumerate(zip(x["queries"], x["keys"], x["values"])):
            weights.append(loops.weigh(loops.dot_product_scores(q, k), lambda i, j: hidden(b, i, j), FILL))
            outputs.append(loops.context(weights[-1], v))
        return outputs, weights

    return Layer(
        name="d2l_dot_product",
        summary="Scaled dot-product attention with valid lengths",
        source=D2L,
        conventions=("Scores are divided by sqrt(D).",)
        + HIDING
        + (
            "equal_keys: every visible key weighs the same, so the outputs are means of value rows: (2, 3, 4, 5) and (10, 11, 12, 13).",
        ),
        class_name="DotProductAttention",
        args={"dropout": 0.5},
        make=lambda: DotProductAttention(0.5),
        layer=None,
        extra_config={"fill": FILL},
        loops=run,
        cases=sized_cases(6) | {"equal_keys": equal_keys},
    )


def compute_masked_softmax():
    scores = grid("d2l, scores", 3, 4, 6)
    tensors = {"scores": scores}
    for case, lens in LENGTHS.items():
        exact = masked_softmax(scores.double(), lengths(case))
        hidden = loops.past_lengths(lens)
        by_loops = [
            loops.weigh(rows, lambda i, j: hidden(b, i, j), FILL) for b, rows in enumerate(scores.double().tolist())
        ]
        compare_loops(f"d2l_masked_softmax.{case}", exact, by_loops)
        if lens is not None:
            tensors[f"{case}.valid_lens"] = lengths(case)
        tensors |= {f"{case}.output": masked_softmax(scores, lengths(case)), f"{case}.expected_f64": exact}
        gap(f"d2l_masked_softmax.{case}", tensors[f"{case}.output"].double(), exact, F32_TOLERANCE)
    return tensors


def compute_transpose():
    x = grid("d2l, transpose", 2, 4, 6)
    heads = to_heads(x, 3)
    if not from_heads(heads, 3).equal(x):
        raise SystemExit("d2l_transpose_qkv: the way back does not give the input")
    by_loops = [[row[2 * h : 2 * h + 2] for row in rows] for rows in x.double().tolist() for h in range(3)]
    compare_loops("d2l_transpose_qkv", heads.double(), by_loops)
    return {"main.x": x, "main.output": heads}


def systems():
    ones = {"queries": torch.ones(2, 4, 100), "keys": torch.ones(2, 6, 100), "values": torch.ones(2, 6, 100)}
    random = {name: grid(f"d2l 100, {name}", *x.shape) for name, x in ones.items()}
    lens = {"valid_lens": torch.tensor([3, 2])}
    wide = {
        "key_size": 100,
        "query_size": 100,
        "value_size": 100,
        "num_hiddens": 100,
        "num_heads": 5,
        "dropout": 0.5,
        "bias": False,
    }
    sizes = {
        "key_size": 6,
        "query_size": 5,
        "value_size": 7,
        "num_hiddens": 8,
        "num_heads": 2,
        "dropout": 0.1,
        "bias": False,
    }
    order = "attn_weights are (B * H, T_q, T_kv), heads running fastest."
    return [
        multi_head(
            "d2l_mha_100",
            "Five heads over width 100",
            wide,
            {"main": ones | lens, "other": random | lens},
            HIDING + (order, "The tutorial prints only the shape (2, 4, 100); the seed 0 is this project's choice."),
        ),
        multi_head(
            "d2l_mha_sizes",
            "Two heads; queries, keys and values of different widths",
            sizes,
            sized_cases(5),
            HIDING + (order,),
        ),
        multi_head(
            "d2l_mha_sizes_bias", "The same with biases", sizes | {"bias": True}, sized_cases(5), HIDING + (order,)
        ),
        additive(),
        dot_product(),
        Piece(
            name="d2l_masked_softmax",
            summary="Softmax over the first valid_len scores",
            source=D2L,
            conventions=HIDING[:2]
            + ("All cases share the tensor `scores`; the tutorial's own function overwrites it in place.",),
            compute=compute_masked_softmax,
            inputs=("valid_lens",),
            extra_config={"fill": FILL},
        ),
        Piece(
            name="d2l_transpose_qkv",
            summary="Splitting a projection into heads, and back",
            source=D2L,
            conventions=("(B, T, H * D) becomes (B * H, T, D), heads running fastest.",),
            compute=compute_transpose,
            inputs=("x",),
            extra_config={"num_heads": 3},
        ),
    ]
