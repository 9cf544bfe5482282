"""Makes `cases/`: adapters of PEFT on tiny random models, with PEFT's own outputs and gradients.

python tests/peft/make.py             every case, and the outputs of the adapter that Rust saved (packages: tests/peft/requirements.txt)
python tests/peft/make.py --check     writes nothing; names what differs from the files that are there

A folder of `cases/` has `config.json` and `model.safetensors` (attention weights alone) of the model without the
adapter, `adapter_config.json` and `adapter_model.safetensors` as PEFT writes them, and `golden.safetensors`:
`layer{i}.in`, the input of an attention module (B, T, E); `layer{i}.out`, `layer{i}.merged` and `layer{i}.base`, its
output with the adapter, with the adapter merged and without it; and `grad.<name>`, the gradients of the sum of
`out * out` of the last layer for the trained parameters, by PEFT's names. `peft_model` has `state_dict.safetensors` too, the
state dict of the whole PEFT model.

`saved/` is written by the test `lora_saved_adapter_has_the_bytes_that_peft_read` (with UPDATE_EXPECT=1). This script loads it
with PEFT onto the model of the case `plain` and records the outputs in `saved/golden.safetensors`: so PEFT has read
these bytes, and the test checks that Rust writes the same bytes and computes the same outputs. To check: run
`UPDATE_EXPECT=1 cargo test --test peft saved`, then `python tests/peft/make.py --check`.
"""

import argparse
import json
import sys
import tempfile
import zlib
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent
BATCH, LENGTH, VOCABULARY = 2, 5, 16

LLAMA = dict(
    model_type="llama", hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=32, attention_bias=False,
)
PHI3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 32}
NEOX = dict(
    model_type="gpt_neox", hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
    vocab_size=VOCABULARY, max_position_embeddings=32,
)
MODERNBERT = dict(
    model_type="modernbert", hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    cls_token_id=1, sep_token_id=2, reference_compile=False,
)
GPT2 = dict(model_type="gpt2", n_embd=16, n_inner=8, n_layer=1, n_head=4, vocab_size=VOCABULARY, n_positions=32)
BERT = dict(
    model_type="bert", hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
    vocab_size=VOCABULARY, max_position_embeddings=32,
)

QV = ["q_proj", "v_proj"]
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]

# Model, options of the adapter, and the attention module of a layer.
CASES = {
    "plain": (LLAMA, dict(r=4, lora_alpha=8, target_modules=QV), "model.layers.{}.self_attn"),
    "rslora": (LLAMA, dict(r=4, lora_alpha=6, target_modules=QKVO, use_rslora=True), "model.layers.{}.self_attn"),
    "rank_pattern": (
        LLAMA,
        dict(
            r=2, lora_alpha=8, target_modules=r".*\.self_attn\.(q|k|o)_proj",
            rank_pattern={"k_proj": 3, r"^model.layers\.1.*q_proj": 5}, alpha_pattern={"layers.0.self_attn.o_proj": 1},
        ),
        "model.layers.{}.self_attn",
    ),
    "one_layer": (
        LLAMA, dict(r=2, lora_alpha=4, target_modules=QKVO, layers_to_transform=[1], exclude_modules=["k_proj"]),
        "model.layers.{}.self_attn",
    ),
    "bias_all": (
        {**LLAMA, "attention_bias": True}, dict(r=2, lora_alpha=4, target_modules=QV, bias="all"),
        "model.layers.{}.self_attn",
    ),
    "bias_lora_only": (
        BERT, dict(r=2, lora_alpha=4, target_modules=["query", "value"], bias="lora_only"),
        "encoder.layer.{}.attention.self",
    ),
    "modules_to_save": (
        LLAMA, dict(r=2, lora_alpha=4, target_modules=QV, modules_to_save=["o_proj"]), "model.layers.{}.self_attn",
    ),
    "fused_by_part": (PHI3, dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "o_proj"]), "model.layers.{}.self_attn"),
    "fused_by_head": (
        NEOX, dict(r=4, lora_alpha=8, target_modules=["query_key_value"]), "gpt_neox.layers.{}.attention",
    ),
    "fused_wqkv": (MODERNBERT, dict(r=4, lora_alpha=8, target_modules=["Wqkv"]), "layers.{}.attn"),
    "conv1d": (
        GPT2, dict(r=4, lora_alpha=8, target_modules=["c_attn", "attn.c_proj"], fan_in_fan_out=True),
        "transformer.h.{}.attn",
    ),
    "dropout": (
        LLAMA, dict(r=4, lora_alpha=8, target_modules=["o_proj"], lora_dropout=0.5), "model.layers.{}.self_attn",
    ),
    "peft_model": (LLAMA, dict(r=4, lora_alpha=8, target_modules=QV), "model.layers.{}.self_attn"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    differing = []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            record(name, *case, Path(folder))
            differing += keep(Path(folder), ROOT / "cases" / name, arguments.check)
    if (ROOT / "saved" / "adapter_model.safetensors").is_file():
        with tempfile.TemporaryDirectory() as folder:
            record_saved(Path(folder))
            differing += keep(Path(folder), ROOT / "saved", arguments.check)
    print("\n".join(["would change:", *differing]) if differing else "done")
    return 1 if differing else 0


def make_model(config):
    auto = AutoModel if config["model_type"] in ("bert", "modernbert") else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return model


def is_attention(key):
    """Returns whether a parameter is that of a projection of attention."""
    return any(part in key for part in (".attn.", "attention.", "self_attn.")) and "LayerNorm" not in key


def record(name, config, options, attention, folder):
    torch.manual_seed(zlib.crc32(name.encode()))
    model = make_model(config)
    model.config.save_pretrained(folder)
    stored = {key: tensor.clone() for key, tensor in model.state_dict().items() if is_attention(key)}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    adapted = get_peft_model(model, LoraConfig(**options)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    tensors = {}
    found = inputs_and_outputs(adapted, attention)
    for i, call in enumerate(found):
        tensors[f"layer{i}.in"] = call["in"]
        tensors[f"layer{i}.out"] = call["out"]
        # The layer without the adapter, over the same input.
        with torch.no_grad(), adapted.disable_adapter():
            if options.get("bias", "none") == "none" and "modules_to_save" not in options:
                tensors[f"layer{i}.base"] = call["run"](call["in"])
    adapted.zero_grad()
    found[-1]["run"](found[-1]["in"]).square().sum().backward()
    prefix = attention.format(len(found) - 1).removesuffix(".self") + "."
    for key, parameter in adapted.named_parameters():
        if parameter.grad is not None and prefix in key and "LayerNorm" not in key:
            key = key.replace(".default.", ".").replace(".modules_to_save.", ".")
            tensors[f"grad.{key}"] = parameter.grad
    # PEFT writes a name of the machine's folder for a model that has none.
    adapted.peft_config["default"].base_model_name_or_path = name
    adapted.save_pretrained(folder)
    written = load_file(folder / "adapter_model.safetensors")
    written = {key: written[key] for key in written if is_attention(key)}
    save_file(written, folder / "adapter_model.safetensors", {"format": "pt"})
    if name == "peft_model":
        state = {key: tensor.clone() for key, tensor in adapted.state_dict().items() if is_attention(key)}
        save_file(state, folder / "state_dict.safetensors", {"format": "pt"})
    merged = adapted.merge_and_unload().eval()
    for i, call in enumerate(found):
        tensors[f"layer{i}.merged"] = inputs_and_outputs(merged, attention)[i]["run"](call["in"]).detach()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "golden.safetensors")
    (folder / "README.md").unlink()


def inputs_and_outputs(model, attention):
    """Returns, for each layer, the input and output of its attention module, and a function that computes the module for another input."""
    calls, hooks = [], []
    named = dict(model.named_modules())
    i = 0
    while (module := next((found for key, found in named.items() if key.endswith(attention.format(i))), None)) is not None:
        key = next(key for key in named if key.endswith(attention.format(i)))
        # BERT's output projection is outside of the module.
        dense = named.get(key.removesuffix(".self") + ".output.dense") if key.endswith(".self") else None
        call = {}

        def hook(module, args, kwargs, output, call=call, dense=dense):
            hidden = args[0] if args else kwargs["hidden_states"]
            call["in"] = hidden.detach().clone()

            def run(xs):
                moved = {**kwargs, "hidden_states": xs} if not args else kwargs
                out = module.forward(*((xs,) + args[1:] if args else ()), **moved)
                out = out[0] if isinstance(out, tuple) else out
                return dense(out) if dense is not None else out

            call["run"] = run

        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        calls.append(call)
        i += 1
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    options = {} if attention.startswith(("encoder", "layers")) else {"use_cache": False}
    with torch.no_grad():
        model(ids, **options)
        for hook in hooks:
            hook.remove()
        for call in calls:
            call["out"] = call["run"](call["in"])
    return calls


def record_saved(folder):
    """Loads the adapter that Rust saved onto the model of `plain`, and records outputs."""
    torch.manual_seed(zlib.crc32(b"plain"))
    config, _, attention = CASES["plain"]
    model = PeftModel.from_pretrained(make_model(config), ROOT / "saved").eval()
    saved = load_file(ROOT / "saved" / "adapter_model.safetensors")
    read = get_peft_model_state_dict(model)
    assert saved.keys() == read.keys(), (saved.keys() ^ read.keys())
    assert all(torch.equal(saved[key], read[key]) for key in saved)
    tensors = {}
    for i, call in enumerate(inputs_and_outputs(model, attention)):
        tensors[f"layer{i}.in"], tensors[f"layer{i}.out"] = call["in"], call["out"]
    save_file(tensors, folder / "golden.safetensors")


def keep(made, folder, check):
    differing = []
    for file in sorted(made.iterdir()):
        kept = folder / file.name
        if check:
            if not kept.is_file() or not same(kept, file):
                differing.append(str(kept.relative_to(ROOT)))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(file.read_bytes())
    return differing


def unordered(config):
    """Returns a config with its lists sorted, since PEFT writes the names of modules in the order of a set."""
    return {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}


def same(one, other):
    if one.suffix == ".json":
        return unordered(json.loads(one.read_text())) == unordered(json.loads(other.read_text()))
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.allclose(a[key], b[key], rtol=1e-4, atol=1e-5) for key in a)


if __name__ == "__main__":
    sys.exit(main())
