"""Makes `long_context/`: two tiny random decoders whose rotary frequencies depend on the number of positions, and the
tokens that transformers generates with them around the original context.

python tests/causal_lm/long_context.py     (packages: tests/hf/requirements.txt)

`prompts/` has random token ids, which are read. `cases.json` lists batches: the model, the beginning of a prompt for each
sequence, and the tokens of greedy generation with a cache, f32. Shorter prompts of a batch are padded on the left.
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

ROOT = Path(__file__).resolve().parent / "long_context"
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.5,
}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.02, 1.03, 1.03],
    "long_factor": [1.1, 2.3, 14.0, 64.0], "original_max_position_embeddings": 4096,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(**SIZES, max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=LONG_ROPE),
    ),
    "llama_dynamic": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rms_norm_eps=1e-6, max_position_embeddings=2048, rope_parameters=DYNAMIC),
    ),
}
# For each sequence a prompt and the number of its first tokens that are given; and the tokens to generate.
CASES = [
    # Within the original context, across it while generating, and beyond it.
    ("phi3", [("4000", 4000)], 12),
    ("phi3", [("4090", 4090)], 12),
    ("phi3", [("5000", 5000)], 12),
    ("phi3", [("4090", 4090), ("4000", 3000)], 12),
    ("phi3", [("4000", 700), ("5000", 5000)], 12),
    ("llama_dynamic", [("5000", 2000)], 12),
    ("llama_dynamic", [("4000", 2040)], 16),
    ("llama_dynamic", [("5000", 5000)], 12),
    ("llama_dynamic", [("5000", 3000), ("4000", 700)], 12),
    ("llama_dynamic", [("4000", 700), ("4090", 2045)], 12),
]


def prompt(name, tokens):
    return [int(token) for token in (ROOT / "prompts" / f"{name}.txt").read_text().split(",")][:tokens]


def generate(model, prompts, tokens):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    made = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)
    return made[:, longest:].tolist()


def model_of(name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation="eager").float().eval()


def main():
    torch.set_num_threads(1)
    for name in MODELS:
        model_of(name).save_pretrained(ROOT / name)
        (ROOT / name / "generation_config.json").unlink(missing_ok=True)
    cases = []
    for name, sequences, tokens in CASES:
        # A new model for each case: with dynamic scaling a model keeps the frequencies of the longest call so far.
        made = generate(model_of(name), [prompt(*sequence) for sequence in sequences], tokens)
        listed = [{"prompt": text, "len": count, "generated": row} for (text, count), row in zip(sequences, made)]
        cases.append({"model": name, "sequences": listed})
    (ROOT / "cases.json").write_text("[\n" + ",\n".join(f"  {json.dumps(case)}" for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
