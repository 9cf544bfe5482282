"""The card of each folder and the index of them all."""

import textwrap

LOAD = """let vb = weights::open("models/{folder}/model.safetensors", DType::F32, &Device::Cpu)?;
let layout = WeightLayout::detect(&vb)?;
let mha = MultiHeadAttention::load(&cfg, layout, vb)?;"""
LOAD_TABLE = """let vb = weights::open("models/{folder}/model.safetensors", DType::F32, &Device::Cpu)?;
let embedding = candle_nn::embedding({vocab_size}, {embed_dim}, vb.pp("embedding"))?;"""
LOAD_NUMBERS = """let numbers = candle_core::safetensors::load("models/{folder}/io.safetensors", &Device::Cpu)?;"""
OPEN = """let vb = weights::open("models/{folder}/model.safetensors", DType::F32, &Device::Cpu)?;"""

INDEX = """# Small layers with PyTorch's numbers

Each folder is one system: a layer or a single step of attention, with PyTorch's inputs and results. The crate's tests
read the folders, and they are tiny checkpoints to try the loader with. `export.py` makes every file here.

## Files of a folder

| file | content |
| --- | --- |
| `config.json` | class and arguments, seed and draw order of the weights, each parameter's shape and SHA-256 (over its little-endian f32 bytes), the cases; `layout` and `layer` say how this crate loads it |
| `model.safetensors` | the state dict under PyTorch's names, f32; absent where there are no parameters, or where `weights` in config.json says where they come from |
| `io.safetensors` | inputs and results, as `<case>.<tensor>` |
| `README.md` | the card |

The tensors of a case: its inputs under the names of `forward`'s arguments (an input that is None is absent),
`output` (f32), `expected_f64` (the same weights and inputs in f64), `attn_weights` and `attn_weights_f64`, and
`output_f16`, `output_bf16`: PyTorch's results when module and inputs are converted to that dtype, on the CPU, with
an explicit matmul and softmax. Masks are u8, ids and lengths i64. `output` is within {f32:.0e} of
`expected_f64`, and `expected_f64` within {loops:.0e} of a second implementation in plain Python loops
(`_systems/loops.py`); the script writes nothing if that fails.

Inputs that are not a tutorial's own are multiples of 1/64 below 2 in size, which f16 and bf16 represent without
rounding. `printed_numbers.json` lists the numbers that the tutorials print and, for each value, whether the stored
number rounds to it.

## The systems

| folder | system | layout |
| --- | --- | --- |
{rows}

### Tests

The layer is held to 2e-6 of PyTorch in f64; in f16 and bf16 it errs, over the cases of a system, at most twice as
much as PyTorch itself.

| system | folder | test |
| --- | --- | --- |
| "Hello shiny sun", attention without weights | `shiny_sun` | `golden::pieces::small_examples_match_scores_weights_and_outputs` |
| softmax(QKᵀ/√2)V on 2 × 2 | `qkv_2x2` | `golden::pieces::small_examples_match_scores_weights_and_outputs` |
| scores of all heads as one product | `batched_matmul` | `golden::pieces::batched_matmul_matches_each_head_alone` |
| the causal mask as an additive triangle | `additive_mask` | `golden::pieces::causal_mask_matches_additive_mask` |
| dropout of weights | `dropout`, `frontend_48_train` | `golden::pieces::dropout_mask_matches_pytorch`, `golden::layers::dropout_in_frontend_48_train_matches_pytorch` |
| single heads (Raschka, ch. 3) | `book_self_attention_v1`, `_v2`, `book_causal` | `golden::layers::systems_match_pytorch` |
| stacks of heads | `book_stack`, `_bias`, `_exercise32`, `short_stack`, `short_stack_raw` | `golden::layers::systems_match_pytorch` |
| one projection split into heads | `book_mha`, `_bias`, `_unmasked`, `short_mha` | `golden::layers::systems_match_pytorch` |
| `torch.nn.MultiheadAttention` | `torch_mha`, `_kdim`, `_bias_kv`, `_zero_attn` | `golden::layers::systems_match_pytorch` |
| Dive into Deep Learning | `d2l_mha_100`, `_sizes`, `_sizes_bias`, `d2l_additive`, `d2l_dot_product`, `d2l_masked_softmax`, `d2l_transpose_qkv` | `golden::layers::systems_match_pytorch`, `golden::pieces::d2l_*` |
| tokenizer, embedding and attention | `frontend_tokenizer`, `_embedding`, `frontend_48`, `frontend_1536` | `tokenizer`, `golden::layers::systems_match_pytorch` |
| grouped and single key heads | `gqa_48`, `mqa_48` | `golden::layers::systems_match_pytorch` |
| layouts of GPT-2, Phi-3, MPT, GPT-NeoX, Falcon, BERT | `gpt2_conv1d`, `packed_*`, `bert_self` | `golden::layers::systems_match_pytorch` |
| a layout with two readings | `raw_square` | `weights::folders::model_folders_are_detected_inferred_and_saved_unchanged` |
| seeded initialisation, every parameter bit for bit | all with a `manual_seed` | `init` |
| the printed numbers of the tutorials | `printed_numbers.json` | `golden::printed` |

## Making them again

```sh
pip install -r models/requirements.txt
python models/export.py                     # everything below models/
python models/export.py --only book_mha     # some folders
python models/export.py --check             # writes nothing; names the files that would change
```

`_systems/` has the classes, one file for each source, and `loops.py`, the second implementation. A second run writes
the same bytes. The weights are drawn by PyTorch on x86 with AVX2 or AVX-512; the script stops if PyTorch draws other
weights. Results may differ in the last digit between processors and versions of PyTorch.

## Your own layer

```sh
python models/export.py --layer my_module:build attention.safetensors
```

imports `my_module` (from the current directory or the Python path), calls `build()`, and writes the state dict of
the `nn.Module` it returns: floats as contiguous f32, buffers included, and tied tensors once under each of their
names. It prints every name and shape, what was converted, and the buffers that are not in the state dict. The
number of heads is not in the weights: set it in `MultiHeadAttentionConfig`. Then, in Rust:

```rust,ignore
let vb = weights::open("attention.safetensors", DType::F32, &Device::Cpu)?;
let layout = WeightLayout::detect(&vb)?;
let mha = MultiHeadAttention::load(&cfg, layout, vb)?;
```

[induction_heads](induction_heads) is another model, of two attention layers that this crate trained
(`cargo run --features plot --example induction_heads`). `tokenize_attend --model induction_heads` shows it.
"""


def shape(sizes):
    return "none" if sizes is None else "(" + ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "") + ")"


def table(head, rows):
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def wrapped(text):
    """Markdown whose paragraphs and items have lines of at most 118 columns; tables and code stay as they are."""
    lines, in_code = [], False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if len(line) > 118 and not in_code and not line.startswith("|"):
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(line, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def card(system, config):
    """A folder's README.md."""
    parts = [f"# {system.name}", f"{system.summary}.", f"Source: {system.source}."]
    if "class" in config:
        args = ", ".join(f"{name}={value!r}" for name, value in config.get("args", {}).items())
        parts.append(f"Class: `{config['class']}" + (f"({args})`" if args else "`") + seed(config))
    if "parameters" in config:
        rows = [[f"`{name}`", shape(entry["shape"])] for name, entry in config["parameters"].items()]
        parts += ["## Parameters", table(["name", "shape"], rows)]
    parts += ["## Conventions", "\n".join(f"- {line}" for line in system.conventions)]
    parts += ["## Cases", cases(config["cases"])]
    parts += ["## In Rust", rust(system.name, config, system.layer)]
    return wrapped("\n\n".join(parts)).encode()


def seed(config):
    if config.get("manual_seed") is not None:
        return f", built after `torch.manual_seed({config['manual_seed']})`."
    return "."


def cases(entries):
    if isinstance(entries, list):
        rows = [
            [f"`{case['text']!r}`", f"{case['error']}: `{case['token']}`" if "error" in case else f"`{case['ids']}`"]
            for case in entries
        ]
        return table(["text", "ids"], rows)
    rows = []
    for name, entry in entries.items():
        inputs = ", ".join(f"`{key}` {shape(sizes)}" for key, sizes in entry["inputs"].items())
        others = ", ".join(
            f"`{key}` {shape(value)}" for key, value in entry.items() if key != "inputs" and isinstance(value, list)
        )
        rows.append([f"`{name}`", inputs, others])
    return table(["case", "inputs", "results"], rows)


def rust(folder, config, facts):
    if facts is None:
        if isinstance(config["cases"], list):
            return "`tokenizer.json` has the vocabulary in the format of the `tokenizers` crate."
        return block(LOAD_NUMBERS.format(folder=folder))
    if facts["layout"] == "embedding":
        return block(LOAD_TABLE.format(folder=folder, **facts))
    if facts["layout"] == "additive":
        return f"The names are those that `AdditiveAttention` reads.\n\n{block(OPEN.format(folder=folder))}"
    stated = f"`cfg` is the `MultiHeadAttentionConfig` that `layer` in config.json spells out ({described(facts)}). Layout: `{facts['layout']}`."
    if facts["layout"] == "raw:book" and facts["embed_dim"] == facts["out_dim"]:
        code = LOAD.format(folder=folder).replace("let layout = WeightLayout::detect(&vb)?;\n", "")
        return f"{stated} Detection refuses this file, so the caller names the layout.\n\n{block(code)}"
    if config.get("weights", "").startswith("not stored"):
        return f"{stated} The weights are not stored: draw them from the seed with the crate's `init`, and compare their hashes."
    source = config["weights"].split("/")[0] if "/" in config.get("weights", "") else folder
    return f"{stated}\n\n{block(LOAD.format(folder=source))}"


def described(facts):
    """The facts of a layer that are not everybody's, in one line."""
    sizes = [f"{name} {facts[name]}" for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "out_dim")]
    sizes += [f"{name} {facts[name]}" for name in ("kdim", "vdim") if facts[name] != facts["embed_dim"]]
    sizes += [f"{name} {facts[name]}" for name in ("context_length", "dropout") if facts[name]]
    options = ("causal", "qkv_bias", "out_proj", "out_bias", "bias_kv", "add_zero_attn")
    words = [name.replace("_", " ") for name in options if facts.get(name)]
    return ", ".join(sizes + words)


def block(code):
    return f"```rust,ignore\n{code}\n```"


def index(systems, tolerances):
    def layout(system):
        return f"`{system.layer['layout']}`" if system.layer else ""

    rows = "\n".join(f"| [{s.name}]({s.name}) | {s.summary} | {layout(s)} |" for s in systems)
    return wrapped(INDEX.format(rows=rows, f32=tolerances[0], loops=tolerances[1])).encode()
