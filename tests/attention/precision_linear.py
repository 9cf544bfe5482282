"""PyTorch's own error in torch.nn.functional.linear on the CPU, against f64: writes precision_linear.json beside this script.

    python tests/attention/precision_linear.py

Made with PyTorch 2.15. The inputs are those of torch.manual_seed and torch.randn, which the crate draws again.
"""

import json
import pathlib

import numpy
import torch
from torch.nn.functional import linear

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

# (rows, inputs, outputs): one row, a few, and enough to fill a task, up to the widest sums of a model of 8 billion
# parameters. One row of some hundred inputs is not tested: there PyTorch sums in the lanes of a vector, and its error
# is two thirds to three quarters of the error for more rows.
SHAPES = [
    (1, 768, 2304),
    (1, 4096, 4096),
    (1, 14336, 1024),
    (2, 3072, 1024),
    (8, 1536, 1536),
    (8, 14336, 512),
    (17, 300, 211),
    (32, 1536, 1536),
    (64, 4096, 256),
    (128, 768, 768),
    (200, 14336, 64),
    (400, 1024, 192),
    (1024, 64, 256),
]


def checksum(tensor):
    """Of the bits of a tensor as f32, each times an odd number of its own, modulo 2^64."""
    bits = tensor.float().flatten().numpy().view(numpy.uint32).astype(numpy.uint64)
    return int((bits * (2 * numpy.arange(len(bits), dtype=numpy.uint64) + 1)).sum(dtype=numpy.uint64))


def case(number, shape, dtype):
    rows, inputs, outputs = shape
    torch.manual_seed(number)
    xs = torch.randn(rows, inputs).to(DTYPES[dtype])
    weight = torch.randn(outputs, inputs).to(DTYPES[dtype])
    bias = torch.randn(outputs).to(DTYPES[dtype])
    with torch.no_grad():
        exact = linear(xs.double(), weight.double(), bias.double())
        error = linear(xs, weight, bias).double() - exact
    return {
        "seed": number,
        "shape": shape,
        "dtype": dtype,
        "checksums": [checksum(tensor) for tensor in (xs, weight, bias)],
        "max": error.abs().max().item(),
        "rms": error.square().mean().sqrt().item(),
    }


def main():
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    text = ",\n  ".join(json.dumps(case(number, *each)) for number, each in enumerate(cases))
    header = f'"torch": "{torch.__version__}", "cpu_capability": "{torch.backends.cpu.get_cpu_capability()}"'
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text("{" + header + ', "cases": [\n  ' + text + "\n]}\n")


if __name__ == "__main__":
    main()
