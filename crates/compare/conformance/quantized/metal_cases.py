"""Writes tests/weights/quantized/metal_8_bits: layers that transformers quantised for Metal.

    pip install transformers==5.17.0 torch==2.14.0 numpy safetensors
    python metal_cases.py

The dequantised weights are those that transformers computes.
"""

import torch
from safetensors.torch import save_file
from transformers.integrations.metal_quantization import _affine_dequantize_tensor, _affine_quantize_tensor
from transformers.utils.quantization_config import MetalConfig

import common


def write(name, seed, bits, group_size):
    tensors = {}
    want = {}
    for module, numbers in common.weights(seed).items():
        words, *floats = _affine_quantize_tensor(torch.from_numpy(numbers), group_size, bits)
        scales, biases = [own.to(torch.bfloat16) for own in floats]
        own = {"weight": words, "scales": scales, "qbiases": biases}
        tensors.update({f"{module}.{key}": tensor for key, tensor in own.items()})
        want[f"{module}.weight"] = _affine_dequantize_tensor(words, scales, biases, group_size, bits).numpy()
    save_file(tensors, common.folder(name) / "model.safetensors")
    settings = MetalConfig(bits=bits, group_size=group_size).to_dict()
    common.write_config(name, common.config(quantization_config=settings))
    common.write_want(name, want)


write("metal_8_bits", 71, 8, 32)
