"""Writes tests/weights/quantized/auto_round_*: models that auto-round quantised, in its own formats.

    pip install auto-round==0.15.1 transformers tokenizers numpy safetensors
    python auto_round_cases.py

The dequantised weights are by the library's formula, (code - zero) * scale in f32: its layers compute in f16.
"""

import json
import pathlib
import shutil
import tempfile

import numpy
import torch
import transformers
from auto_round import AutoRound
from safetensors import safe_open

import common
import llamas


def codes(words, bits):
    """Returns the codes of words, the lowest first, along the last axis."""
    shifts = numpy.arange(0, 32, bits, dtype=numpy.uint32)
    return (words.view(numpy.uint32)[..., None] >> shifts & (2**bits - 1)).reshape(*words.shape[:-1], -1)


def in_order_of_awq(numbers):
    return numbers.reshape(numbers.shape[0], -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(numbers.shape)


def dequantized(path, bits, is_awq, zeros_less_one):
    want = {}
    with safe_open(path, "np") as file:
        for name in file.keys():
            if not name.endswith(".qweight"):
                continue
            module = name.removesuffix(".qweight")
            words, zero_words, scales = (file.get_tensor(f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
            if is_awq:
                numbers, zeros = (in_order_of_awq(codes(array, bits)) for array in (words, zero_words))
            else:
                numbers, zeros = codes(words.T.copy(), bits).T, codes(zero_words, bits) + zeros_less_one
            size = numbers.shape[0] // scales.shape[0]
            zeros, scales = (numpy.repeat(array.astype(numpy.float32), size, axis=0) for array in (zeros, scales))
            want[f"{module}.weight"] = ((numbers.astype(numpy.float32) - zeros) * scales).T
    return want


def dequantized_floats(path):
    """Returns the weights of floats of 4 bits, with scales of E4M3 over a scale of the weight, or powers of 2."""
    numbers = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=numpy.float32)
    want = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():
            if not name.endswith(".weight_packed"):
                continue
            module = name.removesuffix(".weight_packed")
            packed, scales = (file.get_tensor(f"{module}.{part}") for part in ("weight_packed", "weight_scale"))
            if scales.dtype is torch.uint8:
                scales = numpy.exp2(scales.numpy().astype(numpy.float32) - 127)
            else:
                scales = scales.float().numpy() / file.get_tensor(f"{module}.weight_global_scale").numpy()
            halves = numpy.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(packed.shape[0], -1)
            wide = numpy.repeat(scales, halves.shape[1] // scales.shape[1], axis=1)
            want[f"{module}.weight"] = numbers[halves] * wide
    return want


def write_floats(name, seed, scheme):
    """Quantises to floats of 4 bits, with a few texts of the tokenizer's words."""
    with llamas.saved(seed) as plain, tempfile.TemporaryDirectory() as saved:
        llamas.save_tokenizer(plain)
        tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
        model = transformers.AutoModelForCausalLM.from_pretrained(plain)
        texts = [" ".join(f"w{word}" for word in text) for text in llamas.texts(seed, 4, 18)]
        options = {"scheme": scheme, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
        rounding = AutoRound(model, tokenizer, nsamples=2, seqlen=16, dataset=texts, **options)
        rounding.quantize_and_save(saved, format="auto_round")
        [path] = pathlib.Path(saved).rglob("config.json")
        saved_model = path.with_name("model.safetensors")
        common.write_config(name, json.loads(path.read_text()))
        shutil.copy(saved_model, common.folder(name))
        common.write_want(name, dequantized_floats(saved_model))


def write(name, seed, packing_format, bits, sym):
    with llamas.saved(seed) as plain, tempfile.TemporaryDirectory() as saved:
        llamas.save_tokenizer(plain)
        tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
        model = transformers.AutoModelForCausalLM.from_pretrained(plain)
        rounding = AutoRound(
            model, tokenizer, bits=bits, group_size=32, sym=sym, iters=0, disable_opt_rtn=True, device_map="cpu"
        )
        rounding.quantize_and_save(saved, format=packing_format)
        # The library adds a folder for the scheme.
        [path] = pathlib.Path(saved).rglob("config.json")
        saved_model = path.with_name("model.safetensors")
        own = json.loads(path.read_text())
        common.write_config(name, own)
        shutil.copy(saved_model, common.folder(name))
        packing = own["quantization_config"]["packing_format"]
        less_one = "auto_gptq" in packing
        common.write_want(name, dequantized(saved_model, bits, "awq" in packing, less_one))


write("auto_round_gptq", 21, "auto_round", 4, True)
write("auto_round_2_bits", 22, "auto_round", 2, False)
write("auto_round_awq", 23, "auto_round:auto_awq", 4, False)
write_floats("auto_round_mxfp4", 24, "MXFP4")
write_floats("auto_round_nvfp4", 25, "NVFP4")
