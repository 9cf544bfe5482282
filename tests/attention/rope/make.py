"""Rotary numbers of Hugging Face's transformers: writes numbers.json and numbers.safetensors beside itself.

    python tests/attention/rope/make.py          needs torch, transformers, safetensors

PyTorch's vectorised powers differ from build to build in the last digit, which a far position multiplies; its scalar ones
are rounded correctly.
"""

import json
import os
from pathlib import Path

os.environ["ATEN_CPU_CAPABILITY"] = "default"

import torch
from safetensors.torch import save_file
from transformers import GlmConfig, LlamaConfig, Phi3Config
from transformers.models.glm import modeling_glm as glm
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3

HERE = Path(__file__).resolve().parent
D, T = 16, 4
FAMILIES = {
    "llama": (LlamaConfig, llama.LlamaRotaryEmbedding, llama.apply_rotary_pos_emb),
    "glm": (GlmConfig, glm.GlmRotaryEmbedding, glm.apply_rotary_pos_emb),
    "phi3": (Phi3Config, phi3.Phi3RotaryEmbedding, phi3.apply_rotary_pos_emb),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
OURS_YARN = {"factor": 4.0, "original_context": 128}
LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(D // 2)],
    "long_factor": [1.0 + 1.7 * i for i in range(D // 2)],
}
HALF_LONG = {name: factors[: D // 4] for name, factors in LONG.items()}


def case(family, theirs, scaling="none", ours=None, base=10000.0, context=512, **options):
    """The rope_parameters of transformers, and the same as a RopeConfig in JSON."""
    parameters = {"rope_type": "default", "rope_theta": base} | theirs
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial < 1.0 and scaling != "proportional":
        options["rotary_dim"] = int(D * partial)
    config = {"base": base, "scaling": scaling if ours is None else {scaling: ours}} | options
    return family, parameters, context, config


CASES = {
    "plain": case("llama", {}),
    "base": case("llama", {}, base=1000000.0),
    "partial": case("phi3", {"partial_rotary_factor": 0.5}),
    "interleaved": case("glm", {"partial_rotary_factor": 1.0}, style="interleaved"),
    "interleaved_partial": case("glm", {"partial_rotary_factor": 0.25}, style="interleaved"),
    "linear": case("llama", {"rope_type": "linear", "factor": 3.0}, "linear", {"factor": 3.0}),
    "dynamic": case(
        "llama",
        {"rope_type": "dynamic", "factor": 2.5},
        "dynamic",
        {"factor": 2.5, "original_context": 64},
        context=64,
    ),
    "llama3": case(
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 512},
        base=500000.0,
        context=4096,
    ),
    "yarn": case("llama", YARN, "yarn", OURS_YARN),
    "yarn_betas": case(
        "llama",
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
        "yarn",
        OURS_YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
    ),
    "yarn_deepseek": case(
        "llama",
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
        "yarn",
        OURS_YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    ),
    "yarn_gpt_oss": case(
        "llama", YARN | {"truncate": False}, "yarn", OURS_YARN | {"truncate": False}, base=150000.0
    ),
    "yarn_one_border": case(
        "llama",
        YARN | {"original_max_position_embeddings": 4},
        "yarn",
        OURS_YARN | {"original_context": 4},
    ),
    "longrope": case(
        "phi3",
        {"rope_type": "longrope", "original_max_position_embeddings": 64} | LONG,
        "long_rope",
        {"original_context": 64, "factor": 8.0} | LONG,
    ),
    "longrope_given": case(
        "phi3",
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "factor": 16.0,
            "attention_factor": 1.25,
            "partial_rotary_factor": 0.5,
        }
        | HALF_LONG,
        "long_rope",
        {"original_context": 64, "factor": 16.0, "attention_factor": 1.25} | HALF_LONG,
    ),
    "proportional": case(
        "llama",
        {"rope_type": "proportional", "partial_rotary_factor": 0.4, "factor": 2.0},
        "proportional",
        {"factor": 2.0, "proportion": 0.4},
    ),
}
# From the start; a step of decoding; ragged; far.
CALLS = [
    [[0, 1, 2, 3]],
    [[7, 8, 9, 10]],
    [[0, 0, 1, 2], [60, 61, 62, 63]],
    [[61, 62, 63, 64]],
    [[500, 3, 90, 200], [100, 101, 102, 103]],
    [[5000, 16383, 131071, 1000001]],
]


def main():
    torch.manual_seed(5)
    xs = torch.randn(2, 1, T, D)
    tensors = {"xs": xs}
    for name, (family, parameters, context, _) in CASES.items():
        config_class, rotary_class, apply = FAMILIES[family]
        config = config_class(
            hidden_size=2 * D,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=D,
            max_position_embeddings=context,
            pad_token_id=0,
            rope_parameters=parameters,
            # Phi 3 has a separate field that takes precedence over the field of the parameters.
            original_max_position_embeddings=parameters.get("original_max_position_embeddings", context),
        )
        for n, positions in enumerate(CALLS):
            positions = torch.tensor(positions)
            cos, sin = rotary_class(config)(xs, positions)
            ys, _ = apply(xs, xs, cos, sin)
            assert ys.shape == xs.shape and ys.dtype == torch.float32
            tensors[f"{name}.{n}"] = ys.contiguous()
    configs = {name: config for name, (_, _, _, config) in CASES.items()}
    numbers = json.dumps({"calls": CALLS, "configs": configs}, indent=1)
    (HERE / "numbers.json").write_text(numbers + "\n")
    save_file(tensors, HERE / "numbers.safetensors")


main()
