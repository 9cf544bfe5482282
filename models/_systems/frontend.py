"""The front-end tutorial: a tokenizer, an embedding and one self-attention, at width 48 and 1536."""

import torch
from torch import nn

from . import loops
from .facts import FRONT_END, VOCAB
from .pieces import dropout_keep
from .record import F32_TOLERANCE, Layer, Piece, Record, gap, json_bytes, layer_config, layer_of, safetensors_bytes

SENTENCE = [1, 2, 3, 4, 5, 6]  # hello world how are you ?
BATCH = [SENTENCE, [5, 4, 6, 0, 0, 0]]  # you are ? and three <pad>
PREFIX = "model.layers.0.self_attn."
# Other files with the weights of model.safetensors.
CHECKPOINTS = {
    "model-f16.safetensors": {"dtype": "f16", "prefix": ""},
    "model-bf16.safetensors": {"dtype": "bf16", "prefix": ""},
    "prefixed.safetensors": {"dtype": "f32", "prefix": PREFIX},
}
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
DROPOUT = 0.1

STORED = "model.safetensors"
NOT_STORED = "not stored: draw them from manual_seed in draw_order and compare sha256_f32_le"

CONVENTIONS = (
    "No mask: <pad> is attended to like any other token.",
    "The query, key and value projections have biases, the output projection has none.",
    "Scores are multiplied by head_dim ** -0.5.",
    "The seed 0 is this project's choice; the embedding draws first.",
)
GROUPED = "Query head h reads key/value head h * num_kv_heads / num_heads (integer division)."


class SimpleTokenizer:
    """Splits at white space; a token outside the vocabulary is a KeyError."""

    def __init__(self, vocab):
        self.ids = {token: i for i, token in enumerate(vocab)}

    def encode(self, text):
        return [self.ids[token] for token in text.split()]


class EmbeddingLayer(nn.Module):
    def __init__(self, vocab_size, embed_dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim)

    def forward(self, ids):
        return self.embedding(ids)


class EmbeddedAttention(EmbeddingLayer):
    """The embedding and the self-attention after it, in one state dict. `keep` is a dropout mask on the weights."""

    def __init__(self, vocab_size, hidden_size, num_heads, kv_heads, dropout):
        super().__init__(vocab_size, hidden_size)
        self.head_dim, self.drop = hidden_size // num_heads, dropout
        kv_size = kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, kv_size)
        self.v_proj = nn.Linear(hidden_size, kv_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, ids, keep=None):
        x = self.embedding(ids)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        weights = torch.softmax(q @ k.transpose(-2, -1) * self.head_dim**-0.5, dim=-1)
        if keep is not None:
            weights = weights * (keep.to(weights.dtype) / (1 - self.drop))
        return self.o_proj((weights @ v).transpose(1, 2).flatten(-2)), weights


def run_loops(num_heads, kv_heads):
    def run(state, inputs):
        x = [[state["embedding.weight"][i] for i in row] for row in inputs["ids"]]
        heads, out = loops.separate(state, NAMES, num_heads, kv_heads)
        return loops.multi_head(heads, out, x, x, x, keep=inputs.get("keep"), drop=DROPOUT)

    return run


def tokenizer_json():
    """The vocabulary as Hugging Face's `tokenizers` reads it; "<unk>" is not in it, so an unknown word is an error."""
    return json_bytes(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(VOCAB)}, "unk_token": "<unk>"},
        }
    )


def with_tokenizer(_module, _config):
    return {"tokenizer.json": tokenizer_json()}


def with_other_checkpoints(module, config):
    """The same weights in half precision, and below the prefix that a model's state dict puts before a layer."""
    state = module.state_dict()
    return with_tokenizer(module, config) | {
        "model-f16.safetensors": safetensors_bytes({name: t.half() for name, t in state.items()}),
        "model-bf16.safetensors": safetensors_bytes({name: t.bfloat16() for name, t in state.items()}),
        "prefixed.safetensors": safetensors_bytes({PREFIX + name: t for name, t in state.items()}),
    }


def attention(name, summary, hidden_size, num_heads, kv_heads, conventions=(), batch=True, checkpoints=None, **extra):
    args = {
        "vocab_size": len(VOCAB),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "kv_heads": kv_heads,
        "dropout": DROPOUT,
    }
    return Layer(
        name=name,
        summary=summary,
        source=FRONT_END,
        conventions=CONVENTIONS + conventions,
        class_name="EmbeddingLayer + SelfAttention",
        args=args,
        seed=0,
        make=lambda: EmbeddedAttention(**args),
        layer=layer_of(
            "canonical",
            hidden_size,
            num_heads,
            hidden_size // num_heads,
            num_kv_heads=kv_heads,
            qkv_bias=True,
            out_proj=True,
            dropout=DROPOUT,
        ),
        extra_config={
            "embedding": {"parameter": "embedding.weight", "vocab_size": len(VOCAB), "embed_dim": hidden_size},
            "vocab": list(VOCAB),
            **({"checkpoints": checkpoints} if checkpoints else {}),
            "weights": STORED if extra.get("store_weights", True) else NOT_STORED,
        },
        loops=run_loops(num_heads, kv_heads),
        cases={"main": {"ids": torch.tensor([SENTENCE])}} | ({"batch": {"ids": torch.tensor(BATCH)}} if batch else {}),
        **{"extra_files": with_tokenizer} | extra,
    )


class Training(Layer):
    """One forward pass in train mode: the weights of `frontend_48`, its dropout drawn after another seed."""

    def record(self):
        module = self.build()
        ids = torch.tensor([SENTENCE])
        torch.manual_seed(1)
        keep = dropout_keep((1, self.layer["num_heads"], len(SENTENCE), len(SENTENCE)), DROPOUT)
        inputs = {"ids": ids, "keep": keep}
        output, weights = self.forward(module, inputs, torch.float32)
        exact, exact_weights = self.forward(module, inputs, torch.float64)
        record = Record(
            config={
                "system": self.name,
                "class": self.class_name,
                "args": self.args,
                "weights": "frontend_48/model.safetensors",
                "mode": "train",
                "manual_seed_before_forward": 1,
                "dropout": DROPOUT,
                **layer_config(self.layer),
                "vocab": list(VOCAB),
                "notes": list(self.conventions),
                "cases": {
                    "main": {
                        "inputs": {"ids": list(ids.shape)},
                        "keep": list(keep.shape),
                        "output": list(output.shape),
                        "attn_weights": list(weights.shape),
                        "f32_vs_f64_max_abs": gap("frontend_48_train f32", output.double(), exact, F32_TOLERANCE),
                        "f64_vs_plain_loops_max_abs": self.check(module, "main", inputs, exact, exact_weights),
                    }
                },
            }
        )
        tensors = inputs | {
            "output": output,
            "expected_f64": exact,
            "attn_weights": weights,
            "attn_weights_f64": exact_weights,
        }
        record.io = {f"main.{name}": t for name, t in tensors.items()}
        record.files["io.safetensors"] = safetensors_bytes(record.io)
        return record


def training():
    base = attention("frontend_48", "", 48, 4, 4)
    return Training(
        name="frontend_48_train",
        summary="frontend_48 in train mode, with its dropout mask",
        source=FRONT_END,
        conventions=CONVENTIONS[:3]
        + (
            "attn_weights are those after dropout: kept weights divided by 0.9.",
            "`keep` is the mask, drawn after manual_seed(1): an element stays if (u64 & (2^53 - 1)) * 2^-53 < 1 - p.",
        ),
        class_name=base.class_name,
        args=base.args,
        seed=0,
        make=base.make,
        layer=base.layer,
        loops=base.loops,
        cases={},
    )


def embedding():
    def run(state, inputs):
        return [[state["embedding.weight"][i] for i in row] for row in inputs["ids"]], None

    facts = {name: None for name in layer_of("", 0, 0, 0)}
    return Layer(
        name="frontend_embedding",
        summary="The embedding alone",
        source=FRONT_END,
        conventions=("A row of the table for each id.", "The seed 0 is this project's choice."),
        class_name="EmbeddingLayer",
        args={"vocab_size": 100, "embed_dim": 50},
        seed=0,
        make=lambda: EmbeddingLayer(100, 50),
        layer=facts | {"layout": "embedding", "vocab_size": 100, "embed_dim": 50, "out_dim": 50},
        loops=run,
        cases={"main": {"ids": torch.tensor([[1, 2, 3]])}},
    )


def tokenizer():
    tokenize = SimpleTokenizer(VOCAB).encode
    texts = (
        "hello world how are you?",
        "hello world how are you ?",
        "  hello\tworld\n",
        "",
        "Hello",
        "you you ?",
        "\u6211\u7231\u81ea\u7136",
    )
    cases = []
    for text in texts:
        try:
            cases.append({"text": text, "ids": tokenize(text)})
        except KeyError as error:
            cases.append({"text": text, "error": "KeyError", "token": error.args[0]})
    return Piece(
        name="frontend_tokenizer",
        summary="The tokenizer alone",
        source=FRONT_END,
        conventions=(
            "Text is split at runs of white space and nowhere else; case matters.",
            "There is no unknown token: the first word outside the vocabulary is the error.",
        ),
        compute=dict,
        extra_config={"class": "SimpleTokenizer", "vocab": list(VOCAB)},
        cases=cases,
        extra_files=lambda: {"tokenizer.json": tokenizer_json()},
    )


def systems():
    return [
        tokenizer(),
        embedding(),
        attention(
            "frontend_48",
            "Embedding and self-attention, width 48, 4 heads",
            48,
            4,
            4,
            extra_files=with_other_checkpoints,
            checkpoints=CHECKPOINTS,
            conventions=(
                f"model-f16 and model-bf16 have the same weights, rounded; prefixed has them below `{PREFIX}`.",
            ),
        ),
        training(),
        attention(
            "frontend_1536",
            "Embedding and self-attention, width 1536, 16 heads",
            1536,
            16,
            16,
            batch=False,
            store_weights=False,
            conventions=("The weights (38 MB) are not stored, only their hashes.",),
        ),
        attention("gqa_48", "frontend_48 with 2 key/value heads (grouped-query)", 48, 4, 2, conventions=(GROUPED,)),
        attention("mqa_48", "frontend_48 with 1 key/value head (multi-query)", 48, 4, 1, conventions=(GROUPED,)),
    ]
