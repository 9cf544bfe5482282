"""PyTorch's gradients of attention: writes pytorch.safetensors beside this script.

    python tests/attention/gradients/pytorch.py

Made with PyTorch 2.15. `in.*` are the inputs of all cases. A case is named by its options, joined by "+", and holds the
gradients of q, k, v and of what its options track, flat and one after the other: in f64 for an option alone, in f32 for a
pair. `bf16.T` holds the errors of PyTorch's own bf16 gradients against f64: (q, k, v) by (maximum, root mean square),
and in the last two columns those of the exact gradients rounded to bf16.
"""

import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

B, H, H_KV, T_Q, T_KV, D = 2, 4, 2, 3, 6, 4
MASKS = ["causal", "window", "local_window", "prefix", "lens", "bool_mask"]
TERMS = ["bias_heads", "bias_keys", "alibi", "sinks", "softcap", "scale", "lse"]
SHAPES = ["ungrouped", "one_key_head", "narrow_values"]
TRACKED = ["bias_heads", "bias_keys", "alibi", "sinks"]
BF16_LENGTHS = [512, 2048]


def inputs():
    """Multiples of 1/64, which every dtype holds."""
    torch.manual_seed(15)
    draw = lambda *shape: (torch.randn(shape) * 64).round().clamp(-128, 128) / 64
    bool_mask = torch.rand(B, 1, T_Q, T_KV) < 0.6
    bool_mask[1, 0, 1] = False
    return {
        "q": draw(B, H, T_Q, D),
        "k": draw(B, H, T_KV, D),
        "v": draw(B, H, T_KV, D),
        "output": draw(B, H, T_Q, D),
        "lse": draw(B, H, T_Q),
        "bias_heads": draw(1, H, T_Q, T_KV),
        "bias_keys": draw(T_Q, T_KV),
        "alibi": draw(H).abs() / 4,
        "sinks": draw(H),
        "bool_mask": bool_mask.to(torch.uint8),
    }


def visible(option, position, key, given):
    """(B or 1, 1, T_q, T_kv); queries stand at the end of the keys."""
    column = lambda numbers: torch.tensor(numbers).reshape(B, 1, 1, 1)
    match option:
        case "causal":
            return key <= position
        case "window":
            return (key <= position) & (key > position - 3)
        case "local_window":
            return (key >= position - 2) & (key <= position + 1)
        case "prefix":
            return (key <= position) | (key < column([5, 2]))
        case "lens":
            return key < column([6, 3])
        case "bool_mask":
            return given["bool_mask"].bool()


def gradients(options, given):
    heads = 4 if "ungrouped" in options else 1 if "one_key_head" in options else H_KV
    width = 3 if "narrow_values" in options else D
    double = lambda tensor: tensor.double().clone().requires_grad_()
    q, k, v = double(given["q"]), double(given["k"][:, :heads]), double(given["v"][:, :heads, :, :width])
    tracked = {name: double(given[name]) for name in TRACKED if name in options}

    position = torch.arange(T_Q).reshape(1, 1, T_Q, 1) + T_KV - T_Q
    key = torch.arange(T_KV)
    seen = torch.ones(B, H, T_Q, T_KV, dtype=torch.bool)
    for option in MASKS:
        if option in options:
            seen = seen & visible(option, position, key, given)
    added = torch.zeros(B, H, T_Q, T_KV, dtype=torch.float64)
    if "alibi" in options:
        added = added - tracked["alibi"].reshape(H, 1, 1) * (position - key).abs()
    for option in ["bias_heads", "bias_keys"]:
        if option in options:
            added = added + tracked[option]
    scale = -0.75 if "scale" in options else 1 / math.sqrt(D)

    repeat = lambda x: x.repeat_interleave(H // heads, 1)
    scores = scale * q @ repeat(k).transpose(2, 3)
    if "softcap" in options:
        scores = 1.5 * (scores / 1.5).tanh()
    sinks = tracked["sinks"].reshape(1, H, 1, 1).expand(B, H, T_Q, 1) if "sinks" in options else None
    # A query that attends to nothing, not even a sink, has no weights and no log-sum-exp.
    empty = ~seen.any(-1, keepdim=True) & (sinks is None)
    scores = torch.where(seen | empty, scores + added, -math.inf)
    scores = scores if sinks is None else torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :T_KV].masked_fill(empty, 0)
    output = weights @ repeat(v)
    leaves = [q, k, v, *tracked.values()]
    loss = (output * given["output"][..., :width]).sum()
    own = torch.autograd.grad(loss, leaves, retain_graph=True)
    if not {"softcap", "sinks"} & set(options):
        # What PyTorch's own function computes, it has to agree on.
        mask = torch.where(seen, added, -math.inf)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        theirs = torch.autograd.grad((output * given["output"][..., :width]).sum(), leaves, retain_graph=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(own, theirs)), options
    if "lse" in options:
        lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), 0)
        own = torch.autograd.grad(loss + (lse * given["lse"]).sum(), leaves)
    return torch.cat([gradient.flatten() for gradient in own])


def bf16_errors(t):
    """Causal, of two heads; the crate draws the same inputs from the same seed."""
    torch.manual_seed(t)
    q, k, v, factors = (torch.randn(1, 2, t, 64).bfloat16() for _ in range(4))

    def run(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        F.scaled_dot_product_attention(*leaves, is_causal=True).backward(factors.to(dtype))
        return [leaf.grad for leaf in leaves]

    rows = []
    for exact, got in zip(run(torch.float64), run(torch.bfloat16)):
        differences = [got.double() - exact, exact.bfloat16().double() - exact]
        rows.append([each for x in differences for each in (x.abs().max().item(), x.square().mean().sqrt().item())])
    return torch.tensor(rows, dtype=torch.float64)


def main():
    given = inputs()
    tensors = {f"in.{name}": tensor for name, tensor in given.items()}
    for options in [[], *([option] for option in MASKS + TERMS + SHAPES)]:
        tensors["+".join(options) or "plain"] = gradients(options, given)
    for options in [*itertools.combinations(MASKS + TERMS, 2), MASKS[3:] + TERMS]:
        tensors["+".join(options)] = gradients(options, given).float()
    tensors |= {f"bf16.{t}": bf16_errors(t) for t in BF16_LENGTHS}
    save_file(tensors, Path(__file__).with_suffix(".safetensors"))


main()
