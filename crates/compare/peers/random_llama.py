"""Writes Llamas with random codes, quantised in many ways, to time and to measure memory with: see README.md.

    random_llama.py FOLDER [KIND ..]

The sizes are E 2,048, 8 layers, 32 query heads and 8 key heads of 64, 5,632 inner columns, and a vocabulary of 49,152
with a separate head. A kind of GGUF becomes `FOLDER/KIND.gguf`; the other kinds become folders with config.json and
model.safetensors, whose embedding and head are in bf16. Without kinds, all are written: 15 GB.
"""

import json
import sys
from pathlib import Path

import numpy as np

E, LAYERS, INNER, HEADS, KV_HEADS, VOCABULARY, D = 2048, 8, 5632, 32, 8, 49152, 64
# The linear layers of a block, with the names of GGUF and of transformers, outputs and inputs.
LINEAR = [
    ("attn_q", "self_attn.q_proj", E, E),
    ("attn_k", "self_attn.k_proj", KV_HEADS * D, E),
    ("attn_v", "self_attn.v_proj", KV_HEADS * D, E),
    ("attn_output", "self_attn.o_proj", E, E),
    ("ffn_gate", "mlp.gate_proj", INNER, E),
    ("ffn_up", "mlp.up_proj", INNER, E),
    ("ffn_down", "mlp.down_proj", E, INNER),
]


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in sys.argv[2:] or [*GGUF, *FORMATS]:
        if kind in GGUF:
            write_gguf(folder / f"{kind}.gguf", kind)
        elif kind in FORMATS:
            write_safetensors(folder / kind, kind)
        else:
            sys.exit(f"no kind {kind}; there are {', '.join([*GGUF, *FORMATS])}")
        print(kind, flush=True)


# GGUF.

GGUF = ["Q4_K_M", "Q5_K_M", "Q6_K", "Q4_1", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"]
# The halves of a block that are scales: where they are, and their size.
HALVES = {
    "Q4_1": [(0, 0.003), (2, -0.0225)],
    "Q8_0": [(0, 0.0002)],
    "Q4_K": [(0, 0.0001), (2, 0.0007)],
    "Q5_K": [(0, 0.00005), (2, 0.0007)],
    "Q6_K": [(208, 0.00001)],
    "IQ4_NL": [(0, 0.0003)],
    "IQ4_XS": [(0, 0.00002)],
    "MXFP4": [],
}


def write_gguf(path, kind):
    from gguf import GGUFWriter

    draw = np.random.default_rng(1)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(E)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(D)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    # llama.cpp refuses a file without a tokenizer.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"token{n}" for n in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t o", "to k"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

    def add(name, rows, columns, layer=0):
        type_of_blocks = type_of(kind, name, layer)
        label = name if name in ("token_embd", "output") else f"blk.{layer}.{name}"
        writer.add_tensor(f"{label}.weight", blocks(draw, type_of_blocks, rows, columns), raw_dtype=type_of_blocks)

    add("token_embd", VOCABULARY, E)
    writer.add_tensor("output_norm.weight", np.ones(E, np.float32))
    add("output", VOCABULARY, E)
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(E, np.float32))
        for name, _, rows, columns in LINEAR:
            add(name, rows, columns, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def type_of(kind, name, layer):
    """Returns the type of a tensor. The two mixtures have some tensors in Q6_K, as llama.cpp chooses them."""
    from gguf import GGMLQuantizationType

    if kind in ("Q4_K_M", "Q5_K_M"):
        is_larger = name == "output" or (name in ("attn_v", "ffn_down") and layer % 2 == 0)
        return GGMLQuantizationType["Q6_K" if is_larger else kind.removesuffix("_M")]
    return GGMLQuantizationType[kind]


def blocks(draw, kind, rows, columns):
    from gguf import GGML_QUANT_SIZES

    count, size = GGML_QUANT_SIZES[kind]
    made = draw.integers(0, 256, (rows, columns // count, size), dtype=np.uint8)
    for at, scale in HALVES[kind.name]:
        halves = (draw.random((rows, columns // count)) * 0.5 + 0.75) * scale
        made[:, :, at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    if kind.name == "Q6_K":
        made[:, :, 192:208] = draw.integers(32, 127, (rows, columns // count, 16), dtype=np.uint8)
    if kind.name == "MXFP4":
        made[:, :, 0] = draw.integers(117, 120, (rows, columns // count), dtype=np.uint8)
    return made.reshape(rows, -1)


# Safetensors. Each function returns the tensors of a linear layer with `o` outputs and `i` inputs.


class Draw:
    """Random tensors."""

    def __init__(self):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(1)

    def integers(self, low, high, shape, dtype):
        return self.torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def words(self, *shape):
        return self.integers(-(2**31), 2**31 - 1, shape, self.torch.int32)

    def octets(self, *shape):
        return self.integers(0, 256, shape, self.torch.uint8)

    def bytes_with_sign(self, *shape):
        return self.integers(-127, 128, shape, self.torch.int8)

    def scales(self, shape, dtype=None, size=0.004):
        return (self.torch.rand(shape, generator=self.generator) * size + size).to(dtype or self.torch.float16)

    def normal(self, shape, dtype):
        return (self.torch.randn(shape, generator=self.generator) * 0.02).to(dtype)


def gptq(draw, o, i):
    torch = draw.torch
    zeros = torch.full((i // 128, o // 8), 0x77777777, dtype=torch.int32)
    order = torch.arange(i, dtype=torch.int32) // 128
    return {"qweight": draw.words(i // 8, o), "qzeros": zeros, "scales": draw.scales((i // 128, o)), "g_idx": order}


def awq(draw, o, i):
    zeros = draw.torch.full((i // 128, o // 8), 0x77777777, dtype=draw.torch.int32)
    return {"qweight": draw.words(i, o // 8), "qzeros": zeros, "scales": draw.scales((i // 128, o))}


def compressed_int4(draw, o, i):
    torch = draw.torch
    scales = draw.scales((o, i // 128), torch.bfloat16)
    return {"weight_packed": draw.words(o, i // 8), "weight_scale": scales, "weight_shape": torch.tensor([o, i])}


def compressed_int8(draw, o, i):
    return {"weight": draw.bytes_with_sign(o, i), "weight_scale": draw.scales((o, 1), draw.torch.bfloat16, 0.0002)}


def compressed_mxfp4(draw, o, i):
    scales = draw.integers(117, 120, (o, i // 32), draw.torch.uint8)
    return {"weight_packed": draw.octets(o, i // 2), "weight_scale": scales}


def bitsandbytes_nf4(draw, o, i):
    torch = draw.torch
    state = dict(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=[o, i], nested_blocksize=256, nested_dtype="float32", nested_offset=0.03)
    return {
        "weight": draw.octets(o * i // 2, 1),
        "weight.absmax": draw.octets(o * i // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.nested_absmax": draw.scales((-(-o * i // 64 // 256),), torch.float32, 0.01),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def bitsandbytes_int8(draw, o, i):
    torch = draw.torch
    order = torch.tensor(0, dtype=torch.uint8)
    return {"weight": draw.bytes_with_sign(o, i), "SCB": draw.scales((o,), torch.float32, 0.02), "weight_format": order}


def mlx(draw, o, i):
    scales = draw.scales((o, i // 64))
    return {"weight": draw.words(o, i // 8).view(draw.torch.uint32), "scales": scales, "biases": -8 * scales}


def hqq(draw, o, i):
    torch = draw.torch
    groups = o * i // 64
    number = lambda n: torch.tensor(n, dtype=torch.int32)
    return {
        "W_q": draw.octets(groups // 2, 64),
        "scale": draw.scales((groups, 1)),
        "zero": torch.full((groups, 1), 7.5, dtype=torch.float16),
        "nbits": number(4),
        "axis": number(1),
        "shape": torch.tensor([o, i]),
        "group_size": number(64),
        "view_as_float": number(0),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
    }


def quanto_int8(draw, o, i):
    return {"weight._data": draw.bytes_with_sign(o, i), "weight._scale": draw.scales((o, 1), draw.torch.bfloat16, 0.0002)}


def quanto_int4(draw, o, i):
    groups = o * i // 128
    scale = lambda size: draw.scales((groups, 1), draw.torch.bfloat16, size)
    return {"weight._data._data": draw.octets(groups // 2, 128), "weight._scale": scale(0.004), "weight._shift": scale(0.015)}


def torchao_int8(draw, o, i):
    return {"_weight_qdata": draw.bytes_with_sign(o, i), "_weight_scale": draw.scales((o, 1), draw.torch.float32, 0.0002)}


def fp8_blocks(draw, o, i):
    torch = draw.torch
    # Codes of 127 are NaN.
    codes = draw.integers(0, 120, (o, i), torch.uint8) + 128 * draw.integers(0, 2, (o, i), torch.uint8)
    scales = draw.scales((-(-o // 128), -(-i // 128)), torch.float32, 1e-4)
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales}


def modelopt_nvfp4(draw, o, i):
    torch = draw.torch
    scales = (torch.rand((o, i // 16), generator=draw.generator) + 1).to(torch.float8_e4m3fn)
    return {"weight": draw.octets(o, i // 2), "weight_scale": scales, "weight_scale_2": torch.tensor(0.004)}


def bf16(draw, o, i):
    return {"weight": draw.normal((o, i), draw.torch.bfloat16)}


def f32(draw, o, i):
    return {"weight": draw.normal((o, i), draw.torch.float32)}


def compressed(format, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    method = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quantization_config": method}


def method(name, **settings):
    return {"quantization_config": {"quant_method": name, **settings}}


# The tensors and the config of each kind.
FORMATS = {
    "gptq": (gptq, method("gptq", bits=4, group_size=128, desc_act=False, sym=True, checkpoint_format="gptq")),
    "awq": (awq, method("awq", version="gemm", bits=4, group_size=128)),
    "compressed_int4": (compressed_int4, compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128, symmetric=True)),
    "compressed_int8": (compressed_int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)),
    "compressed_mxfp4": (compressed_mxfp4, compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)),
    "bitsandbytes_nf4": (bitsandbytes_nf4, method("bitsandbytes", load_in_4bit=True)),
    "bitsandbytes_int8": (bitsandbytes_int8, method("bitsandbytes", load_in_8bit=True)),
    "mlx": (mlx, {"quantization": {"group_size": 64, "bits": 4}}),
    "hqq": (hqq, method("hqq", nbits=4)),
    "torchao_int8": (torchao_int8, method("torchao")),
    "quanto_int8": (quanto_int8, method("quanto", weights="int8")),
    "quanto_int4": (quanto_int4, method("quanto", weights="int4")),
    "fp8_blocks": (fp8_blocks, method("fp8", weight_block_size=[128, 128])),
    "modelopt_nvfp4": (modelopt_nvfp4, method("modelopt", quant_algo="NVFP4")),
    "bf16": (bf16, {}),
    "f32": (f32, {}),
}


def write_safetensors(folder, kind):
    from safetensors.torch import save_file

    layer, more = FORMATS[kind]
    draw = Draw()
    dtype = draw.torch.float32 if kind == "f32" else draw.torch.bfloat16
    tensors = {name: draw.normal((VOCABULARY, E), dtype) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = draw.torch.ones(E, dtype=dtype)
    metadata = {}
    for number in range(LAYERS):
        block = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}{norm}.weight"] = draw.torch.ones(E, dtype=dtype)
        for _, name, outputs, inputs in LINEAR:
            for part, tensor in layer(draw, outputs, inputs).items():
                tensors[f"{block}{name}.{part}"] = tensor.contiguous()
            if kind == "torchao_int8":
                metadata[f"{block}{name}.weight"] = json.dumps({"_type": "Int8Tensor"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": E,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": D,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INNER,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **more,
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata=metadata or None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
