"""Worked examples without parameters: single steps of attention, as the tutorials show them."""

import torch

from . import loops
from .facts import BOOK, FRONT_END, HAND, SHORT, SNIPPET, grid
from .record import F32_TOLERANCE, Piece, compare_loops, gap

# Two heads of three tokens and four features: numbers that the tutorial prints, taken up again as an input.
TWO_HEADS = [
    [
        [[0.1855, 0.8812, 1.3211, 0.8098], [0.3116, 0.9549, 1.6063, 1.1493], [0.3395, 0.9652, 1.6530, 1.2084]],
        [[0.3129, 0.8747, 1.5012, 1.0955], [0.2865, 0.7897, 1.4100, 1.0398], [0.2990, 0.8040, 1.4025, 1.0361]],
    ]
]


def dropout_keep(shape, p):
    """The mask of nn.Dropout(p) in train mode, drawn alike on every CPU: an f64 uniform below 1 - p keeps an element."""
    return torch.rand(shape, dtype=torch.float64) < 1 - p


def shiny_sun():
    x = torch.tensor([[0.34, 0.22, 0.54], [0.53, 0.34, 0.98], [0.29, 0.54, 0.93]])  # Hello, shiny, sun

    def attend(x):
        scores = x @ x.T
        weights = torch.softmax(scores, dim=-1)
        return scores, weights, weights @ x

    scores, weights, context = attend(x)
    scores64, weights64, context64 = attend(x.double())
    rows = x.double().tolist()
    by_loops = loops.weigh(loops.dot_product_scores(rows, rows, 1.0), lambda i, j: False)
    compare_loops("shiny_sun weights", weights64, by_loops)
    compare_loops("shiny_sun context", context64, loops.context(by_loops, rows))
    gap("shiny_sun f32", context.double(), context64, F32_TOLERANCE)
    return {
        "main.x": x,
        "main.scores": scores[1],
        "main.scores_f64": scores64[1],
        "main.attn_weights": weights[1],
        "main.attn_weights_f64": weights64[1],
        "main.weighted": (weights[1][:, None] * x).T,
        "main.output": context[1],
        "main.expected_f64": context64[1],
        "all_queries.x": x,
        "all_queries.output": context,
        "all_queries.expected_f64": context64,
    }


def qkv_2x2():
    q, k = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 3.0], [4.0, 5.0]])
    v = torch.tensor([[0.1, 0.2], [0.3, 0.4]])

    def attend(q, k, v):
        scores = q @ k.T
        scaled = scores / 2**0.5
        weights = torch.softmax(scaled, dim=-1)
        return {"scores": scores, "scaled": scaled, "attn_weights": weights, "output": weights @ v}

    single, exact = attend(q, k, v), attend(q.double(), k.double(), v.double())
    by_loops = loops.weigh(loops.dot_product_scores(q.tolist(), k.tolist()), lambda i, j: False)
    compare_loops("qkv_2x2 weights", exact["attn_weights"], by_loops)
    compare_loops("qkv_2x2 output", exact["output"], loops.context(by_loops, v.double().tolist()))
    gap("qkv_2x2 f32", single["output"].double(), exact["output"], F32_TOLERANCE)
    tensors = {"q": q, "k": k, "v": v} | single
    tensors |= {"expected_f64" if name == "output" else f"{name}_f64": t for name, t in exact.items()}
    return {f"main.{name}": t for name, t in tensors.items()}


def batched_matmul():
    a = torch.tensor(TWO_HEADS)
    product, exact = a @ a.transpose(2, 3), a.double() @ a.double().transpose(2, 3)
    by_loops = [[loops.dot_product_scores(head, head, 1.0) for head in heads] for heads in a.double().tolist()]
    compare_loops("batched_matmul", exact, by_loops)
    gap("batched_matmul f32", product.double(), exact, F32_TOLERANCE)
    return {"main.a": a, "main.output": product, "main.expected_f64": exact}


def additive_mask():
    scores = grid("additive mask, scores", 1, 5, 5)
    ones = torch.triu(torch.ones(5, 5), diagonal=1)
    as_written = ones * float("-inf")
    meant = torch.zeros(5, 5).masked_fill(ones.bool(), float("-inf"))
    output, exact = torch.softmax(scores + meant, dim=-1), torch.softmax((scores + meant).double(), dim=-1)
    by_loops = [loops.weigh(rows, lambda i, j: j > i) for rows in scores.double().tolist()]
    compare_loops("additive_mask", exact, by_loops)
    gap("additive_mask f32", output.double(), exact, F32_TOLERANCE)
    return {
        "main.scores": scores,
        "main.mask_as_written": as_written,
        "main.mask_meant": meant,
        "main.attn_weights_as_written": torch.softmax(scores + as_written, dim=-1),
        "main.output": output,
        "main.expected_f64": exact,
    }


DROPOUT_CASES = {"ones": {"p": 0.5, "manual_seed": 123}, "tenth": {"p": 0.1, "manual_seed": 7}}


def dropout():
    tensors = {}
    for (case, facts), shape in zip(DROPOUT_CASES.items(), [(6, 6), (2, 4, 6, 6)]):
        x = torch.ones(shape)
        torch.manual_seed(facts["manual_seed"])
        keep = dropout_keep(shape, facts["p"])
        output = x * (keep.float() / (1 - facts["p"]))
        torch.manual_seed(facts["manual_seed"])
        if not torch.nn.functional.dropout(x, facts["p"], training=True).equal(output):
            print(f"note: dropout.{case}: this machine's own nn.Dropout draws another mask; the portable one is stored")
        tensors |= {f"{case}.x": x, f"{case}.keep": keep, f"{case}.output": output}
    return tensors


def systems():
    return [
        Piece(
            name="shiny_sun",
            summary='Attention without weights for "shiny" in "Hello shiny sun"',
            source=HAND,
            conventions=(
                "Queries, keys and values are the embeddings themselves; scores are unscaled dot products.",
                "`main` is the query in row 1; `main.weighted` is (feature, token), each token's share of each feature.",
                "The tutorial has two wrong products (0.2156 for 0.2153, 0.1972 for 0.1969); "
                "its context is 0.3992, 0.3858, 0.8610, the true one 0.3990, 0.3854, 0.8610.",
            ),
            compute=shiny_sun,
            inputs=("x",),
            extra_config={"query_row": 1, "scale": 1.0},
        ),
        Piece(
            name="qkv_2x2",
            summary="softmax(Q Kᵀ / √2) V on 2 × 2 matrices",
            source=FRONT_END,
            conventions=("Every step is stored: scores, scaled scores, weights, output.",),
            compute=qkv_2x2,
            inputs=("q", "k", "v"),
            extra_config={"scale": "1/sqrt(2)"},
        ),
        Piece(
            name="batched_matmul",
            summary="One batched product equals the heads one by one",
            source=SHORT,
            conventions=("output = a @ a.transpose(2, 3) over (1, 2, 3, 4).",),
            compute=batched_matmul,
            inputs=("a",),
        ),
        Piece(
            name="additive_mask",
            summary="The causal mask as a triangle added to the scores",
            source=SNIPPET,
            conventions=(
                "triu(ones) * -inf is NaN wherever the triangle is 0, and so is every weight after it: build the mask by selection.",
                "The softmax is over the masked scores without a scale.",
            ),
            compute=additive_mask,
            inputs=("scores",),
        ),
        Piece(
            name="dropout",
            summary="Dropout on attention weights, with the mask that was drawn",
            source=BOOK,
            conventions=(
                "Train mode; what is kept is divided by 1 - p.",
                "An element stays if (u64 & (2^53 - 1)) * 2^-53 < 1 - p, one u64 of the seeded generator for each.",
            ),
            compute=dropout,
            inputs=("x",),
            cases=DROPOUT_CASES,
        ),
    ]
