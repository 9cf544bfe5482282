"""Writes tests/weights/quantized/quanto_*: llamas that optimum-quanto quantised and saved.

    pip install optimum-quanto==0.2.7 transformers==5.17.0 torch==2.14.0 numpy safetensors
    python quanto_cases.py
"""

import torch
from optimum.quanto import QuantizedModelForCausalLM, qfloat8, qint2, qint4, qint8
from optimum.quanto.nn import QLinear
from transformers import AutoModelForCausalLM

import common
import llamas


def unpacked(packed):
    """Returns the codes of a packed tensor, as quanto unpacks them. Its function for a CPU needs a C++ compiler."""
    mask = 2**packed.bits - 1
    parts = [packed._data >> shift & mask for shift in range(0, 8, packed.bits)]
    return torch.cat(parts)[: packed.shape[0]]


def dequantised(weight):
    """Returns what quanto makes of a weight, with its scales and shifts in f32."""
    weight._scale = weight._scale.float()
    if hasattr(weight, "_shift"):
        weight._shift = weight._shift.float()
        weight._data = unpacked(weight._data)
    return weight.dequantize().detach().numpy()


def write(name, seed, weights, **own):
    with llamas.saved(seed, **own) as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    QuantizedModelForCausalLM.quantize(model, weights=weights, exclude=["lm_head", "*.down_proj"]).save_pretrained(
        common.folder(name)
    )
    for unused in ["README.md", "generation_config.json"]:
        (common.folder(name) / unused).unlink(missing_ok=True)
    want = llamas.plain_weights(model)
    for module_name, module in model.named_modules():
        if isinstance(module, QLinear):
            want[f"{module_name}.weight"] = dequantised(module.weight)
    common.write_want(name, want)
    llamas.write_logits(name, model, want)


write("quanto_int8", 1, qint8)
write("quanto_float8", 2, qfloat8)
write("quanto_int4", 3, qint4)
# Two groups of 128 numbers in a row.
write("quanto_int2_groups", 4, qint2, hidden_size=256, intermediate_size=16)
