"""Writes tests/weights/quantized/hqq_*: llamas that HQQ quantised and saved.

    pip install hqq==0.2.8.post1 transformers==5.17.0 torch==2.14.0 numpy safetensors
    python hqq_cases.py
"""

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from transformers import AutoModelForCausalLM

import common
import llamas


def dequantised(layer):
    """Returns what HQQ makes of a weight, with its scales and zeros in f32."""
    own = {"scale": layer.meta["scale"].float(), "zero": layer.meta["zero"].float(), "compute_dtype": torch.float32}
    layer.meta = {**layer.meta, **own}
    return layer.dequantize().numpy()


def write(name, seed, axis=1, **settings):
    with llamas.saved(seed, tie_word_embeddings=False) as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    quantization = BaseQuantizeConfig(axis=axis, **settings)
    AutoHQQHFModel.quantize_model(model, quant_config=quantization, compute_dtype=torch.bfloat16, device="cpu")
    # HQQ appends the names of the files to the text.
    AutoHQQHFModel.save_to_safetensors(model, f"{common.folder(name)}/")
    want = {
        f"{module_name}.weight": dequantised(module)
        for module_name, module in model.named_modules()
        if isinstance(module, HQQLinear)
    }
    common.write_want(name, want)
    llamas.write_logits(name, model, want)


write("hqq_4_bits", 1, nbits=4, group_size=32)
# Rows of codes in words of 32 bits, ten parts.
write("hqq_3_bits", 2, nbits=3, group_size=64)
write("hqq_2_bits", 3, nbits=2, group_size=16)
write("hqq_8_bits_as_floats", 4, nbits=8, group_size=64, view_as_float=True)
# A byte for each code.
write("hqq_6_bits", 5, nbits=6, group_size=32)
# Scales of outputs that are far apart: each input has its own.
write("hqq_4_bits_axis_0", 6, axis=0, nbits=4, group_size=32)
write("hqq_3_bits_axis_0", 7, axis=0, nbits=3, group_size=64)
