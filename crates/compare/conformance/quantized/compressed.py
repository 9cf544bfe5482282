"""Writes tests/weights/quantized/compressed_*: models that llm-compressor quantised, in the formats of
compressed-tensors.

    pip install llmcompressor==0.14.0.1 compressed-tensors==0.19.0 transformers tokenizers numpy safetensors datasets
    python compressed.py

The dequantised weights are those of compressed-tensors' `dequantize`, with scales in f32.
"""

import json
import shutil
import tempfile

import compressed_tensors
import numpy
import torch
import transformers
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file

import common
import llamas


def dequantized(state, scheme):
    """Returns the weight of a layer by its tensors, in f32."""
    args = scheme.weights
    scale = state["weight_scale"]
    scale = decompress_mx_scale(scale).float() if scale.dtype is torch.uint8 else scale.float()
    zeros = state.get("weight_zero_point")
    if "weight_global_scale" in state or args.num_bits == 4 and args.type == "float":
        packed = state["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
    elif "weight_packed" in state:
        shape = torch.Size(state["weight_shape"].tolist())
        codes = unpack_from_int32(state["weight_packed"], args.num_bits, shape)
        if zeros is not None:
            zeros = unpack_from_int32(zeros, args.num_bits, (shape[0], scale.shape[-1]), packed_dim=0)
    else:
        codes = state["weight"]
    of_weight = state.get("weight_global_scale")
    return dequantize(codes, scale, zeros, args, dtype=torch.float32, global_scale=of_weight).numpy()


def group(targets, bits, kind="int", strategy="group", size=32, symmetric=True, **more):
    """Returns a group of a config: the weights of the targets, and what `more` says of them or of activations."""
    activations = more.pop("activations", None)
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **more}
    if size is not None:
        weights["group_size"] = size
    return {"targets": targets, "weights": weights, "input_activations": activations}


def write(name, seed, groups, ignore=(), data=False, **more):
    with llamas.saved(seed) as plain, tempfile.TemporaryDirectory() as saved:
        llamas.save_tokenizer(plain)
        model = transformers.AutoModelForCausalLM.from_pretrained(plain)
        recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head", *ignore], **more)
        options = {}
        if data:
            rows = llamas.texts(seed, 8, 32)
            texts = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 32] * 8})
            options = {"dataset": texts, "num_calibration_samples": 8, "max_seq_length": 32}
        oneshot(model=model, recipe=recipe, tokenizer=plain, **options)
        schemes = {key: getattr(module, "quantization_scheme", None) for key, module in model.named_modules()}
        model.save_pretrained(saved, save_compressed=True)
        common.write_config(name, json.loads(open(f"{saved}/config.json").read()))
        shutil.copy(f"{saved}/model.safetensors", common.folder(name))
        tensors = load_file(f"{saved}/model.safetensors")
        want = {}
        for module, scheme in schemes.items():
            own = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == module}
            if not module.endswith("_proj"):
                continue
            weight = dequantized(own, scheme) if "weight_scale" in own else own["weight"].float().numpy()
            want[f"{module}.weight"] = weight
        common.write_want(name, want)


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
DYNAMIC_FLOAT = {**DYNAMIC, "type": "float"}
STATIC_FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}

write("compressed_4_bits", 31, {"group_0": group(["Linear"], 4)}, ignore=["re:.*v_proj"])
write("compressed_4_bits_zeros", 32, {"group_0": group(["Linear"], 4, symmetric=False)})
write("compressed_8_bits_rows", 33, {"group_0": group(["Linear"], 8, "int", "channel", None, symmetric=False)})
odd = {
    "group_0": group(["re:.*self_attn.*"], 3),
    "group_1": group(["Linear"], 7, "int", "channel", None),
    "group_2": group(["model.layers.0.self_attn.o_proj"], 5, symmetric=False),
}
write("compressed_odd_bits", 34, odd)
write("compressed_int8", 35, {"group_0": group(["Linear"], 8, "int", "channel", None, activations=DYNAMIC)})
blocks = group(["Linear"], 8, "float", "block", None, block_structure=[32, 16], activations=DYNAMIC_FLOAT)
write("compressed_fp8_blocks", 36, {"group_0": blocks})
tensor = group(["Linear"], 8, "float", "tensor", None, activations=STATIC_FLOAT)
cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
write("compressed_fp8_cache", 37, {"group_0": tensor}, data=True, kv_cache_scheme=cache)
mixed = {
    "group_0": group(["re:.*[qkv]_proj"], 4, "float", "tensor_group", 16, scale_dtype="torch.float8_e4m3fn"),
    "group_1": group(["re:.*o_proj"], 4, "float", scale_dtype="torch.uint8"),
    "group_2": group(["re:.*(gate|up)_proj"], 8, "float", scale_dtype="torch.uint8"),
    "group_3": group(["re:.*down_proj"], 8, "float", "channel", None, activations=DYNAMIC_FLOAT),
}
write("compressed_mixed", 38, mixed)


def write_older(name, seed):
    """Writes layers as older versions did, which the library reads no more: inputs in an order of their own
    (`actorder: group`), and 3 bits without codes over the ends of words. The numbers are by its formula, codes * scales."""
    random = numpy.random.default_rng(seed)
    tensors = {}
    want = {}
    for module, numbers in common.weights(seed).items():
        outputs, inputs = numbers.shape
        bits = 4 if module.endswith(("q_proj", "k_proj")) else 3
        half = 2 ** (bits - 1)
        groups = numpy.arange(inputs) // 32
        if bits == 4:
            random.shuffle(groups)
            tensors[f"{module}.weight_g_idx"] = torch.from_numpy(groups.astype(numpy.int32))
        largest = numpy.stack([numpy.abs(numbers[:, groups == group]).max(-1) for group in (0, 1)], axis=1)
        scales = (largest / half).astype(numpy.float16)
        wide = scales.astype(numpy.float32)[:, groups]
        codes = numpy.clip(numpy.round(numbers / wide), -half, half - 1).astype(numpy.int32)
        want[f"{module}.weight"] = (codes * wide).astype(numpy.float32)
        of_word = 32 // bits
        padded = numpy.zeros((outputs, -(-inputs // of_word) * of_word), dtype=numpy.uint32)
        padded[:, :inputs] = codes + half
        shifted = padded.reshape(outputs, -1, of_word) << numpy.arange(0, of_word * bits, bits, dtype=numpy.uint32)
        packed = numpy.bitwise_or.reduce(shifted, axis=-1).view(numpy.int32)
        tensors[f"{module}.weight_packed"] = torch.from_numpy(packed)
        tensors[f"{module}.weight_scale"] = torch.from_numpy(scales)
        tensors[f"{module}.weight_shape"] = torch.tensor([outputs, inputs])
    save_file(tensors, common.folder(name) / "model.safetensors")
    groups = {
        "group_0": group(["re:.*[qk]_proj$"], 4, actorder="group"),
        "group_1": group(["Linear"], 3),
    }
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    common.write_config(name, common.config(quantization_config=settings))
    common.write_want(name, want)


write_older("compressed_older", 39)
