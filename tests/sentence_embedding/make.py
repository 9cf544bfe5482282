"""Makes `models/`: tiny random encoders with their tokenizers, and the vectors that transformers gives for `sentences.txt`.

python tests/sentence_embedding/make.py [MODEL ..]    (packages: tests/hf/requirements.txt)

A folder holds `config.json` and `model.safetensors` as `save_pretrained` writes them, `tokenizer.json`, the files of
sentence-transformers (max_seq_length 12, mean pooling, normalised), and `golden.safetensors`: `mean` and `cls` (N, E) of
each sentence by itself, cut at 12 tokens, and `long` (N, E), the means where only the model's own length cuts. None of
them is normalised. Eager attention, f32.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

HERE = Path(__file__).resolve().parent
SENTENCES = [line for line in (HERE / "sentences.txt").read_text().splitlines() if line.strip()]
CUT = 12
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
MODELS = {
    "bert": SIZES,
    # Positions begin behind the padding token's, so that 18 are 16.
    "roberta": {**SIZES, "max_position_embeddings": 18, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "xlm-roberta": {
        **SIZES, "max_position_embeddings": 18, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    },
    "mpnet": {**SIZES, "max_position_embeddings": 18, "pad_token_id": 1, "layer_norm_eps": 1e-5},
    "distilbert": {
        "dim": 16, "hidden_dim": 20, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 16, "activation": "gelu",
    },
    "nomic_bert": SIZES,
    # Three layers: one without a window, two with a local window.
    "modernbert": {
        **SIZES, "num_hidden_layers": 3, "local_attention": 6, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
        "cls_token_id": 2, "sep_token_id": 3,
    },
}


def tokenizer(model_type):
    """Words and a few pieces, so that some words are several tokens; padded and cut as published files are."""
    like_roberta = model_type in ("roberta", "xlm-roberta", "mpnet")
    special = ["<s>", "<pad>", "</s>", "<unk>"] if like_roberta else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    first, last = (special[0], special[2]) if like_roberta else (special[2], special[3])
    unknown = special[3] if like_roberta else special[1]
    pieces = (
        "a man eats food the sky is blue girl carries baby on while old plays guitar rain some ##one piece of bread two "
        "men push cart ##s through wood ##in in st ##reet"
    ).split()
    vocab = {token: index for index, token in enumerate(special + pieces)}
    if model_type == "xlm-roberta":
        # SentencePiece's pieces, in which a word begins with a mark.
        pieces = [piece[2:] if piece.startswith("##") else "\u2581" + piece for piece in pieces]
        vocab = {token: index for index, token in enumerate(special + pieces)}
        result = Tokenizer(models.Unigram([(token, -float(len(vocab) - i)) for token, i in vocab.items()], vocab[unknown]))
        result.add_special_tokens(special)
        result.normalizer = normalizers.Lowercase()
        result.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        result = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
        result.add_special_tokens(special)
        result.normalizer = normalizers.BertNormalizer()
        result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(first, vocab[first]), (last, vocab[last])]
    )
    return result


def hidden(model, tokens, cut):
    tokens.enable_truncation(cut)
    for sentence in SENTENCES:
        ids = torch.tensor([tokens.encode(sentence).ids])
        with torch.no_grad():
            yield model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]


def write(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def main():
    torch.set_num_threads(1)
    for name, options in MODELS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        tokens = tokenizer(name)
        torch.manual_seed(sum(map(ord, name)))
        config = AutoConfig.for_model(name, vocab_size=tokens.get_vocab_size(), **options)
        config._attn_implementation = "eager"
        model = AutoModel.from_config(config).float().eval()
        for key, parameter in model.named_parameters():
            # A norm's weight around 1, or its bias would be all that is left.
            is_norm = "norm" in key.lower() and key.endswith("weight")
            torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.4)
        folder = HERE / "models" / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        rows = list(hidden(model, tokens, CUT))
        golden = {
            "mean": torch.stack([row.mean(0) for row in rows]),
            "cls": torch.stack([row[0] for row in rows]),
            "long": torch.stack([row.mean(0) for row in hidden(model, tokens, 16)]),
        }
        save_file(golden, folder / "golden.safetensors")
        # What published tokenizers say of padding and length is for somebody else.
        tokens.enable_truncation(5)
        tokens.enable_padding(length=9)
        tokens.save(str(folder / "tokenizer.json"))
        write(folder / "sentence_bert_config.json", {"max_seq_length": CUT, "do_lower_case": False})
        module = "sentence_transformers.models."
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [{"idx": i, "name": str(i), "path": path, "type": module + kind} for i, (path, kind) in enumerate(kinds)]
        write(folder / "modules.json", modules)
        modes = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in ["cls_token", "mean_tokens", "max_tokens"]}
        write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 16, **modes})
        print(name, [len(tokens.encode(s).ids) for s in SENTENCES], file=sys.stderr)


if __name__ == "__main__":
    main()
