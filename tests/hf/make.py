"""Makes `models/`, the attention of tiny random Hugging Face models: configuration, weights, inputs and outputs.

python tests/hf/make.py                     every folder, and variants.json
python tests/hf/make.py --only llama mpt    some folders
python tests/hf/make.py --check             writes nothing; names what differs from the files that are there

A folder holds `config.json` as `save_pretrained` writes it, `model.safetensors` with the attention weights alone, under
the names of that file, and `golden.safetensors`: `layer{i}.in` and `layer{i}.out` (B, T, E), and for encoders
`attention_mask` (B, T), u8; `positions` are those on the axes of rotary positions. `layer{i}.keys` and
`layer{i}.values` are the inputs of keys and values, where those of queries are others; attention with a name has all of
these below the name. Below `decoder.` and `cross.` are those of the decoder of a model that has both, and the
encoder's outputs as `cross.layer{i}.memory`. An output is what the output projection gives, biases included, before a residual or norm.
Everything is f32, computed by the eager implementation of attention as a rule. `variants.json` is described in `variants.py`.
"""

import argparse
import json
import re
import sys
import tempfile
import zlib
from pathlib import Path

sys.dont_write_bytecode = True

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils import logging

from cases import CASES, LENGTH
from randomise import randomise
from variants import variants

ROOT = Path(__file__).resolve().parent
BATCH = 2
PADDED = 4  # tokens hidden at the end of an encoder's second row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="FOLDER", help="make these folders and nothing else"
    )
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    differing = []
    for name in arguments.only or CASES:
        with tempfile.TemporaryDirectory() as folder:
            record(name, CASES[name], Path(folder))
            differing += keep(Path(folder), ROOT / "models" / name, arguments.check)
    if not arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            text = "[\n" + ",\n".join(json.dumps(variant) for variant in variants()) + "\n]"
            (Path(folder) / "variants.json").write_text(text + "\n")
            differing += keep(Path(folder), ROOT, arguments.check)
    print("\n".join(["would change:", *differing]) if differing else "done")
    return 1 if differing else 0


def random_model(name, case):
    """Returns the model of a case, with random numbers that the name determines."""
    torch.manual_seed(zlib.crc32(name.encode()))
    config = AutoConfig.for_model(case.model_type, **case.config)
    # The eager implementation adds Falcon's ALiBi twice, unlike the default one and Falcon's own code.
    implementation = "sdpa" if case.config.get("alibi") else "eager"
    make = getattr(case.auto_class, "from_config", None) or case.auto_class._from_config
    model = make(config, attn_implementation=implementation).eval()
    randomise(model, lambda parameter: parameter.shape[-1])
    return model


def record(name, case, folder):
    model = random_model(name, case)
    tensors = run(model, case)
    model.save_pretrained(folder)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    stored = load_file(folder / "model.safetensors")
    attention = {key: tensor for key, tensor in stored.items() if is_attention(key, not case.decoder)}
    save_file(attention, folder / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "golden.safetensors")


@torch.no_grad()
def run(model, case):
    tensors, hooks = {}, []
    layers = (model if case.model_type.endswith("t5") else model.base_model).get_submodule(case.layers)

    def note_input(key):
        def hook(_, args, kwargs):
            named = [kwargs[name] for name in ("hidden_states", "query") if name in kwargs]
            tensors[key] = in_one_row((named or args)[0])

        return hook

    def note_memory(key):
        def hook(_, args, kwargs):
            named = [kwargs[name] for name in ("key_value_states", "encoder_hidden_states") if name in kwargs]
            tensors[key] = (named or args[1:])[0].clone()

        return hook

    def note_output(key):
        return lambda _, args, output: tensors.__setitem__(key, in_one_row(output))

    def note_projections(name, projections):
        for key, module in projections.items():
            hooks.append(module.register_forward_pre_hook(note_input(f"{name}.{key}"), with_kwargs=True))

    def note(layers, attention, out_proj, kind=""):
        # The layers of all stages, one after the other.
        layers = [block for layer in layers for block in blocks_of(layer)]
        for i, layer in enumerate(layers):
            name = f"{kind}layer{i}"
            # Layers without attention: convolutions, recurrences.
            if not (has_module(layer, attention) and has_module(layer, out_proj)):
                continue
            module = layer.get_submodule(attention)
            hooks.append(module.register_forward_pre_hook(note_input(f"{name}.in"), with_kwargs=True))
            if case.separate:
                inputs = zip(("in", "keys", "values"), case.separate)
                note_projections(name, {key: module.get_submodule(projection) for key, projection in inputs})
            hooks.append(layer.get_submodule(out_proj).register_forward_hook(note_output(f"{name}.out")))
            if kind == "cross.":
                hooks.append(module.register_forward_pre_hook(note_memory(f"{name}.memory"), with_kwargs=True))

    note(layers, case.attention, case.out_proj)
    for kind, attention in case.named.items():
        note(layers, attention, f"{attention}.o_proj", f"{kind}.")
    for kind, (path, attention, out_proj) in case.decoder.items():
        base = model if case.model_type.endswith("t5") else model.base_model
        note(base.get_submodule(path), attention, out_proj, f"{kind}.")
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if case.encoder and case.inputs is None:
        mask[1, LENGTH - PADDED :] = 0
    if case.inputs is not None:
        inputs = case.inputs(model.config)
        model(**inputs)
        positions = case.positions(model.config) if case.positions else inputs.get("position_ids")
        if positions is not None:
            tensors["positions"] = positions.clone()
    else:
        ids = torch.randint(3, model.config.vocab_size, (BATCH, LENGTH))
        decoder = {"decoder_input_ids": torch.randint(3, model.config.vocab_size, (BATCH, 7))} if case.decoder else {}
        model = model.encoder if case.model_type == "t5" else model
        model(input_ids=ids, attention_mask=mask, **decoder)
    for hook in hooks:
        hook.remove()
    if case.encoder and case.inputs is None:
        tensors["attention_mask"] = mask.to(torch.uint8)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values() if tensor.is_floating_point())
    return tensors


def blocks_of(layer):
    """The layers of a stage, or the layer itself."""
    return list(layer) if isinstance(layer, torch.nn.ModuleList) else getattr(layer, "blocks", [layer])


def has_module(layer, path):
    try:
        return layer.get_submodule(path) is not None
    except AttributeError:
        return False


def in_one_row(tokens):
    """A copy; rows and columns of an image are one row of tokens."""
    return (tokens.flatten(1, 2) if tokens.ndim == 4 else tokens).clone(memory_format=torch.contiguous_format)


def is_attention(key, without_decoder):
    if key.startswith("decoder.block") and without_decoder:
        return False
    # What the layers of DeBERTa and of Mistral Large 4 share.
    if re.search(r"rel_embeddings|encoder\.LayerNorm|(rotary_emb|lerope)\.alpha", key):
        return True
    return re.search(r"att|Wqkv|Attention", key, re.IGNORECASE) and not re.search(
        r"ln_attn|att\w*(?<!sub_)norm\.|LayerNorm|hc_attn|hyper_connection", key
    )


def keep(made, folder, check):
    """Moves the files that were made to their folder, or names those that differ from what is there."""
    differing = []
    for file in sorted(made.iterdir()):
        kept = folder / file.name
        if check and not same(file, kept):
            differing.append(str(kept.relative_to(ROOT)))
        elif not check:
            folder.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(file.read_bytes())
    return differing


def same(made, kept):
    """Whether two files hold the same: text to the letter, tensors to what products on other processors differ by."""
    if not kept.exists():
        return False
    if made.suffix != ".safetensors":
        return made.read_bytes() == kept.read_bytes()
    made, kept = load_file(made), load_file(kept)
    return made.keys() == kept.keys() and all(torch.allclose(made[key], kept[key], 1e-4, 1e-5) for key in made)


if __name__ == "__main__":
    sys.exit(main())
