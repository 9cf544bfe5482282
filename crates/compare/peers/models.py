"""Times a whole model of `cargo bench -p candle-attention-compare --bench models` and transformers on PyTorch, in turn: see README.md."""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that are generated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each has its turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for every engine")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    environment = os.environ | {"RAYON_NUM_THREADS": str(args.threads)}

    def bench(*arguments):
        command = ["cargo", "bench", "--quiet", "-p", "candle-attention-compare", "--bench", "models", "--", "--prompt", str(args.prompt), *arguments]
        ran = subprocess.run(command, cwd=ROOT, check=True, env=environment, stdout=subprocess.PIPE, text=True)
        return [json.loads(line) for line in ran.stdout.splitlines()]

    [listed] = bench("--list")
    best = {}

    def record(dtype, name, prompt, generation):
        before = best.get((dtype, name), (0.0, 0.0))
        best[dtype, name] = (max(prompt, before[0]), max(generation, before[1]))

    for _ in range(args.rounds):
        for line in bench("--json", "--rounds", "1", "--tokens", str(args.tokens)):
            record(line["dtype"], line["name"], line["prompt_tokens_s"], line["generation_tokens_s"])
        for dtype in ("f32", "bf16"):
            record(dtype, f"transformers, PyTorch {torch.__version__}", *turn(dtype, listed, args.tokens))
    print(f"| dtype | model | prompt of {args.prompt}, tokens/s | generation, tokens/s |")
    print("| --- | --- | ---: | ---: |")
    for (dtype, name), (prompt, generation) in sorted(best.items(), key=lambda row: row[0][0], reverse=True):
        print(f"| {dtype} | {name} | {prompt:.0f} | {generation:.1f} |")


def turn(dtype, listed, tokens):
    """Tokens per second of the prompt and of what follows, through a preallocated cache of its length."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    config = LlamaConfig(**listed["config"], attn_implementation="sdpa")
    model = LlamaForCausalLM(config).to(dtype).eval()
    ids = torch.tensor([listed["ids"]])
    length = ids.shape[1]
    taken = []
    # The growing cache copies everything at each token, the preallocated one attends to its whole capacity: the faster
    # counts.
    for cache in (None, StaticCache(config, max_cache_len=length + tokens)):
        with torch.inference_mode():
            start = time.perf_counter()
            held = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            prompt = time.perf_counter() - start
            start = time.perf_counter()
            for token in range(tokens):
                held = model(ids[:, token : token + 1], past_key_values=held, use_cache=True).past_key_values
            taken.append((prompt, time.perf_counter() - start))
    return length / min(p for p, _ in taken), tokens / min(g for _, g in taken)


if __name__ == "__main__":
    main()
