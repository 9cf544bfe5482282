"""Writes tests/weights/quantized/compressed_experts: a layer that compressed-tensors packed, with experts next to it
whose weight has three dimensions.

    pip install compressed-tensors==0.19.0 torch==2.14.0 numpy safetensors
    python compressed_experts.py

The dequantised weights are those that the library decompresses, with scales in f32.
"""

import numpy
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file

import common

BITS = 3
GROUP = 32
EXPERTS = 3


def compressed(numbers, scheme):
    """Returns the tensors of a weight (.., out, in), with the scales and zeros of the smallest and largest numbers."""
    grouped = numbers.reshape(*numbers.shape[:-1], -1, GROUP)
    low, high = grouped.min(-1), grouped.max(-1)
    scales = ((high - low) / (2**BITS - 1)).astype(numpy.float16)
    middle = 2 ** (BITS - 1)
    zeros = numpy.clip(numpy.round(-low / scales) - middle, -middle, middle - 1).astype(numpy.int8)
    own = {"weight": numbers, "weight_scale": scales, "weight_zero_point": zeros}
    return PackedQuantizationCompressor.compress({key: torch.from_numpy(array) for key, array in own.items()}, scheme)


def write(name, seed):
    weights = {"num_bits": BITS, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    random = numpy.random.default_rng(seed)
    experts = {}
    # The outputs of an expert do not fill whole words.
    for projection, shape in {"gate_proj": (EXPERTS, 40, 64), "down_proj": (EXPERTS, 64, 32)}.items():
        numbers = random.standard_normal(shape, dtype=numpy.float32)
        experts[f"model.layers.0.mlp.experts.{projection}"] = numbers * 0.2
    tensors = {}
    want = {}
    for module, numbers in {**common.weights(seed), **experts}.items():
        state = compressed(numbers, scheme)
        tensors.update({f"{module}.{key}": tensor.contiguous() for key, tensor in state.items()})
        wide = {**state, "weight_scale": state["weight_scale"].float()}
        want[f"{module}.weight"] = PackedQuantizationCompressor.decompress(wide, scheme)["weight"].numpy()
    save_file(tensors, common.folder(name) / "model.safetensors")
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    common.write_config(name, common.config(quantization_config=settings))
    common.write_want(name, want)


write("compressed_experts", 51)
