"""Makes `gguf_models/`: the attention of tiny random models in GGUF files, as llama.cpp's converter writes them.

python tests/hf/make_gguf.py LLAMA_CPP                  every file
python tests/hf/make_gguf.py LLAMA_CPP --only qwen3moe  some files
python tests/hf/make_gguf.py LLAMA_CPP --check          writes nothing; computes everything again

LLAMA_CPP is a folder of llama.cpp's source. Packages: `requirements_gguf.txt`, which says where to find the source.

A model of transformers is saved, converted to a file in f32 by llama.cpp's converter, and llama.cpp's logits for that
file are compared with transformers' logits. Then `{case}.gguf` gets the file's metadata and its tensors of attention,
without the vocabulary, of four or five layers, and `{case}.safetensors` gets `layer{i}.in` and `layer{i}.out` (1, T, E) of transformers. Weights
are f16, which loses nothing: all random numbers are rounded to f16 first.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import llama_cpp
from gguf_cases import CASES as DECODERS
from gguf_cases import KEPT, ZEROED
from gguf_cases import PUBLISHED as PUBLISHED_DECODERS
from gguf_hybrid_cases import CASES as OTHERS
from gguf_hybrid_cases import LOGIT_FACTORS
from gguf_hybrid_cases import PUBLISHED as PUBLISHED_OTHERS
from make import random_model, run, same

CASES = DECODERS | OTHERS
PUBLISHED = PUBLISHED_DECODERS | PUBLISHED_OTHERS
ROOT = Path(__file__).resolve().parent / "gguf_models"
# The largest difference of logits, as a part of the largest logit. llama.cpp reads some activations from tables in f16.
TOLERANCE = 2e-3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, metavar="LLAMA_CPP", help="a folder of llama.cpp's source")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="make these files and nothing else")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, and write nothing")
    arguments = parser.parse_args()
    llama_cpp.use_source(arguments.llama_cpp.resolve())
    torch.set_num_threads(1)  # one order of summation
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    library = llama_cpp.Library()
    failed = []
    for name in arguments.only or CASES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                error = record(name, CASES[name], Path(folder), library)
            except Exception as problem:
                print(f"{name}: {type(problem).__name__}: {problem}")
                failed.append(name)
                continue
            is_equal = error < TOLERANCE
            print(f"{name}: logits differ by {error:.1e} of the largest{'' if is_equal else ', which is too much'}")
            made = {file: Path(folder) / file for file in (f"{name}.gguf", f"{name}.safetensors")}
            if not is_equal or (arguments.check and not all(same(path, ROOT / file) for file, path in made.items())):
                failed.append(name)
            elif not arguments.check:
                ROOT.mkdir(exist_ok=True)
                for file, path in made.items():
                    (ROOT / file).write_bytes(path.read_bytes())
    print("\n".join(["failed:", *failed]) if failed else "done")
    return 1 if failed else 0


def record(name, case, folder, library):
    """Writes both files of a case to a folder. Returns the difference of logits, as a part of the largest."""
    model = random_model(name, case)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_zero = name in ZEROED and re.search(ZEROED[name], path)
            parameter.copy_(torch.zeros_like(parameter) if is_zero else parameter.half())
    called, linear = {}, {}

    def note(_, args, kwargs, output):
        called["ids"] = (args[0] if args else kwargs["input_ids"])[0].tolist()
        called["decoder_ids"] = kwargs["decoder_input_ids"][0].tolist() if case.decoder else None
        called["rows"] = output[0][0]

    def note_linear(i):
        def hook(_, args, kwargs, output):
            linear[f"layer{i}.in"] = (args[0] if args else kwargs["hidden_states"]).clone()
            linear[f"layer{i}.out"] = output.clone()

        return hook

    # `run` calls the encoder alone.
    (model.encoder if case.model_type == "t5" else model).register_forward_hook(note, with_kwargs=True)
    for i, layer in enumerate(getattr(model.base_model, "layers", [])):
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.register_forward_hook(note_linear(i), with_kwargs=True)
    tensors = run(model, case) | linear
    checkpoint = folder / "checkpoint"
    model.save_pretrained(checkpoint)
    if name in PUBLISHED:
        fields = json.loads((checkpoint / "config.json").read_text())
        stored = load_file(checkpoint / "model.safetensors")
        PUBLISHED[name](fields, stored)
        (checkpoint / "config.json").write_text(json.dumps(fields))
        save_file(stored, checkpoint / "model.safetensors", {"format": "pt"})
    whole = folder / "whole.gguf"
    llama_cpp.convert(checkpoint, whole, model.config.get_text_config().vocab_size)
    rows = called["rows"] / LOGIT_FACTORS.get(name, 1.0)
    embeds = case.encoder and not case.decoder
    found = library.run(whole, called["ids"], rows.shape[-1], embeds=embeds, decoder_ids=called["decoder_ids"])
    layers = KEPT.get(name, range(4))
    keep_attention(whole, folder / f"{name}.gguf", layers)
    kept = {}
    for i in layers:
        for kind in ("", "decoder.", "cross."):
            for part in ("in", "out", "memory"):
                key = f"{kind}layer{i}.{part}"
                if key in tensors:
                    kept[key] = tensors[key][:1].contiguous()
    save_file(kept, folder / f"{name}.safetensors")
    return ((found - rows).abs().max() / rows.abs().max()).item()


# The norms of layers, whose names begin like the names of attention.
NORMS_OF_LAYERS = r"attn_norm|attn_norm_2|attn_post_norm|attn_output_norm|attn_out_norm"


def keep_attention(whole, file, layers):
    """Copies the metadata and the tensors of attention of some layers of a file. Matrices become f16."""
    import gguf

    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(file, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not re.match(r"GGUF\.|general\.|tokenizer\.", field.name):
            kind, entries = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=entries)
    for tensor in reader.tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        if layer and int(layer[1]) not in layers:
            continue
        if re.search(r"attn_|ssm_|rope_|rel_b", tensor.name) and not re.search(rf"\.({NORMS_OF_LAYERS})\.", tensor.name):
            numbers = np.array(tensor.data)
            half = numbers.astype(np.float16)
            if numbers.ndim == 2 and np.array_equal(half.astype(np.float32), numbers):
                numbers = half
            writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
