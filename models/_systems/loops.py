"""Attention in plain Python loops over f64 numbers: the independent check of `expected_f64`. No tensor operations.

A projection is a pair (rows, bias): rows as (out, in) lists, bias a list or None. Every weight layout is read
into one `Head` for each query head, by counting rows, so that the loops know one layout only.
"""

import math
from operator import mul
from typing import NamedTuple


class Head(NamedTuple):
    """The three projections of one query head, and the extra (key, value) rows of the layer."""

    query: tuple
    key: tuple
    value: tuple
    extra: tuple = ()


def dot(a, b):
    if len(a) != len(b):
        raise ValueError(f"a row of {len(a)} numbers against one of {len(b)}")
    return sum(map(mul, a, b))


def transpose(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def project(rows, projection):
    """rows (T, in) to (T, out)."""
    weight, bias = projection
    bias = bias or [0.0] * len(weight)
    return [[dot(row, w) + b for w, b in zip(weight, bias, strict=True)] for row in rows]


def softmax(scores):
    top = max(scores)
    exps = [math.exp(score - top) for score in scores]
    total = sum(exps)
    return [e / total for e in exps]


def weigh(scores, hidden, fill=-math.inf):
    """Softmax over each row of scores, where `hidden(i, j)` puts `fill` in a score's place."""
    return [softmax([fill if hidden(i, j) else s for j, s in enumerate(row)]) for i, row in enumerate(scores)]


def dot_product_scores(queries, keys, scale=None):
    scale = 1 / math.sqrt(len(queries[0])) if scale is None else scale
    return [[scale * dot(query, key) for key in keys] for query in queries]


def context(weights, values):
    columns = transpose(values)
    return [[dot(row, column) for column in columns] for row in weights]


def nothing_hidden(b, i, j):
    return False


def causal(b, i, j):
    return j > i


def past_lengths(valid_lens):
    """Hides keys at and past the length: one length for each sequence, or one for each query, or None."""
    if valid_lens is None:
        return nothing_hidden
    return lambda b, i, j: j >= (valid_lens[b][i] if isinstance(valid_lens[b], list) else valid_lens[b])


def by_masks(attn_mask, key_padding_mask):
    """Hides where either mask is set; a key past a mask's end (an extra row) is seen."""

    def hidden(b, i, j):
        by_pair = attn_mask is not None and j < len(attn_mask[i]) and attn_mask[i][j]
        by_key = key_padding_mask is not None and j < len(key_padding_mask[b]) and key_padding_mask[b][j]
        return bool(by_pair or by_key)

    return hidden


def multi_head(heads, out, queries, keys, values, hidden=nothing_hidden, fill=-math.inf, keep=None, drop=0.0):
    """Output (B, T_q, out_dim) and weights (B, H, T_q, T_kv). `keep` (B, H, T_q, T_kv) is a dropout mask."""
    outputs, all_weights = [], []
    for b, (xq, xk, xv) in enumerate(zip(queries, keys, values, strict=True)):
        contexts, weights = [], []
        for h, head in enumerate(heads):
            q, k, v = project(xq, head.query), project(xk, head.key), project(xv, head.value)
            for key, value in head.extra:
                k, v = [*k, key], [*v, value]
            w = weigh(dot_product_scores(q, k), lambda i, j: hidden(b, i, j), fill)
            if keep:
                w = [
                    [x * m / (1 - drop) for x, m in zip(*rows, strict=True)] for rows in zip(w, keep[b][h], strict=True)
                ]
            contexts.append(context(w, v))
            weights.append(w)
        merged = [[number for part in parts for number in part] for parts in zip(*contexts, strict=True)]
        outputs.append(project(merged, out) if out else merged)
        all_weights.append(weights)
    return outputs, all_weights


def additive(state, queries, keys, values, hidden):
    """Bahdanau scores w_v · tanh(W_q q + W_k k), unscaled, with masked scores at -1e6."""
    outputs, all_weights = [], []
    for b, (xq, xk, xv) in enumerate(zip(queries, keys, values, strict=True)):
        q, k = project(xq, (state["W_q.weight"], None)), project(xk, (state["W_k.weight"], None))
        scores = [
            [dot(state["w_v.weight"][0], [math.tanh(s + t) for s, t in zip(a, c, strict=True)]) for c in k] for a in q
        ]
        weights = weigh(scores, lambda i, j: hidden(b, i, j), -1e6)
        outputs.append(context(weights, xv))
        all_weights.append(weights)
    return outputs, all_weights


def linear(state, name):
    """The projection called `name`, or None where the state dict has none."""
    weight = state.get(f"{name}.weight")
    return None if weight is None else (weight, state.get(f"{name}.bias"))


def rows_of(projection, start, count):
    weight, bias = projection
    return weight[start : start + count], bias and bias[start : start + count]


def separate(state, names, num_heads, num_kv_heads=None):
    """Heads of a layer that stores queries, keys and values apart; the fourth name is the output projection."""
    parts = [linear(state, name) for name in names[:3]]
    width = len(parts[0][0]) // num_heads
    group = num_heads // (num_kv_heads or num_heads)
    starts = [(h * width, h // group * width, h // group * width) for h in range(num_heads)]
    heads = [Head(*(rows_of(part, start, width) for part, start in zip(parts, row, strict=True))) for row in starts]
    return heads, linear(state, names[3]) if len(names) > 3 else None


def one_head(state, names, raw=False):
    """A single head under `names`; `raw` names are (in, out) matrices themselves."""
    if raw:
        return Head(*((transpose(state[name]), None) for name in names[:3]))
    return Head(*(linear(state, name) for name in names[:3]))


def packed_by_part(projection, num_heads, num_kv_heads=None):
    """Heads of one packed projection: all queries, then all keys, then all values."""
    kv = num_kv_heads or num_heads
    width = len(projection[0]) // (num_heads + 2 * kv)
    group = num_heads // kv
    places = [(h, num_heads + h // group, num_heads + kv + h // group) for h in range(num_heads)]
    return [Head(*(rows_of(projection, place * width, width) for place in row)) for row in places]


def packed_by_group(projection, num_heads, num_kv_heads=None):
    """Heads of one packed projection: for each key head its queries, then its key, then its value."""
    kv = num_kv_heads or num_heads
    group = num_heads // kv
    width = len(projection[0]) // (num_heads + 2 * kv)
    first = [h // group * (group + 2) for h in range(num_heads)]
    places = [(f + h % group, f + group, f + group + 1) for h, f in enumerate(first)]
    return [Head(*(rows_of(projection, place * width, width) for place in row)) for row in places]
