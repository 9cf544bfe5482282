"""Writes tests/weights/quantized/modelopt_*: llamas that NVIDIA's ModelOpt quantised and exported.

    pip install nvidia-modelopt==0.47.0 transformers==5.17.0 torch==2.14.0 numpy safetensors
    python modelopt_cases.py
"""

import json

import modelopt.torch.quantization as mtq
import modelopt.torch.quantization.tensor_quant as tensor_quant
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import common
import llamas

UNUSED = ["generation_config.json", "modelopt_state.pth"]


def dequantised(tensors, name):
    """Returns what ModelOpt makes of a weight in f32."""
    weight, scale = tensors[name], tensors[f"{name}_scale"]
    if weight.dtype == torch.uint8:
        own = NVFP4QTensor((weight.shape[0], weight.shape[1] * 2), torch.float32, weight)
        double = tensors[f"{name}_scale_2"]
        factors = tensors.get(name.replace("weight", "pre_quant_scale"))
        if factors is None:
            return own.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16}).numpy()
        # The layer multiplies its inputs by the factors; here the scales have them, each product rounded to f32.
        ones = {"scale": torch.ones_like(scale), "double_scale": torch.ones_like(double)}
        codes = own.dequantize(torch.float32, block_sizes={-1: 16}, **ones)
        scales = (scale.float() * double).repeat_interleave(16, dim=1) * factors.float()
        return (codes * scales).numpy()
    # The formula of its FP8QTensor, in f32.
    return (weight.float() * scale.float()).numpy()


def rounded_on_cpu(numbers, block, amax, *_):
    """Returns what the library's kernel, which runs on GPUs alone, returns: numbers rounded to NVFP4."""
    double = amax.float().amax() / (6 * 448)
    own, scale, double = NVFP4QTensor.quantize(numbers, block, weights_scaling_factor_2=double)
    return own.dequantize(numbers.dtype, scale=scale, double_scale=double, block_sizes={-1: block})


# The search for the factors of NVFP4_AWQ rounds weights.
tensor_quant.dynamic_block_quantize_op = rounded_on_cpu


def write(name, seed, settings):
    with llamas.saved(seed) as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_config(model.config)
    settings = {**settings, "quant_cfg": settings["quant_cfg"] + [{"quantizer_name": "*down_proj*", "enable": False}]}
    mtq.quantize(model, settings, lambda own: own(torch.tensor([common.IDS])))
    export_hf_checkpoint(model, export_dir=common.folder(name))
    for unused in UNUSED:
        (common.folder(name) / unused).unlink(missing_ok=True)
    tensors = load_file(common.folder(name) / "model.safetensors")
    want = {}
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight"):
            is_quantised = f"{key}_scale" in tensors
            want[key] = dequantised(tensors, key) if is_quantised else tensor.float().numpy()
    common.write_want(name, want)
    others = {key: tensor for key, tensor in tensors.items() if key in plain.state_dict() and key not in want}
    plain.load_state_dict(others, strict=False)
    llamas.write_logits(name, plain, want)


write("modelopt_fp8", 1, mtq.FP8_DEFAULT_CFG)
write("modelopt_nvfp4", 2, mtq.NVFP4_DEFAULT_CFG)
# The output projection keeps its factors of inputs; the norms have the factors of the layers behind them.
write("modelopt_nvfp4_awq", 3, mtq.NVFP4_AWQ_LITE_CFG)
