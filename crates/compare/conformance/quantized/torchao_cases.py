"""Writes tests/weights/quantized/torchao_*: llamas that torchao quantised and transformers saved.

    pip install torchao==0.18.0 transformers==5.17.0 torch==2.14.0 numpy safetensors
    python torchao_cases.py

torchao quantises to its Int4Tensor with the library mslk, which needs a GPU. The weights of that class are made here as
mslk's int4_row_quantize_zp makes them, and saved by torchao; it has no function that dequantises them.
"""

import torch
import torchao.quantization as quantization
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, TorchAoConfig
from safetensors.torch import save_file

import common
import llamas


def dequantised(weight):
    """Returns what torchao makes of a weight in f32."""
    if isinstance(weight, Int4Tensor):
        return of_int4(weight)
    scale = weight.scale.float()
    if hasattr(weight, "zero_point"):
        return quantization.quant_primitives.dequantize_affine(
            weight.qdata, weight.block_size, scale, weight.zero_point, torch.int8, output_dtype=torch.float32
        ).numpy()
    return weight.dequantize(torch.float32).numpy()


def of_int4(weight):
    """Returns `code * scale + zero_point`, rounded once: the product is exact where scales are in bf16."""
    halves = torch.stack([weight.qdata & 15, weight.qdata >> 4 & 15], dim=-1).flatten(1)
    codes = torch.where(halves > 7, halves - 16, halves).float()
    group = weight.block_size[1]
    scale, zero = (part.float().t().repeat_interleave(group, dim=1) for part in (weight.scale, weight.zero_point))
    return (codes * scale + zero).numpy()


def int4(weight, group):
    """Quantises a weight as mslk does."""
    groups = weight.float().reshape(-1, group)
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    scale = (high - low).clamp(min=1e-6) / 15
    codes = ((groups - low) / scale).round().clamp(0, 15) - 8
    codes = codes.to(torch.int8).reshape(weight.shape)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    rows = weight.shape[0]
    columns = [part.view(rows, -1).t().contiguous().to(weight.dtype) for part in (scale, low + 8 * scale)]
    return Int4Tensor(packed, *columns, block_size=[1, group], shape=weight.shape)


def write(name, seed, config):
    with llamas.saved(seed) as path:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            quantization_config=TorchAoConfig(config, modules_to_not_convert=["lm_head", "down_proj"]),
            device_map="cpu",
            dtype=torch.bfloat16,
        )
    llamas.save(name, model)
    write_recorded(name, model)


def write_recorded(name, model):
    want = {}
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
            is_plain = not isinstance(module.weight, TorchAOBaseTensor)
            weight = module.weight.detach()
            want[f"{module_name}.weight"] = weight.float().numpy() if is_plain else dequantised(weight)
    common.write_want(name, want)
    llamas.write_logits(name, model, want)


def write_int4(name, seed, group):
    with llamas.saved(seed) as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
            module.weight = torch.nn.Parameter(int4(module.weight.detach(), group), requires_grad=False)
    state = {key: value.detach() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, common.folder(name) / "model.safetensors", {**metadata, "format": "pt"})
    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}
    model.config.quantization_config = settings
    model.config.save_pretrained(common.folder(name))
    write_recorded(name, model)


write("torchao_int8", 1, quantization.Int8WeightOnlyConfig())
write("torchao_float8", 2, quantization.Float8WeightOnlyConfig())
per_group = quantization.PerGroup(32)
is_asymmetric = quantization.MappingType.ASYMMETRIC
write("torchao_intx_4_bits", 3, quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=per_group))
write(
    "torchao_intx_3_bits_zeros",
    4,
    quantization.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=per_group, mapping_type=is_asymmetric),
)
write_int4("torchao_int4", 5, 32)
