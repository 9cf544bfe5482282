"""PyTorch's own error in scaled_dot_product_attention on the CPU, against f64: writes precision_attention.json beside this script.

    python tests/attention/precision_attention.py

Made with PyTorch 2.15. The inputs are those of torch.manual_seed and torch.randn, which the crate draws again.
"""

import itertools
import json
import math
import pathlib

import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def shapes():
    """(B, H, T_q, T_kv, D), at least four thousand outputs each."""
    for d in (64, 96, 128):
        yield 4, 16, 1, 1, d
        yield 2, 16, 7, 7, d
        yield 2, 8, 33, 33, d
        yield 1, 8, 128, 128, d
        yield 2, 32, 1, 777, d
    yield 1, 2, 500, 500, 96
    yield 1, 1, 1024, 1024, 128
    yield 1, 1, 2048, 2048, 64
    yield 2, 32, 1, 2048, 128
    yield 1, 4, 64, 2048, 128
    # Sums over many keys, on few queries and on enough to fill tiles.
    yield 1, 8, 8, 16384, 64
    yield 1, 1, 300, 8192, 64


def checksum(tensor):
    """Of the bits of a tensor as f32, each times an odd number of its own, modulo 2^64."""
    bits = tensor.float().flatten().numpy().view(numpy.uint32).astype(numpy.uint64)
    return int((bits * (2 * numpy.arange(len(bits), dtype=numpy.uint64) + 1)).sum(dtype=numpy.uint64))


def case(number, shape, causal, dtype, widening):
    b, h, t_q, t_kv, d = shape
    torch.manual_seed(number)
    q = torch.randn(b, h, t_q, d)
    k = torch.randn(b, h, t_kv, d)
    v = torch.randn(b, h, t_kv, d)
    q, k, v = ((q * widening).to(DTYPES[dtype]), k.to(DTYPES[dtype]), v.to(DTYPES[dtype]))
    with torch.no_grad():
        exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
        error = scaled_dot_product_attention(q, k, v, is_causal=causal).double() - exact
    return {
        "seed": number,
        "shape": shape,
        "causal": causal,
        "dtype": dtype,
        "widening": widening,
        "checksums": [checksum(tensor) for tensor in (q, k, v)],
        "max": error.abs().max().item(),
        "rms": error.square().mean().sqrt().item(),
    }


def main():
    cases, numbers = [], itertools.count()
    for index, shape in enumerate(shapes()):
        b, h, t_q, t_kv, d = shape
        for causal in (False, True) if t_q == t_kv else (False,):
            # Scores of standard deviation 1, and of 8: up to 40 or so.
            for way, (dtype, widening) in enumerate(itertools.product(DTYPES, (1, 8))):
                if math.prod(shape) > 1 << 26 and dtype != "f32" and widening > 1:
                    continue
                number = next(numbers)
                # Drawing takes the time of the test: of the largest caches of one query two of the six ways, others for
                # each shape.
                if t_q == 1 and b * h * t_kv * d > 1 << 22 and (way + index) % 3:
                    continue
                cases.append(case(number, shape, causal, dtype, widening))
    text = ",\n  ".join(json.dumps(each) for each in cases)
    header = f'"torch": "{torch.__version__}", "cpu_capability": "{torch.backends.cpu.get_cpu_capability()}"'
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text("{" + header + ', "cases": [\n  ' + text + "\n]}\n")


if __name__ == "__main__":
    main()
