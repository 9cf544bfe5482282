"""Writes tests/weights/quantized/awq_*: models that GPTQModel quantised with AWQ, and layers that it packed as `gemv`.

    pip install GPTQModel==7.7.0 transformers tokenizers numpy safetensors
    GPTQMODEL_CPU_WORKERS=3 python awq.py

The dequantised weights are those of the library's `dequantize_gemm`, with its scales in f32; for `gemv`, whose layers run
on CUDA alone, they are by the formula, (code - zero) * scale.
"""

import json
import shutil
import tempfile

import numpy
import torch
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.gemv_awq import AwqGEMVLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file

import common
import llamas


def dequantized(tensors, bits, group_size):
    want = {}
    for name, codes in tensors.items():
        if name.endswith(".weight") and "_proj" in name:
            want[name] = codes.float().numpy()
        if not name.endswith(".qweight"):
            continue
        module = name.removesuffix(".qweight")
        zeros, scales = tensors[f"{module}.qzeros"], tensors[f"{module}.scales"].float()
        want[f"{module}.weight"] = dequantize_gemm(codes, zeros, scales, bits, group_size).T.numpy()
    return want


def write(name, seed, group_size, **options):
    # The library clips the weights of 64 outputs at once.
    with llamas.saved(seed, head_dim=32, intermediate_size=64) as plain, tempfile.TemporaryDirectory() as saved:
        llamas.save_tokenizer(plain)
        options = {"method": "awq", "format": "gemm", "bits": 4, "group_size": group_size, "sym": False, **options}
        model = GPTQModel.load(plain, QuantizeConfig(**options))
        model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in llamas.texts(seed)], batch_size=1)
        model.save(saved)
        own = json.loads(open(f"{saved}/config.json").read())
        # Without the settings of the run, which have a path of this machine.
        settings = own["quantization_config"]
        settings["meta"] = {"quantizer": settings["meta"]["quantizer"]}
        common.write_config(name, own)
        shutil.copy(f"{saved}/model.safetensors", common.folder(name))
        common.write_want(name, dequantized(load_file(f"{saved}/model.safetensors"), options["bits"], group_size))


def write_gemv(name, seed, group_size):
    """Rounds the projections to the nearest code and packs them with the library's layer."""
    tensors = {}
    want = {}
    random = numpy.random.default_rng(seed)
    # Heads of 32, since the layers have outputs in steps of 64.
    shapes = {"q_proj": (128, 64), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (64, 128)}
    for projection, (outputs, inputs) in shapes.items():
        module = f"model.layers.0.self_attn.{projection}"
        numbers = random.standard_normal((outputs, inputs), dtype=numpy.float32) * 0.2
        scales, zeros = common.rounded_groups(numbers, group_size)
        scales = scales.astype(numpy.float32)
        linear = torch.nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = torch.from_numpy(numbers)
        layer = AwqGEMVLinear(4, group_size, False, False, inputs, outputs)
        layer.pack(linear, torch.from_numpy(scales), torch.from_numpy(zeros))
        for tensor in ["qweight", "qzeros", "scales"]:
            tensors[f"{module}.{tensor}"] = getattr(layer, tensor)
        words = layer.qweight.numpy().view(numpy.uint32)
        codes = (words[:, :, None] >> numpy.arange(0, 32, 4, dtype=numpy.uint32) & 15).reshape(outputs, inputs)
        wide = [numpy.repeat(array, group_size, axis=1) for array in (zeros, scales)]
        want[f"{module}.weight"] = (codes.astype(numpy.float32) - wide[0]) * wide[1]
    save_file(tensors, common.folder(name) / "model.safetensors")
    settings = {"quant_method": "awq", "version": "gemv", "bits": 4, "group_size": group_size, "zero_point": True}
    common.write_config(name, common.config(head_dim=32, quantization_config=settings))
    common.write_want(name, want)


write("awq_gemm", 11, 32)
write("awq_gemm_3_bits", 13, 32, bits=3)
write_gemv("awq_gemv", 12, 64)
