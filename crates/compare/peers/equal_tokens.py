"""Counts how many greedy tokens of SmolLM2-135M stay equal when its cache stores fewer bits: see README.md.

Each text is continued with a cache in the type of the activations, and then with smaller caches. A row has the number
of tokens before the first one that differs, for all texts.
"""

import argparse
import subprocess

import real

TEXTS = [
    "The history of the steam engine begins",
    "To bake a good loaf of bread, first",
    "A prime number is",
    "In the year 1920, the city of Vienna",
    "def quicksort(items):",
    "The difference between a virus and a bacterium is",
    "Once upon a time there was a fox who",
    "The moon moves around the earth because",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens after each text (default: %(default)s)")
    parser.add_argument("--type", default="f32", help="of weights and activations (default: %(default)s)")
    args = parser.parse_args()
    subprocess.run(["cargo", "build", "--release", "--quiet", "--example", "causal_lm"], cwd=real.ROOT, check=True)
    real.prepare_language()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real.checkpoint())
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    expected = [tokens(prompt, args) for prompt in prompts]
    print(f"| cache | equal tokens of {args.tokens}, after {len(TEXTS)} texts | mean |")
    print("| --- | --- | ---: |")
    for cache in ("bf16", "q8", "e4m3", "q4"):
        equal = [common(tokens(prompt, args, "--kv-cache", cache), own) for prompt, own in zip(prompts, expected)]
        print(f"| {cache} | {', '.join(map(str, equal))} | {sum(equal) / len(equal):.0f} |", flush=True)


def tokens(prompt, args, *options):
    ids = ",".join(map(str, prompt))
    command = [real.ROOT / "target/release/examples/causal_lm", *real.model_args(args.type), "--ids", ids]
    ran = subprocess.run([*command, "--max-tokens", str(args.tokens), *options], check=True, capture_output=True, text=True)
    return [int(token) for token in ran.stdout.strip().split(",")]


def common(one, other):
    """Returns the number of first entries that are equal."""
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    main()
