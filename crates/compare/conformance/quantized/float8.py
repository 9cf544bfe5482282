"""Writes tests/weights/quantized/fp8_*: llamas with floats of 8 bits in the forms that several libraries save.

    pip install transformers==5.17.0 torch==2.14.0 numpy safetensors
    python float8.py

transformers quantises to these forms on a GPU alone ("No GPU or XPU found. A GPU or XPU is needed for FP8
quantization"), and so do FBGEMM and DeepSeek's scripts. The tensors are made here as their formats say. Scales by blocks
that divide a weight are compared with transformers' own dequantisation.
"""

import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import common

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantised(weight, block, dtype):
    """Returns the floats of 8 bits of a weight, and the scale of each block."""
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = torch.empty(grid, dtype=torch.float32)
    codes = torch.empty_like(weight, dtype=dtype)
    for i in range(grid[0]):
        for j in range(grid[1]):
            own = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[own].abs().max() / LARGEST[dtype]
            codes[own] = (weight[own] / scales[i, j]).to(dtype)
    return codes, scales


def dequantised(codes, scales, block):
    rows, columns = codes.shape
    wide = scales.float().repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    numbers = codes.float() * wide
    if rows % scales.shape[0] == 0 and columns % scales.shape[1] == 0 and rows // scales.shape[0] == block[0]:
        assert torch.equal(numbers, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32))
    return numbers.numpy()


def write(name, seed, settings, save, plain=()):
    """Writes a layer; `save` returns the tensors of a module and its weight in f32, from the weight."""
    tensors, want = {}, {}
    for module, numbers in common.weights(seed).items():
        weight = torch.from_numpy(numbers)
        if module.rsplit(".", 1)[1] in plain:
            tensors[f"{module}.weight"] = weight.to(torch.bfloat16)
            want[f"{module}.weight"] = weight.to(torch.bfloat16).float().numpy()
            continue
        own, want[f"{module}.weight"] = save(weight)
        tensors |= {f"{module}.{key}": tensor.clone() for key, tensor in own.items()}
    layer = "model.layers.0.self_attn"
    if "kv_scales" in name:
        tensors |= {f"{layer}.k_scale": torch.tensor(0.5), f"{layer}.v_scale": torch.tensor(0.25)}
    save_file(tensors, common.folder(name) / "model.safetensors")
    common.write_config(name, common.config(quantization_config=settings))
    common.write_want(name, want)


def of_blocks(block, name="weight_scale_inv", dtype=torch.float8_e4m3fn, scale_dtype=torch.float32):
    def save(weight):
        codes, scales = quantised(weight, block, dtype)
        if scale_dtype != torch.float32:
            scales = torch.exp2(scales.log2().ceil())
        stored = scales.to(scale_dtype)
        return {"weight": codes, name: stored}, dequantised(codes, stored, block)

    return save


def of_tensor(name, dtype, other):
    def save(weight):
        codes, scales = quantised(weight, weight.shape, dtype)
        scale = scales.reshape(())
        return {"weight": codes, name: scale, **other}, (codes.float() * scale).numpy()

    return save


def of_rows(weight):
    codes, scales = quantised(weight, (1, weight.shape[1]), torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
    return tensors, dequantised(codes, scales, (1, weight.shape[1]))


def settings_of(block):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}


is_plain = ["k_proj"]
settings = {**settings_of((32, 32)), "modules_to_not_convert": is_plain}
write("fp8_blocks_of_32", 1, settings, of_blocks((32, 32)), is_plain)
# Blocks end in the middle of rows and columns.
write("fp8_blocks_of_24_by_40", 2, settings_of((24, 40)), of_blocks((24, 40)))
write("fp8_blocks_e8m0", 3, settings_of((32, 16)), of_blocks((32, 16), scale_dtype=torch.float8_e8m0fnu))
write("fp8_rows", 4, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, of_rows)
unused = {"input_scale": torch.tensor(0.03)}
fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
write("fp8_tensor_kv_scales", 5, fp8, of_tensor("weight_scale", torch.float8_e4m3fn, unused))
unused = {"scale_input": torch.tensor(0.03)}
write("fp8_scale_weight_e5m2", 6, {}, of_tensor("scale_weight", torch.float8_e5m2, unused))


def of_exponents(weight):
    """Powers of 2 as bytes, for groups of 32 inputs (MXFP8), and transformers' own dequantisation."""
    codes, scales = quantised(weight, (1, 32), torch.float8_e4m3fn)
    exponents = (scales.log2().ceil() + 127).to(torch.uint8)
    want = Fp8Dequantize(None)._dequantize_one(codes, exponents, torch.float32)
    return {"weight": codes, "weight_scale_inv": exponents}, want.numpy()


write("fp8_exponents_in_bytes", 7, {"quant_method": "mxfp8"}, of_exponents)
