"""The book's layers, and the same ones under the short names."""

import io

import torch
from torch import nn

from . import loops
from .facts import BOOK, JOURNEY, SHORT, grid, journey
from .record import Layer, layer_of

BOOK_NAMES = ("W_query", "W_key", "W_value", "out_proj")
SHORT_NAMES = ("Wq", "Wk", "Wv", "Wo")
D_IN, TOKENS = len(JOURNEY[0]), len(JOURNEY)

CAUSAL = (
    "Masked scores are set to -inf before the division by sqrt(head_dim); query i attends to keys 0..=i.",
    "`mask` is a persistent f32 buffer in the state dict, 1 above the diagonal; a loader ignores it.",
)
PLAIN_HEAD = ("No output projection.",)
STACK = (
    "Each head is a separate layer below `heads.{i}`; the outputs are concatenated, with no projection after them.",
)
IN_OUT = ("The parameters are plain (in, out) matrices, applied as x @ W; nn.Linear stores (out, in).",)
RAND = ("They are drawn by torch.rand: uniform in [0, 1).",)


def upper_triangle(size):
    return torch.triu(torch.ones(size, size), diagonal=1)


class SingleHead(nn.Module):
    """One head without an output projection. `raw` keeps (in, out) matrices in place of nn.Linear."""

    def __init__(self, names, d_in, d_out, context_length=None, dropout=0.0, qkv_bias=False, raw=False):
        super().__init__()
        self.names, self.raw = names[:3], raw
        for name in self.names:
            setattr(self, name, nn.Parameter(torch.rand(d_in, d_out)) if raw else nn.Linear(d_in, d_out, bias=qkv_bias))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", None if context_length is None else upper_triangle(context_length))

    def forward(self, x):
        parts = [getattr(self, name) for name in self.names]
        q, k, v = (x @ part if self.raw else part(x) for part in parts)
        scores = q @ k.transpose(-2, -1)
        if self.mask is not None:
            t = x.shape[-2]
            scores = scores.masked_fill(self.mask[:t, :t].bool(), float("-inf"))
        weights = self.dropout(torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1))
        return weights @ v, weights


class HeadStack(nn.Module):
    """Concatenated heads, (B, T, num_heads * d_out), and their weights as (B, H, T, T)."""

    def __init__(self, num_heads, *args, **kwargs):
        super().__init__()
        self.heads = nn.ModuleList(SingleHead(*args, **kwargs) for _ in range(num_heads))

    def forward(self, x):
        outputs, weights = zip(*(head(x) for head in self.heads))
        return torch.cat(outputs, dim=-1), torch.stack(weights, dim=1)


class SplitHeads(nn.Module):
    """One projection each for queries, keys and values, split into heads, merged by a biased output projection."""

    def __init__(self, names, d_in, d_out, num_heads, context_length=None, dropout=0.0, qkv_bias=False):
        super().__init__()
        self.names, self.num_heads = names, num_heads
        for name in names[:3]:
            setattr(self, name, nn.Linear(d_in, d_out, bias=qkv_bias))
        setattr(self, names[3], nn.Linear(d_out, d_out))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", None if context_length is None else upper_triangle(context_length))

    def forward(self, x):
        t = x.shape[1]
        q, k, v = (
            getattr(self, name)(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for name in self.names[:3]
        )
        scores = q @ k.transpose(-2, -1)
        if self.mask is not None:
            scores = scores.masked_fill(self.mask[:t, :t].bool(), float("-inf"))
        weights = self.dropout(torch.softmax(scores / q.shape[-1] ** 0.5, dim=-1))
        context = (weights @ v).transpose(1, 2).flatten(-2)
        return getattr(self, self.names[3])(context), weights


def cases():
    return {
        "main": {"x": journey(2)},
        "short": {"x": journey(2)[:, :4]},
        "other": {"x": grid("book, other", 3, 5, D_IN)},
        "one_token": {"x": grid("book, one token", 1, 1, D_IN)},
    }


def self_attention(split, hidden=loops.causal):
    """The plain-loop twin of a self-attention: `split(state)` returns (heads, output projection)."""

    def run(state, inputs):
        x = inputs["x"] if isinstance(inputs["x"][0][0], list) else [inputs["x"]]
        return loops.multi_head(*split(state), x, x, x, hidden)

    return run


def below(state, prefix):
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def single(name, seed, summary, class_name, args, case_inputs, conventions, raw=False):
    """One head of the book, with a causal mask where `args` has a context length."""
    context_length = args.get("context_length")
    layout = "raw:book" if raw else "book"
    return Layer(
        name=name,
        summary=summary,
        source=BOOK,
        conventions=conventions,
        class_name=class_name,
        args=args,
        seed=seed,
        make=lambda: SingleHead(BOOK_NAMES, **args, raw=raw),
        layer=layer_of(
            layout, args["d_in"], 1, args["d_out"], causal=context_length is not None, context_length=context_length
        ),
        loops=self_attention(
            lambda state: ([loops.one_head(state, BOOK_NAMES, raw)], None),
            loops.nothing_hidden if context_length is None else loops.causal,
        ),
        cases=case_inputs,
    )


def stack(name, summary, source, names, d_out, conventions, qkv_bias=False, raw=False):
    """Two concatenated heads; the argument names follow the tutorial."""
    book = names is BOOK_NAMES
    sizes = (D_IN, d_out, TOKENS, 0.0, 2)
    keys = (
        ("d_in", "d_out", "context_length", "dropout", "num_heads")
        if book
        else ("dim_in", "dim_out", "context_length", "dropout_rate", "num_heads")
    )
    layout = f"{'stacked-raw' if raw else 'stacked'}:{'book' if book else 'short'}"
    return Layer(
        name=name,
        summary=summary,
        source=source,
        conventions=conventions,
        class_name="MultiHeadAttentionWrapper" if book else "MultiHeadAttentionStack",
        args=dict(zip(keys, sizes)) | ({"qkv_bias": qkv_bias} if book else {}),
        seed=123,
        make=lambda: HeadStack(2, names, D_IN, d_out, TOKENS, 0.0, qkv_bias, raw),
        layer=layer_of(layout, D_IN, 2, d_out, qkv_bias=qkv_bias, causal=True, context_length=TOKENS),
        loops=self_attention(
            lambda state: ([loops.one_head(below(state, f"heads.{i}."), names, raw) for i in range(2)], None)
        ),
        cases=cases(),
    )


def split(name, summary, source, names, sizes, conventions, qkv_bias=False, case_inputs=None, causal=True, **extra):
    """A layer that splits one projection into heads; `sizes`: d_in, d_out, context_length, dropout, num_heads."""
    d_in, d_out, context_length, dropout, num_heads = sizes
    keys = (
        ("dim_in", "dim_out", "context_length", "dropout_rate", "num_heads")
        if names is SHORT_NAMES
        else ("d_in", "d_out", "context_length", "dropout", "num_heads")
    )
    seen = context_length if causal else None
    facts = layer_of("short" if names is SHORT_NAMES else "book", d_in, num_heads, d_out // num_heads)
    facts |= {
        "qkv_bias": qkv_bias,
        "out_proj": True,
        "out_bias": True,
        "causal": causal,
        "context_length": seen,
        "dropout": dropout,
    }
    return Layer(
        name=name,
        summary=summary,
        source=source,
        conventions=conventions,
        class_name="MultiHeadAttention",
        args=dict(zip(keys, sizes)) | ({"qkv_bias": qkv_bias} if causal else {}),
        seed=123,
        make=lambda: SplitHeads(names, d_in, d_out, num_heads, seen, dropout, qkv_bias),
        layer=facts,
        loops=self_attention(
            lambda state: loops.separate(state, names, num_heads), loops.causal if causal else loops.nothing_hidden
        ),
        cases=case_inputs or cases(),
        **extra,
    )


def pickled(module, _config):
    """The state dict as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return {"model.pth": buffer.getvalue()}


def systems():
    small = (D_IN, 2, TOKENS, 0.0, 2)
    wide = {"main": {"x": grid("book bias, main", 2, 7, 5)}, "short": {"x": grid("book bias, short", 1, 3, 5)}}
    unmasked = {"main": {"x": journey(2)}, "other": {"x": grid("book unmasked, other", 2, 6, D_IN)}}
    biased_out = "The output projection always has a bias."
    return [
        single(
            "book_self_attention_v1",
            123,
            "One head of three raw matrices, no mask",
            "SelfAttention_v1",
            {"d_in": D_IN, "d_out": 2},
            {"main": {"x": journey()}},
            ("2-D input (T, d_in); no mask; scores are divided by sqrt(d_out).",) + IN_OUT + RAND,
            raw=True,
        ),
        single(
            "book_self_attention_v2",
            789,
            "One head of three linear layers, no mask",
            "SelfAttention_v2",
            {"d_in": D_IN, "d_out": 2, "qkv_bias": False},
            {"main": {"x": journey()}, "other": {"x": grid("book v2, other", 4, D_IN)}},
            ("2-D input (T, d_in); no mask; scores are divided by sqrt(d_out).",),
        ),
        single(
            "book_causal",
            123,
            "One causal head",
            "CausalAttention",
            {"d_in": D_IN, "d_out": 2, "context_length": TOKENS, "dropout": 0.0, "qkv_bias": False},
            cases(),
            CAUSAL + PLAIN_HEAD + ("attn_weights are (B, T, T), without a head dimension.",),
        ),
        stack(
            "book_stack",
            "Two concatenated causal heads",
            BOOK,
            BOOK_NAMES,
            2,
            ("The results are the numbers that the tutorial prints.",) + CAUSAL + STACK,
        ),
        stack(
            "book_stack_bias",
            "Two concatenated causal heads, with biases",
            BOOK,
            BOOK_NAMES,
            2,
            CAUSAL + STACK,
            qkv_bias=True,
        ),
        stack(
            "book_stack_exercise32",
            "Two causal heads of width 1 (exercise 3.2)",
            BOOK,
            BOOK_NAMES,
            1,
            ("d_out belongs to one head: with two heads of width 1, outputs have width 2.",) + CAUSAL + STACK,
        ),
        split(
            "book_mha",
            "One projection split into two causal heads",
            BOOK,
            BOOK_NAMES,
            small,
            CAUSAL + (biased_out, "More tokens than context_length are an error."),
            extra_files=pickled,
        ),
        split(
            "book_mha_bias",
            "Three causal heads of width 4, with biases",
            BOOK,
            BOOK_NAMES,
            (5, 12, 7, 0.1, 3),
            CAUSAL + (biased_out, "Dropout 0.1 rests in eval mode."),
            qkv_bias=True,
            case_inputs=wide,
        ),
        split(
            "book_mha_unmasked",
            "The shorter class, no mask, with biases",
            BOOK,
            BOOK_NAMES,
            small,
            (
                "No mask, though the constructor takes a context_length; it limits nothing.",
                "The class as printed does not run (attributes that are never set); here it is mended: heads are split for each token.",
            ),
            qkv_bias=True,
            case_inputs=unmasked,
            causal=False,
        ),
        split(
            "short_mha",
            "One projection split into two causal heads, short names",
            SHORT,
            SHORT_NAMES,
            (D_IN, 4, TOKENS, 0.0, 2),
            ("The results are the numbers that the tutorial prints.",) + CAUSAL + (biased_out,),
        ),
        stack(
            "short_stack",
            "Two concatenated causal heads, short names",
            SHORT,
            SHORT_NAMES,
            2,
            ("The numbers of book_stack under other parameter names.",) + CAUSAL + STACK,
        ),
        stack(
            "short_stack_raw",
            "Two causal heads of raw matrices, short names",
            SHORT,
            SHORT_NAMES,
            2,
            (
                "The results are the numbers that the tutorial prints.",
                "The tutorial does not show this head's code: the names Wq, Wk, Wv and the mask buffer are inferred.",
            )
            + CAUSAL
            + STACK
            + IN_OUT
            + RAND,
            raw=True,
        ),
    ]
