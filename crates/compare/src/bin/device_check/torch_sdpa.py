"""PyTorch's scaled_dot_product_attention on the shapes that `device_check --bench` times, in the same units.

    cargo run --release -p candle-attention-compare -- --list > cells.jsonl
    python crates/compare/src/bin/device_check/torch_sdpa.py cells.jsonl

Every backend that takes a shape is timed by itself. The error is relative to the largest entry of the same call in f32, as
the math backend computes it for one sequence and one group of heads.
"""

import argparse
import json
import math
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
TURN = 0.06  # seconds of calls between two looks at the clock
TURNS = 7
CACHED = 512 << 20  # decoding walks through more bytes of keys and values than this


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", help="what `device_check --list` printed; - for standard input")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--scores", type=float, default=20.0, help="GiB of scores beyond which math is skipped")
    args = parser.parse_args()
    with sys.stdin if args.cells == "-" else open(args.cells) as lines:
        cells = [json.loads(line) for line in lines]
    print(f"PyTorch {torch.__version__} on {device_name(args.device)}")
    print(f"{'cell':<34}{'backend':<11}{'ms':>10}{'TFLOP/s':>10}{'GB/s':>8}{'error':>10}")
    for cell in cells:
        for name, backend in BACKENDS.items():
            print(f"{cell['name']:<34}{name:<11}{outcome(cell, name, backend, args)}", flush=True)


def default_device():
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def device_name(device):
    return torch.cuda.get_device_name() if device == "cuda" else device


def outcome(cell, name, backend, args):
    gib = 4 * cell["b"] * cell["h"] * cell["t_q"] * cell["t_kv"] / 2**30
    if name == "math" and gib > args.scores:
        return f"skipped: scores of {gib:.0f} GiB"
    copies = -(-CACHED // cell["kv_bytes"]) if cell["t_q"] == 1 else 1
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[cell["dtype"]]

    def draw(heads, t):
        return torch.randn(cell["b"], heads, t, cell["d"], device=args.device).to(dtype)

    q = draw(cell["h"], cell["t_q"])
    kv = [(draw(cell["h_kv"], cell["t_kv"]), draw(cell["h_kv"], cell["t_kv"])) for _ in range(copies)]

    def call(n):
        k, v = kv[n % copies]
        return F.scaled_dot_product_attention(q, k, v, is_causal=cell["causal"], enable_gqa=cell["h"] != cell["h_kv"])

    try:
        with sdpa_kernel(backend):
            ms = milliseconds(call, args.device)
            off = error(call(0), q, *kv[0], cell)
    except RuntimeError as cause:
        return "skipped: " + str(cause).splitlines()[0].split(". ")[0]
    gb_s = f"{cell['kv_bytes'] / ms / 1e6:.0f}" if cell["t_q"] == 1 else "-"
    return f"{ms:>10.3f}{cell['flops'] / ms / 1e9:>10.2f}{gb_s:>8}{off:>10.1e}"


def milliseconds(call, device):
    def turn(calls):
        synchronize(device)
        start = time.perf_counter()
        for n in range(calls):
            call(n)
        synchronize(device)
        return (time.perf_counter() - start) / calls

    turn(1)
    calls = min(max(math.ceil(TURN / turn(1)), 1), 10_000)
    return 1e3 * sorted(turn(calls) for _ in range(TURNS))[TURNS // 2]


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def error(found, q, k, v, cell):
    group = cell["h"] // cell["h_kv"]
    q, k, v = q[:1, :group].float(), k[:1, :1].float(), v[:1, :1].float()
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(
            q, k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1), is_causal=cell["causal"]
        )
    return ((found[:1, :group].float() - exact).abs().max() / exact.abs().max()).item()


if __name__ == "__main__":
    main()
