"""Numbers of Hugging Face's transformers for options of the layer: writes numbers.json and numbers.safetensors.

    python tests/attention/options/make.py          needs torch, transformers, safetensors

For each model of CASES, its first attention module: weights under the crate's canonical names, `in` and `out` (B, T, E).
For T5, tables of biases, what they are for a few calls, and the bucket of every distance.
"""

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.t5.modeling_t5 import T5Attention

HERE = Path(__file__).resolve().parent
SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MPT_SIZES = {"vocab_size": 31, "d_model": 24, "n_heads": 6, "n_layers": 1, "max_seq_len": 64}
FALCON = {"hidden_size": 12, "alibi": True, "new_decoder_architecture": False, "multi_query": False, "bias": False}
NORMS = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
# The model's type and config; the path of its attention; the call's length.
CASES = {
    "hunyuan": ("hunyuan_v1_dense", SIZES | {"head_dim": 4}, "model.layers.0.self_attn", 9),
    "olmo": ("olmo", SIZES | {"clip_qkv": 0.4}, "model.layers.0.self_attn", 9),
    "mpt": ("mpt", MPT_SIZES | {"attn_config": {"clip_qkv": 0.6}}, "transformer.blocks.0.attn", 9),
    # Positions that bf16 rounds.
    "falcon": ("falcon", SIZES | FALCON, "transformer.h.0.self_attention", 270),
}
BUCKETS = [(32, 128, True), (32, 128, False), (16, 20, True), (9, 64, True), (5, 700, False), (4, 2, True)]
CALLS = [(7, 7, 0), (1, 9, 8), (2, 140, 100), (40, 2, 0)]


def main():
    torch.manual_seed(5)
    tensors = {}
    for name, (model_type, config, path, length) in CASES.items():
        config = AutoConfig.for_model(model_type, **config)
        # The eager implementation adds Falcon's biases twice, unlike the default one and Falcon's own code.
        implementation = "sdpa" if name == "falcon" else "eager"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        if name == "mpt":
            # Not passed by any caller, for any config.
            rule = model.transformer.build_mpt_alibi_tensor
            model.transformer.build_mpt_alibi_tensor = functools.partial(rule, alibi_bias_max=3)
        attention = model.get_submodule(path)
        parameters = dict(attention.named_parameters())
        for parameter in parameters.values():
            parameter.data = torch.randn(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5)
        tensors |= {f"{name}.{key}": tensor for key, tensor in run(model, attention, length).items()}
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in canonical(name, parameters).items()}
    for n, (num_buckets, max_distance, bidirectional) in enumerate(BUCKETS):
        config = AutoConfig.for_model("t5", d_model=6, d_kv=2, num_heads=3)
        config.relative_attention_num_buckets = num_buckets
        config.relative_attention_max_distance = max_distance
        config.is_decoder = not bidirectional
        attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
        tensors[f"t5.{n}.relative_attention_bias.weight"] = attention.relative_attention_bias.weight.data
        for call, (t_q, t_kv, offset) in enumerate(CALLS):
            bias = attention.compute_bias(t_q, t_kv, past_seen_tokens=offset)
            tensors[f"t5.{n}.bias.{call}"] = bias.detach().contiguous()
        # Later keys first: a query at 0 and keys from 900 down to -900.
        buckets = attention._relative_position_bucket(
            torch.arange(900, -901, -1), bidirectional, num_buckets, max_distance
        )
        tensors[f"t5.{n}.buckets"] = buckets.to(torch.uint8)
    save_file(tensors, HERE / "numbers.safetensors")
    (HERE / "numbers.json").write_text(json.dumps({"buckets": BUCKETS, "calls": CALLS}) + "\n")


@torch.no_grad()
def run(model, attention, length):
    seen = {}

    def note(_, args, kwargs, output):
        seen["in"] = (args[0] if args else kwargs["hidden_states"]).clone()
        seen["out"] = output[0].clone()

    hook = attention.register_forward_hook(note, with_kwargs=True)
    ids = torch.randint(1, 31, (1, length))
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    hook.remove()
    return seen


def canonical(name, parameters):
    if name == "mpt":
        packed = dict(zip(["q_proj", "k_proj", "v_proj"], parameters["Wqkv.weight"].data.chunk(3)))
        parts = packed | {"o_proj": parameters["out_proj.weight"].data}
        return {f"{key}.weight": tensor for key, tensor in parts.items()}
    if name == "falcon":
        # (H, 3, D, E)
        packed = parameters["query_key_value.weight"].data.reshape(6, 3, -1, 12)
        parts = {key: packed[:, i].reshape(12, 12) for i, key in enumerate(["q_proj", "k_proj", "v_proj"])}
        return {f"{key}.weight": tensor for key, tensor in (parts | {"o_proj": parameters["dense.weight"].data}).items()}
    names = {key: key.replace(key.split(".")[0], NORMS.get(key.split(".")[0], key.split(".")[0])) for key in parameters}
    return {names[key]: parameter.data for key, parameter in parameters.items()}


main()
