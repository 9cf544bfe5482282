"""Times 32 requests to SmolLM2-135M, here and in llama.cpp's server, or here with and without pages, in turn: see
README.md.

The prompts have 50 to 500 tokens, of which the first 200 are equal in all; each request generates 64 tokens. All
requests arrive at once.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

import real

REQUESTS, COMMON, GENERATED = 32, 200, 64
# Of --prompt, so that a run takes seconds.
PROMPTS = 8
FILE = real.DATA / "requests.jsonl"
# The number of tokens that this crate generated for each request, until the end token or 64: llama.cpp has to generate
# the same number.
COUNTS = real.DATA / "requests-counts.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine has its turn (default: %(default)s)")
    parser.add_argument("--types", default="f32,bf16,q8_0,q4_1", help="the types of weights (default: %(default)s)")
    parser.add_argument("--slots", default="8,32", help="llama.cpp's --parallel, of which the best counts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for every engine")
    parser.add_argument("--join", action="store_true", help="a batch of caches that sequences join instead of llama.cpp, in f32 and bf16")
    parser.add_argument("--prompt", action="store_true", help="prompts of 1,024 tokens instead, one after the other, through pages in chunks of 256 and at once")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        slots, dtype = args.engine
        print(json.dumps(llama_cpp(dtype, int(slots), args.threads)))
        return
    subprocess.run(["cargo", "build", "--release", "--quiet", "--example", "serve_requests"], cwd=real.ROOT, check=True)
    real.prepare_language()
    if args.prompt:
        time_prompt(args)
        return
    write_requests()
    if args.join:
        time_join(args)
        return
    print(f"| SmolLM2-135M, {REQUESTS} requests, {args.threads} threads | this crate, s | llama.cpp, s | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for dtype in args.types.split(","):
        ours, theirs = [], {}
        for _ in range(args.rounds):
            ours.append(candle_attention(dtype, args.threads))
            for slots in args.slots.split(","):
                program = [__file__, "--engine", slots, dtype, "--threads", args.threads]
                taken = real.in_process(program, f"llama.cpp {dtype}, {slots} slots", args.threads)
                if taken is None:
                    sys.exit(1)
                theirs.setdefault(slots, []).append(taken)
        mine, (slots, other) = statistics.median(ours), min(((slots, statistics.median(all)) for slots, all in theirs.items()), key=lambda pair: pair[1])
        print(f"| {dtype} | {mine:.1f} | {other:.1f} ({slots} slots) | {mine / other:.2f} |", flush=True)


def time_join(args):
    build = ["cargo", "bench", "--quiet", "-p", "candle-attention-compare", "--bench", "joined", "--no-run", "--message-format", "json"]
    lines = subprocess.run(build, cwd=real.ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    built = [json.loads(line) for line in lines if line.startswith("{")]
    program = next(one["executable"] for one in built if one.get("target", {}).get("name") == "joined" and one.get("executable"))
    print(f"| SmolLM2-135M, {REQUESTS} requests, {args.threads} threads | in pages, s | in a batch with `join`, s | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for dtype in ("f32", "bf16"):
        pages, batch = [], []
        for _ in range(args.rounds):
            pages.append(candle_attention(dtype, args.threads))
            command = [program, "--model", real.checkpoint(), "--requests", FILE, *(["--bf16"] if dtype == "bf16" else [])]
            ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"RAYON_NUM_THREADS": str(args.threads)})
            batch.append(seconds_of(ran))
        mine, other = statistics.median(pages), statistics.median(batch)
        print(f"| {dtype} | {mine:.2f} | {other:.2f} | {mine / other:.2f} |", flush=True)


def time_prompt(args):
    prompts = [[100 + n, *real.ids(1023)] for n in range(PROMPTS)]
    FILE.write_text("".join(json.dumps({"ids": prompt, "max_tokens": 1}) + "\n" for prompt in prompts))
    print(f"| SmolLM2-135M, {PROMPTS} prompts of 1,024 tokens, {args.threads} threads | chunks of 256, s | one piece, s | one piece / chunks |")
    print("| --- | ---: | ---: | ---: |")
    for dtype in ("f32", "bf16"):
        times = {256: [], 1024: []}
        for _ in range(args.rounds):
            for chunk, taken in times.items():
                taken.append(candle_attention(dtype, args.threads, "--token-budget", str(chunk), "--chunk", str(chunk)))
        chunks, whole = (statistics.median(taken) for taken in times.values())
        print(f"| {dtype} | {chunks:.3f} | {whole:.3f} | {whole / chunks:.2f} |", flush=True)


def requests():
    draw = random.Random(1)
    common = [draw.randrange(100, 40_000) for _ in range(COMMON)]
    prompts = []
    for _ in range(REQUESTS):
        length = draw.randint(50, 500)
        own = [draw.randrange(100, 40_000) for _ in range(max(0, length - COMMON))]
        prompts.append(common[:length] + own)
    return prompts


def write_requests():
    lines = [json.dumps({"id": str(n), "ids": prompt, "max_tokens": GENERATED}) for n, prompt in enumerate(requests())]
    FILE.write_text("\n".join(lines) + "\n")


def candle_attention(dtype, threads, *options):
    """Returns the seconds from the first arrival to the last token."""
    command = [real.ROOT / "target/release/examples/serve_requests", *real.model_args(dtype), "--requests", FILE, "--batch", str(REQUESTS), "--pages", "2048", *options]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"RAYON_NUM_THREADS": str(threads)})
    counts = {line["id"]: len(line["ids"]) for line in map(json.loads, ran.stdout.splitlines())}
    COUNTS.write_text(json.dumps(counts))
    return seconds_of(ran)


def seconds_of(ran):
    return float(re.search(r"in ([\d.]+) s$", ran.stderr, re.MULTILINE).group(1))


def llama_cpp(dtype, slots, threads):
    server = real.llama_server(real.gguf_of(dtype), slots * (500 + GENERATED + 8), slots, threads)
    address = server.listening_address

    def complete(prompt, tokens):
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        body = urllib.request.Request(f"{address}/completion", json.dumps(request).encode(), {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(body))
        if answer["tokens_predicted"] != tokens:
            sys.exit(f"llama.cpp generated {answer['tokens_predicted']} tokens")

    complete([1, 2, 3], 4)
    counts = json.loads(COUNTS.read_text())
    threads_of_requests = [threading.Thread(target=complete, args=(prompt, counts[str(n)])) for n, prompt in enumerate(requests())]
    start = time.perf_counter()
    for thread in threads_of_requests:
        thread.start()
    for thread in threads_of_requests:
        thread.join()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
