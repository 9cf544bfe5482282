"""Writes tests/weights/quantized/bitnet_*: layers that transformers packed as BitNet.

    pip install transformers==5.17.0 torch==2.14.0 numpy safetensors
    TORCHDYNAMO_DISABLE=1 python bitnet_cases.py

The dequantised weights are the numbers that transformers unpacks, times the scale of `autobitlinear`, or divided by the
scale of `bitlinear`.
"""

import numpy
import torch
from safetensors.torch import save_file
from transformers.integrations.bitnet import pack_weights, unpack_weights
from transformers.utils.quantization_config import BitNetQuantConfig

import common


def write(name, seed, dtype, linear_class):
    tensors = {}
    want = {}
    for module, numbers in common.weights(seed).items():
        size = numpy.abs(numbers).mean()
        ternary = torch.from_numpy(numpy.clip(numpy.round(numbers / size), -1, 1))
        packed = pack_weights(ternary.clone())
        scale = torch.tensor([size if linear_class == "autobitlinear" else 1 / size], dtype=dtype)
        tensors[f"{module}.weight"] = packed
        tensors[f"{module}.weight_scale"] = scale
        unpacked = unpack_weights(packed, dtype=torch.float32)
        assert torch.equal(unpacked, ternary)
        weight = unpacked * scale.float() if linear_class == "autobitlinear" else unpacked / scale.float()
        # Zeros have no sign.
        want[f"{module}.weight"] = (weight + 0.0).numpy()
    save_file(tensors, common.folder(name) / "model.safetensors")
    settings = BitNetQuantConfig(linear_class=linear_class).to_dict()
    common.write_config(name, common.config(quantization_config=settings))
    common.write_want(name, want)


write("bitnet_factor", 61, torch.bfloat16, "autobitlinear")
write("bitnet_divisor", 62, torch.float32, "bitlinear")
