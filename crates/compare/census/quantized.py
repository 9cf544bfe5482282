"""Counts the methods of quantisation that transformers lists, and writes docs/quantised.md's part about them.

    pip install transformers==5.23.0
    python quantized.py

A method is read where a folder of tests/weights/quantized has a model of it, or another test has: the tests compare each
weight with its library's, or with its formula where the library has none on a CPU. All other methods have to be refused by name, which a test tries for each line of the page.
"""

import collections
import json
import textwrap
from pathlib import Path

import transformers
from transformers.utils.quantization_config import QuantizationMethod

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/quantised.md"
FOLDERS = ROOT / "tests/weights/quantized"
START = "## Compared\n"
END = "## Speed and memory\n"

# The methods of folders whose config does not name one.
BY_FOLDER = {"hqq": "hqq", "quanto": "quanto", "mlx": "MLX", "fp8": "fp8"}
# Where other tests compare a method.
ELSEWHERE = {
    "gguf": "`tests/hf/gguf_types.rs`, with the package gguf and llama.cpp",
    "mxfp4": "`tests/examples/golden.rs`, the experts of gpt-oss, with transformers",
}
REFUSED = {
    "aqlm": "codes are places in learned books of vectors",
    "eetq": "bytes are in the order of one CUDA kernel",
    "fouroversix": "its scales were not compared with the library",
    "fp_quant": "inputs are multiplied by a Hadamard matrix",
    "gemma": "its codes were not compared with the library",
    "higgs": "codes are places in books of vectors, in the order of one CUDA kernel",
    "nvfp4": "transformers makes the codes when a model is loaded",
    "quark": "its files were not compared with the library",
    "sinq": "weights have scales of rows and of columns",
    "spqr": "groups have outliers in a sparse matrix",
    "vptq": "codes are places in learned books of vectors",
}


def method_of(folder):
    config = json.loads((folder / "config.json").read_text())
    named = config.get("quantization_config", {}).get("quant_method")
    return named or BY_FOLDER[folder.name.partition("_")[0]]


def counts():
    """Returns the models and the weights of each method."""
    models, weights = collections.Counter(), collections.Counter()
    for folder in sorted(FOLDERS.iterdir()):
        method = method_of(folder)
        models[method] += 1
        weights[method] += len(json.loads((folder / "want.json").read_text()))
    return models, weights


def written():
    models, weights = counts()
    known = [method.value for method in QuantizationMethod]
    read = [method for method in known if method in models or method in ELSEWHERE]
    assert set(REFUSED) == set(known) - set(read), set(REFUSED) ^ (set(known) - set(read))
    paragraph = (
        f"`crates/compare/census/quantized.py` writes this part. transformers {transformers.__version__} lists "
        f"{len(known)} methods of quantisation: {len(read)} are read, and {len(REFUSED)} are refused by name. The "
        f"{sum(models.values())} models in `tests/weights/quantized` have {sum(weights.values())} weights of linear layers, each "
        f"with the bits of its dequantised weight: the library's own, or by its formula where it has none on a CPU."
    )
    rows = [f"| `{method}` | {models[method]} | {weights[method]} | |" for method in known if method in models]
    rows += [f"| `{method}` | | | {ELSEWHERE[method]} |" for method in known if method not in models and method in read]
    others = sorted(set(models) - set(known))
    rows += [f"| {method}, not of transformers | {models[method]} | {weights[method]} | |" for method in others]
    refused = [f"| `{method}` | {why} |" for method, why in REFUSED.items()]
    return "\n".join(
        [
            START,
            textwrap.fill(paragraph, 120, break_on_hyphens=False),
            "",
            "| read | models | weights | compared elsewhere |",
            "| --- | ---: | ---: | --- |",
            *rows,
            "",
            "| refused | why |",
            "| --- | --- |",
            *refused,
            "",
            "",
        ]
    )


page = PAGE.read_text()
head, _, tail = page.partition(END)
head = head.partition(START)[0]
PAGE.write_text(head + written() + END + tail)
