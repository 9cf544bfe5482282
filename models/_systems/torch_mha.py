"""torch.nn.MultiheadAttention: packed, with kdim and vdim, and with extra key and value rows, learnt and of zeros."""

from functools import partial

import torch
from torch import nn

from . import loops
from .facts import grid, randomise
from .record import Layer, layer_of

EMBED_DIM, NUM_HEADS, TOKENS = 8, 2, 5
WIDTH = EMBED_DIM // NUM_HEADS
SOURCE = "torch.nn.MultiheadAttention"
CONVENTIONS = (
    "batch_first=True, which is not PyTorch's default.",
    "In both masks 1 means masked; masked scores are -inf.",
    "attn_weights are given for each head (average_attn_weights=False).",
)
DRAWS = "The output projection draws first, then the input projections (Xavier uniform); then the biases are set to 0."


def cases(kdim=EMBED_DIM, vdim=EMBED_DIM, names=("none", "causal", "padding", "both")):
    inputs = {
        "q": grid("torch, q", 2, TOKENS, EMBED_DIM),
        "k": grid(f"torch, k of width {kdim}", 2, TOKENS, kdim),
        "v": grid(f"torch, v of width {vdim}", 2, TOKENS, vdim),
    }
    causal = torch.ones(TOKENS, TOKENS).triu(1).bool()
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    masks = {"none": (None, None), "causal": (causal, None), "padding": (None, padding), "both": (causal, padding)}
    return {name: inputs | dict(zip(("attn_mask", "key_padding_mask"), masks[name])) for name in names}


def call(module, inputs):
    return module(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        attn_mask=inputs["attn_mask"],
        key_padding_mask=inputs["key_padding_mask"],
        need_weights=True,
        average_attn_weights=False,
    )


def run_loops(state, inputs, add_zero_attn=False):
    bias = state["in_proj_bias"]
    if "in_proj_weight" in state:
        heads = loops.packed_by_part((state["in_proj_weight"], bias), NUM_HEADS)
    else:
        parts = {f"{part}.weight": state[f"{part}_proj_weight"] for part in "qkv"}
        parts |= {f"{part}.bias": bias[i * EMBED_DIM : (i + 1) * EMBED_DIM] for i, part in enumerate("qkv")}
        heads, _ = loops.separate(parts, "qkv", NUM_HEADS)
    if "bias_k" in state:
        rows = [state[name][0][0] for name in ("bias_k", "bias_v")]
        heads = [
            head._replace(extra=(tuple(row[h * WIDTH : (h + 1) * WIDTH] for row in rows),))
            for h, head in enumerate(heads)
        ]
    if add_zero_attn:
        zeros = ([0.0] * WIDTH, [0.0] * WIDTH)
        heads = [head._replace(extra=(*head.extra, zeros)) for head in heads]
    hidden = loops.by_masks(inputs["attn_mask"], inputs["key_padding_mask"])
    return loops.multi_head(heads, loops.linear(state, "out_proj"), inputs["q"], inputs["k"], inputs["v"], hidden)


def multi_head(name, summary, args, conventions, case_inputs, **other):
    facts = layer_of("torch", EMBED_DIM, NUM_HEADS, WIDTH, qkv_bias=True, out_proj=True, out_bias=True)
    facts |= {"kdim": args.get("kdim", EMBED_DIM), "vdim": args.get("vdim", EMBED_DIM)}
    return Layer(
        name=name,
        summary=summary,
        source=SOURCE,
        conventions=CONVENTIONS + conventions,
        class_name=SOURCE,
        args=args,
        call=call,
        cases=case_inputs,
        **{"make": lambda: nn.MultiheadAttention(**args), "layer": facts, "loops": run_loops} | other,
    )


def draws(*inputs):
    """nn.MultiheadAttention draws in this order, whatever the order of its state dict."""
    order = [["linear", "out_proj", EMBED_DIM, EMBED_DIM, True]]
    order += [["xavier", name, rows, columns] for name, rows, columns in inputs]
    return order + [["zeros", "in_proj_bias", 3 * EMBED_DIM], ["zeros", "out_proj.bias", EMBED_DIM]]


def systems():
    args = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS, "bias": True, "batch_first": True}
    apart = args | {"kdim": 6, "vdim": 7}
    extra = args | {"add_bias_kv": True}
    zeros = extra | {"add_zero_attn": True}
    packed = multi_head(
        "torch_mha",
        "Two heads, one packed input projection",
        args,
        (DRAWS,),
        cases(),
        seed=123,
        draws=draws(("in_proj_weight", 3 * EMBED_DIM, EMBED_DIM)),
    )
    weights = (
        ("q_proj_weight", EMBED_DIM, EMBED_DIM),
        ("k_proj_weight", EMBED_DIM, 6),
        ("v_proj_weight", EMBED_DIM, 7),
    )
    with_kdim = multi_head(
        "torch_mha_kdim",
        "Keys and values of other widths than the queries",
        apart,
        (DRAWS, "The three weights are apart, their biases packed in in_proj_bias."),
        cases(6, 7),
        seed=123,
        draws=draws(*weights),
    )
    bias_kv = multi_head(
        "torch_mha_bias_kv",
        "One learnt key and value row after the projected ones",
        extra,
        (
            "bias_k and bias_v are one more key and value, in every sequence, after projection; no mask applies to it.",
            "Every parameter, biases too, is uniform in (-0.5, 0.5), from a torch.Generator with seed 2024.",
        ),
        cases(names=("none", "causal", "padding")),
        make=lambda: randomise(nn.MultiheadAttention(**extra), 2024),
        layer=packed.layer | {"bias_kv": True},
    )
    zero_attn = multi_head(
        "torch_mha_zero_attn",
        "A key and value of zeros after the learnt row",
        zeros,
        (
            "bias_k and bias_v are one more key and value, and a key and value of zeros follow; no mask applies to either.",
            "The state dict does not tell add_zero_attn.",
            "Every parameter, biases too, is uniform in (-0.5, 0.5), from a torch.Generator with seed 2024.",
        ),
        cases(names=("none", "causal", "padding")),
        make=lambda: randomise(nn.MultiheadAttention(**zeros), 2024),
        layer=packed.layer | {"bias_kv": True, "add_zero_attn": True},
        loops=partial(run_loops, add_zero_attn=True),
    )
    return [packed, with_kdim, bias_kv, zero_attn]
