"""What the scripts of quantised checkpoints share.

Each script makes tiny random models, quantises them with a library, and writes a folder for each into
tests/weights/quantized: `config.json` and `model.safetensors` as the library saves them, and `want.json` with the
library's own dequantised weights in f32, by the names of the plain weights: the shape, the first numbers, and a hash of
all bits (FNV-1a of 64 bits over the bytes).

A folder has the projections of one attention layer at least. Where it has `model.embed_tokens.weight` too, it is a whole
model that runs as it is, and may have `logits.json` with the library's own logits. The tests add the other tensors of a
model, in f32, where a folder lacks them.
"""

import json
import pathlib

import numpy

FOLDER = pathlib.Path(__file__).resolve().parents[4] / "tests/weights/quantized"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EMBED_DIM = 64
VOCABULARY = 32
# The tokens whose logits are recorded.
IDS = [3, 17, 8, 30, 1, 22, 9]


def config(**quantization):
    """Returns the config of a llama of one layer, with what a library adds."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": EMBED_DIM,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": EMBED_DIM,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        **quantization,
    }


def weights(seed, dtype=numpy.float32):
    """Returns the projections of the attention layer, (out, in), by name."""
    random = numpy.random.default_rng(seed)
    found = {}
    for name in PROJECTIONS:
        rows = EMBED_DIM if name in ("q_proj", "o_proj") else EMBED_DIM // 2
        numbers = random.standard_normal((rows, EMBED_DIM), dtype=numpy.float32) * 0.2
        found[f"model.layers.0.self_attn.{name}"] = numbers.astype(dtype)
    return found


def whole_model(seed, dtype=numpy.float32):
    """Returns all parameters of the llama, by the names that transformers saves them under."""
    found = {f"{module}.weight": numbers for module, numbers in weights(seed, dtype).items()}
    random = numpy.random.default_rng([seed, 1])

    def normal(*shape):
        return random.standard_normal(shape, dtype=numpy.float32)

    for name in MLP:
        found[f"model.layers.0.mlp.{name}.weight"] = (normal(EMBED_DIM, EMBED_DIM) * 0.2).astype(dtype)
    found["model.embed_tokens.weight"] = normal(VOCABULARY, EMBED_DIM).astype(dtype)
    for name in ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"]:
        found[f"model.{name}.weight"] = (1 + 0.1 * normal(EMBED_DIM)).astype(dtype)
    return found


def rounded_groups(numbers, group):
    """Returns the scales in f16 and the zeros of codes of 4 bits for groups of a row's numbers."""
    grouped = numbers.reshape(len(numbers), -1, group)
    low, high = grouped.min(-1), grouped.max(-1)
    scales = ((high - low) / 15).astype(numpy.float16)
    return scales, numpy.clip(numpy.round(-low / scales), 0, 15)


def folder(name):
    """Returns the folder of a case, which is made if it is not there."""
    path = FOLDER / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_config(name, own):
    (folder(name) / "config.json").write_text(json.dumps(own, indent=1) + "\n")


def write_want(name, want):
    """Writes what the dequantised weights are, numpy arrays in f32 by name."""
    lines = {}
    for key, array in want.items():
        numbers = numpy.ascontiguousarray(array, dtype="<f4")
        digest = 0xCBF29CE484222325
        for byte in numbers.tobytes():
            digest = (digest ^ byte) * 0x100000001B3 % 2**64
        first = [float(number) for number in numbers.flatten()[:4]]
        lines[key] = {"shape": list(numbers.shape), "first": first, "fnv1a": f"{digest:016x}"}
    (folder(name) / "want.json").write_text(json.dumps(lines, indent=1) + "\n")


def write_logits(name, logits):
    """Writes the library's own logits of IDS, a numpy array (tokens, vocabulary)."""
    rows = [[float(number) for number in row] for row in numpy.asarray(logits, dtype=numpy.float32)]
    (folder(name) / "logits.json").write_text(json.dumps({"ids": IDS, "logits": rows}) + "\n")
