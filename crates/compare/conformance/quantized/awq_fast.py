"""Writes tests/weights/quantized/awq_gemv_fast: layers that AutoAWQ packed as `gemv_fast`.

    pip install autoawq==0.2.9 torch==2.14.0 numpy safetensors
    python awq_fast.py

Such layers run on CUDA alone, so that the dequantised weights are by their formula, code * scale + zero, rounded once.
"""

import sys

import numpy
import torch

# The library has the name of a script next to this one.
sys.path.append(sys.path.pop(0))
from awq.modules.linear.gemv_fast import WQLinear_GEMVFast
from safetensors.torch import save_file

import common

BITS = 4
GROUP = 32


def write(name, seed):
    """Rounds the projections to the nearest code and packs them with the library's layer."""
    tensors = {}
    want = {}
    random = numpy.random.default_rng(seed)
    # Two steps of 64 inputs, so that the order of the steps counts.
    shapes = {"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128), "o_proj": (128, 64)}
    for projection, (outputs, inputs) in shapes.items():
        module = f"model.layers.0.self_attn.{projection}"
        numbers = random.standard_normal((outputs, inputs), dtype=numpy.float32) * 0.2
        scales, zeros = common.rounded_groups(numbers, GROUP)
        codes = random.integers(0, 16, (outputs, inputs))
        wide_zeros, wide_scales = [numpy.repeat(own, GROUP, axis=1).astype(numpy.float64) for own in (zeros, scales)]
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = torch.from_numpy(((codes - wide_zeros) * wide_scales).astype(numpy.float32))
        sizes = {"scales": torch.from_numpy(scales), "zeros": torch.from_numpy(zeros)}
        layer = WQLinear_GEMVFast.from_linear(linear, BITS, GROUP, **sizes)
        for tensor in ["qweight", "qzeros", "scales"]:
            tensors[f"{module}.{tensor}"] = getattr(layer, tensor)
        # The zeros as the layer has them, times their scales in f16.
        stored = layer.qzeros[: inputs // GROUP].T.numpy().astype(numpy.float64)
        want[f"{module}.weight"] = codes * wide_scales + numpy.repeat(stored, GROUP, axis=1)
    save_file(tensors, common.folder(name) / "model.safetensors")
    settings = {"quant_method": "awq", "version": "gemv_fast", "bits": BITS, "group_size": GROUP, "zero_point": True}
    common.write_config(name, common.config(hidden_size=128, head_dim=16, quantization_config=settings))
    common.write_want(name, want)


write("awq_gemv_fast", 15)
