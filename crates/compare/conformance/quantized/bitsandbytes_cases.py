"""Writes tests/weights/quantized/bnb_*: llamas that bitsandbytes quantised and transformers saved.

    pip install bitsandbytes==0.50.2 transformers==5.17.0 torch==2.14.0 numpy safetensors
    python bitsandbytes_cases.py
"""

import bitsandbytes as bnb
import numpy
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, int8_vectorwise_dequant
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import common
import llamas


def four_bits(weight):
    """Returns what bitsandbytes makes of a weight of 4 bits in f32, whatever its dtype was.

    bitsandbytes has a generic function and one for processors with AVX-512. In 0.50.2 the latter reads wrong scales
    where a block ends in the middle of a row or goes on in the next: its numbers are further from the weight before
    quantisation by a multiple of the scale. Elsewhere both return the same bits.
    """
    state = weight.quant_state
    state.dtype = torch.float32
    absmax = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes = weight.data.reshape(-1)
    numbers = _dequantize_4bit_compute(codes, absmax, state.code, state.blocksize, state.shape, torch.float32)
    if state.shape[1] % state.blocksize == 0:
        assert torch.equal(numbers, dequantize_4bit(weight.data, state))
    return numbers.numpy()


def eight_bits(weight):
    """Returns `code * (SCB / 127)`, as bitsandbytes computes embeddings of 8 bits.

    Its function int8_vectorwise_dequant computes `code * SCB * (1 / 127)`, which is rounded once more.
    """
    scales = weight.SCB.numpy() / numpy.float32(127)
    numbers = weight.data.numpy().astype(numpy.float32) * scales[:, None]
    numpy.testing.assert_allclose(numbers, int8_vectorwise_dequant(weight.data, weight.SCB).numpy(), rtol=3e-7)
    return numbers


def write(name, seed, settings, blocksize=64, **own):
    with llamas.saved(seed, **own) as path:
        quantization = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=quantization, device_map="cpu", dtype=torch.bfloat16
        )
        if blocksize != 64:
            plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            requantise(model, plain, blocksize)
    llamas.save(name, model)
    want = llamas.plain_weights(model)
    for module_name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            want[f"{module_name}.weight"] = four_bits(module.weight)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            want[f"{module_name}.weight"] = eight_bits(module.weight)
    common.write_want(name, want)
    llamas.write_logits(name, model, want)


def requantise(model, plain, blocksize):
    """Quantises the layers again with blocks of another size, which transformers has no option for."""
    weights = dict(plain.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            old = module.weight
            module.weight = bnb.nn.Params4bit(
                weights[f"{name}.weight"].data,
                requires_grad=False,
                blocksize=blocksize,
                quant_type=old.quant_type,
                compress_statistics=old.compress_statistics,
            ).to("cpu")


def of_four_bits(quant_type, is_double):
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": is_double,
        "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp.down_proj"],
    }


write("bnb_nf4", 1, of_four_bits("nf4", False))
write("bnb_nf4_double", 2, of_four_bits("nf4", True))
write("bnb_fp4", 3, of_four_bits("fp4", False))
# Blocks of 256 numbers are 4 rows.
write("bnb_fp4_double_256", 4, of_four_bits("fp4", True), blocksize=256)
# Rows of 96 numbers are one block and a half.
write("bnb_nf4_rows_of_96", 5, of_four_bits("nf4", True), hidden_size=96)
write("bnb_int8", 6, {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "model.layers.0.self_attn.k_proj"]})
