"""Compares ways to round cached keys and values, by the perplexity of a text with a real model of transformers in bf16.

    python crates/compare/peers/cache_formats.py FOLDER

FOLDER is a model of Hugging Face with its tokenizer. The text is a part of the documentation that comes with Python
(`pydoc_data.topics`), so that no file is needed. Needs torch and transformers.
"""

import argparse
import math
import re

TOKENS = 4096


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model for transformers")
    args = parser.parse_args()
    simulate(args.folder, token_ids(args.folder))


def token_ids(folder):
    """Returns the first tokens of paragraphs about Python, without markup."""
    from pydoc_data.topics import topics
    from transformers import AutoTokenizer

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    text = re.sub(r"[*`\\]", "", re.sub(r"\n[=\-*~^]+\n", "\n", whole))
    return AutoTokenizer.from_pretrained(folder)(text[: 8 * TOKENS]).input_ids[:TOKENS]


def simulate(folder, ids):
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def rotated(rows, block=64):
        """Multiplies blocks of numbers by a Hadamard matrix, which is its own inverse."""
        matrix = torch.ones(1, 1)
        while len(matrix) < block:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        return (rows.unflatten(-1, (-1, block)) @ (matrix / math.sqrt(block))).flatten(-2)

    def symmetric(rows, group, largest=7.5):
        """Rounds to multiples of a scale, half of it away from zero for 4 bits: codes 0 to 15 less 7.5."""
        grouped = rows.unflatten(-1, (-1, group))
        scales = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
        offset = largest % 1
        return (((grouped / scales - offset).round() + offset).clamp(-largest, largest) * scales).flatten(-2)

    def with_minimums(rows, group):
        grouped = rows.unflatten(-1, (-1, group))
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scales = ((high - low) / 15).clamp_min(1e-30)
        return (((grouped - low) / scales).round() * scales + low).flatten(-2)

    def by_channel(rows, tokens):
        """Groups are some tokens of one channel; the last tokens stay floats until there are enough of them."""
        whole = rows.shape[-2] // tokens * tokens
        columns = with_minimums(rows[..., :whole, :].transpose(-1, -2), tokens).transpose(-1, -2)
        return torch.cat([columns, rows[..., whole:, :]], -2)

    def e4m3(rows):
        scales = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        return (rows / scales).to(torch.float8_e4m3fn).float() * scales

    same = lambda rows: rows
    q8 = lambda rows: symmetric(rows, rows.shape[-1], 127)
    plain = lambda group: lambda rows: symmetric(rows, group)
    minimums = lambda group: lambda rows: with_minimums(rows, group)
    turned = lambda group: lambda rows: rotated(symmetric(rotated(rows), group))
    ways = {
        "f32": (same, same),
        "8 bits, a scale for each row": (q8, q8),
        "E4M3, a scale for each row": (e4m3, e4m3),
        "4 bits in groups of 64": (plain(64), plain(64)),
        "4 bits in groups of 32": (plain(32), plain(32)),
        "4 bits with minimums in groups of 32": (minimums(32), minimums(32)),
        "keys by channel in 64 tokens, values in groups of 64": (lambda k: by_channel(k, 64), plain(64)),
        "keys by channel in 32 tokens, values in groups of 32": (lambda k: by_channel(k, 32), plain(32)),
        "rotated keys, values in groups of 64": (turned(64), plain(64)),
        "rotated keys and values in groups of 64": (turned(64), turned(64)),
        "rotated keys and values in groups of 32": (turned(32), turned(32)),
    }
    chosen = []

    def attend(module, q, k, v, mask, **options):
        of_keys, of_values = ways[chosen[-1]]
        floats = [q.float(), of_keys(k.float()), of_values(v.float())]
        output, weights = sdpa_attention_forward(module, *floats, mask, **options)
        return output.to(q.dtype), weights

    AttentionInterface.register("rounded", attend)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="rounded").eval()
    tokens = torch.tensor([ids])
    print(f"| keys and values | perplexity of {len(ids)} tokens |")
    print("| --- | ---: |")
    with torch.no_grad():
        for name in ways:
            chosen.append(name)
            hidden = model.model(tokens).last_hidden_state[0]
            total = 0.0
            for start in range(0, len(ids) - 1, 256):
                end = min(len(ids) - 1, start + 256)
                logits = model.lm_head(hidden[start:end]).float()
                next_tokens = tokens[0, start + 1 : end + 1]
                total += torch.nn.functional.cross_entropy(logits, next_tokens, reduction="sum").item()
            print(f"| {name} | {math.exp(total / (len(ids) - 1)):.3f} |", flush=True)


if __name__ == "__main__":
    main()
