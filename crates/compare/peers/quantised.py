"""Times quantised models with `causal_lm`, and GGUF files with llama.cpp too, in turn: see README.md.

    quantised.py FILE_OR_FOLDER ..

A prompt of 512 tokens and 100 tokens after it, with two threads, on an idle machine and then beside one busy process.
`random_llama.py` makes models. `load` is the time of `causal_lm` for one token, and `copy` that of `cp` to memory.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import real

PROMPT, TOKENS = 512, 100
PROGRAM = real.ROOT / "target/release/examples/causal_lm"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=2, help="how often each engine has its turn; the better counts (default: %(default)s)")
    parser.add_argument("--neighbours", default="0,1", help="the numbers of busy processes (default: %(default)s)")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(llama_cpp(args.engine)))
        return
    subprocess.run(["cargo", "build", "--release", "--quiet", "--example", "causal_lm"], cwd=real.ROOT, check=True)
    print("| model, busy processes | generation: this crate | one thread | llama.cpp | prompt: this crate | llama.cpp | load, s | copy, s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for neighbours in map(int, args.neighbours.split(",")):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
        try:
            for model in args.models:
                print(f"| {model.name}, {neighbours} | {row(model, args.rounds)} |", flush=True)
        finally:
            for process in busy:
                process.kill()


def row(model, rounds):
    two, one, other = [], [], []
    for _ in range(rounds):
        two.append(ours(model, 2))
        one.append(ours(model, 1))
        if model.suffix == ".gguf":
            theirs = real.in_process([__file__, "--engine", model, model], f"llama.cpp {model.name}", 2)
            if theirs is None:
                sys.exit(1)
            other.append(theirs)
    best = lambda rates, column: f"{max(rate[column] for rate in rates):.1f}" if rates else ""
    cells = [best(two, 1), best(one, 1), best(other, 1), best(two, 0), best(other, 0)]
    return " | ".join([*cells, f"{load(model):.2f}", f"{copy(model):.2f}"])


def command(model, prompt, tokens):
    dtype = [] if model.suffix == ".gguf" else ["--dtype", "bf16"]
    ids = ",".join(map(str, real.ids(prompt)))
    return [PROGRAM, "--model", model, *dtype, "--ids", ids, "--max-tokens", str(tokens), "--temperature", "0"]


def ours(model, threads):
    """Returns the rates of the prompt and of generation. One thread is on one core."""
    ran = subprocess.run(
        command(model, PROMPT, TOKENS),
        env=os.environ | {"RAYON_NUM_THREADS": str(threads)},
        preexec_fn=(lambda: os.sched_setaffinity(0, {0})) if threads == 1 else None,
        capture_output=True,
        text=True,
    )
    found = re.search(rf"([\d.]+) tokens/s; generation: {TOKENS} tokens, ([\d.]+) tokens/s", ran.stderr)
    if not found:
        sys.exit(f"{model}: {ran.stderr[-400:]}")
    return tuple(map(float, found.groups()))


def llama_cpp(model):
    """Returns the rates of the prompt and of generation."""
    server = real.llama_server(model, PROMPT + TOKENS + 64, 1, 2)
    request = {"prompt": real.ids(PROMPT), "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    for _ in range(2):  # the first call warms up
        times = server.handle_completions(request)["timings"]
    return times["prompt_per_second"], times["predicted_per_second"]


def load(model):
    return min(real.seconds(command(model, 1, 1)) for _ in range(3))


def copy(model):
    file = model if model.is_file() else model / "model.safetensors"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return min(real.seconds(["cp", file, folder]) for _ in range(3))


if __name__ == "__main__":
    main()
