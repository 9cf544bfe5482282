"""Records the tokens of texts by llama.cpp, for each tokenizer of GGUF files.

python crates/compare/conformance/gguf_tokenizers.py    writes tests/tokenizer/gguf.json and seeds of fuzz/seeds/gguf

A vocabulary is small: for byte-level BPE, bytes and the merges of whole texts, which join what a division keeps apart
where it does not divide. llama.cpp (xllamacpp 2026.10.11549, with the declarations of llama-cpp-py-sync 0.11548) reads
each vocabulary from a file that the package gguf 0.19.0 writes, and tokenises the texts. Other packages: sentencepiece
0.2.3, which trains the unigrams.
"""

import io
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import gguf
import sentencepiece
import xllamacpp
from llama_cpp_py_sync import _cffi_bindings as bindings

ROOT = Path(__file__).resolve().parents[3]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# llama.cpp's expressions treat letters of both cases outside of ASCII alike, so that no text has them in one word.
TEXTS = [
    "Hello, world! It's 12345 o'clock; we'LL see 1234567 things.",
    "  two  blanks\n\nand\ttabs \r\n  x = y+1; // done!!  ",
    "The naïve café costs 3.50€, or 20%... (really?) \"quoted\" 'text' #tag @user a_b-c/d",
    "def f(x):\n    return x ** 2  # squares\n\n\n",
    "HTTPServer getURL iPhone camelCase SHOUTING MixedCase don't I'M they'd",
    "漢字とかなカナ 123 中文 가나다 한국어 100%",
    "tail blanks   ",
    "1 22 333 4444 55555 666666 7777777 88888888",
    "end.\nnew", "end.\n\nnew!\n\n", "a1b22", "x's y'S z'LL", "ab/\ncd//\n", "§ab _cd -ef", "a\r\n\r\nb \n c", "don't\n", ":\n;",
    "straße über Ähnliches 'tis <b>bold</b> [x] {y} ~z~ `q` ^ | $5 +6",
]  # fmt: skip
# The expressions of these models divide where upper case begins, as gpt-4o's do. llama.cpp does not for them, since its
# regular expressions have no classes for cases.
NOT_BY_CASE = ["youtu", "cohere2moe", "tiny_aya", "kimi-k2"]
CASES = next(at for at, text in enumerate(TEXTS) if "camelCase" in text)
PRE = """
a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es mellum
modern-bert mpt olmo phi-2 roberta-bpe trillion codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder
falcon-h1 falcon3 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 pixtral chatglm-bpe dbrx smaug-bpe glm4 glm5 grok-2
hunyuan kormo megrez solar-open stablelm2 deepseek-r1-qwen f2llmv2 qwen2 qwen35 deepseek-llm deepseek-coder deepseek-v3
hunyuan-dense hy_v4 joyai-llm spark2_5 youtu falcon bloom gpt3-finnish poro-chat viking tekken gpt-4o kanana2 llama4
minimax-m2 talkie granite-embed-multi-97m cohere2moe tiny_aya kimi-k2 superbpe bailingmoe bailingmoe2 llada-moe seed-coder
ufakzeka afmoe laguna exaone-moe minicpm5 jais-2 default
""".split()


def byte_characters():
    """Returns the character of each byte in GPT-2's vocabulary."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges_of(texts, count):
    """Returns the merges of the most frequent pairs of whole texts, given as lists of characters, to tokens of at most 6."""
    merges = []
    for _ in range(count):
        pairs = Counter(pair for text in texts for pair in zip(text, text[1:]) if len(pair[0] + pair[1]) <= 6)
        if not pairs:
            break
        pair, _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        merges.append(pair)
        for i, text in enumerate(texts):
            joined = []
            for piece in text:
                if joined and (joined[-1], piece) == pair:
                    joined[-1] += piece
                else:
                    joined.append(piece)
            texts[i] = joined
    return merges


class LlamaCpp:
    def __init__(self):
        self.ffi = bindings.get_ffi()
        self.lib = self.ffi.dlopen(xllamacpp.xllamacpp.__file__)
        self.log = []
        self.on_log = self.ffi.callback(
            "void(enum ggml_log_level, const char *, void *)",
            lambda _, text, __: self.log.append(self.ffi.string(text).decode(errors="replace")),
        )
        self.lib.llama_log_set(self.on_log, self.ffi.NULL)
        self.lib.llama_backend_init()

    def tokens(self, keys, texts, seed=None):
        """Returns the tokens of texts, with special tokens, by a vocabulary with these keys of `tokenizer.ggml`.

        The vocabulary's file becomes a seed for fuzzing, if there is a name for it.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "vocabulary.gguf")
            writer = gguf.GGUFWriter(path, "llama")
            for key, value in keys.items():
                name = f"tokenizer.ggml.{key}"
                if isinstance(value, list) and isinstance(value[0], float):
                    writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32)
                elif isinstance(value, list) and key == "precompiled_charsmap":
                    writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
                elif isinstance(value, list):
                    writer.add_array(name, value)
                elif isinstance(value, bool):
                    writer.add_bool(name, value)
                elif isinstance(value, int):
                    writer.add_uint32(name, value)
                else:
                    writer.add_string(name, value)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            if seed:
                shutil.copy(path, ROOT / "fuzz/seeds/gguf" / f"{seed}.gguf")
            options = self.lib.llama_model_default_params()
            options.vocab_only = True
            self.log.clear()
            model = self.lib.llama_model_load_from_file(path.encode(), options)
            assert model != self.ffi.NULL, "".join(self.log[-6:])
        vocabulary = self.lib.llama_model_get_vocab(model)
        found = []
        for text in texts:
            data = text.encode()
            out = self.ffi.new("llama_token[]", 4 * len(data) + 16)
            count = self.lib.llama_tokenize(vocabulary, data, len(data), out, len(out), True, True)
            assert count >= 0
            found.append(list(out[0:count]))
        self.lib.llama_model_free(model)
        return found


def byte_level():
    """Returns the keys of byte-level BPE without the name of the division."""
    characters = byte_characters()
    texts = [[characters[byte] for byte in text.encode()] for text in TEXTS]
    merges = merges_of(texts, 600)
    tokens = ["<|begin|>", *characters.values(), *dict.fromkeys(first + second for first, second in merges)]
    types = [CONTROL] + [NORMAL] * (len(tokens) - 1)
    return {
        "model": "gpt2", "tokens": tokens, "token_type": types, "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def raw():
    """Returns the keys of BPE over characters."""
    texts = [list(text.replace(" ", "▁")) for text in TEXTS[:5]]
    characters = sorted({character for text in texts for character in text})
    merges = [merge for merge in merges_of(texts, 200) if "\n" not in "".join(merge)[:-1]]
    known = set(characters)
    # A merge whose parts no merge makes is left out.
    kept = []
    for first, second in merges:
        if first in known and second in known:
            kept.append((first, second))
            known.add(first + second)
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    tokens += dict.fromkeys(first + second for first, second in kept)
    types = [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256
    types += [NORMAL] * (len(tokens) - len(types))
    return {
        "model": "gemma4", "tokens": tokens, "token_type": types, "merges": [" ".join(merge) for merge in kept],
        "scores": [0.0] * len(tokens), "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3,
        "add_bos_token": False,
    }  # fmt: skip


def unigram():
    """Returns the keys of unigrams that SentencePiece trained, with its table of replaced characters."""
    model = io.BytesIO()
    # Upper case of ASCII becomes lower case, and three characters become one, another one, and two.
    rules = [(ord(c), [ord(c.lower())]) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    rules += [(ord("é"), [ord("e")]), (ord("\t"), [ord(" ")]), (ord("€"), [ord("e"), ord("u")])]
    table = tempfile.NamedTemporaryFile("w", suffix=".tsv")
    for character, others in rules:
        table.write(f"{character:X}\t{' '.join(f'{other:X}' for other in others)}\n")
    table.flush()
    sentences = [line for text in TEXTS for line in text.splitlines() if line.strip()] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=260, hard_vocab_limit=False,
        model_type="unigram", character_coverage=0.98, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1,
        user_defined_symbols=["<extra>"], normalization_rule_tsv=table.name, minloglevel=2,
    )  # fmt: skip
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    kinds = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED}
    assert len(proto.pieces) == trained.vocab_size()
    return {
        "model": "t5", "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces], "token_type": [kinds[piece.type] for piece in proto.pieces],
        "precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap), "add_space_prefix": True,
        "remove_extra_whitespaces": True, "eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0,
    }  # fmt: skip


def word_piece():
    """Returns the keys of WordPiece: characters, and parts of the texts' words."""
    words = Counter(word for text in TEXTS for word in "".join(c if c.isalnum() else f" {c} " for c in text.lower()).split())
    beginnings = dict.fromkeys([word[:length] for word in words for length in (1, 2, 4, 8)])
    rest = dict.fromkeys([word[at:] for word in words for at in (1, 2, 4)] + [c for word in words for c in word])
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens += [f"▁{word}" for word in beginnings if word != "漢"] + [part for part in rest if part]
    types = [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 5)
    return {
        "model": "bert", "tokens": tokens, "token_type": types, "bos_token_id": 2, "seperator_token_id": 3,
        "unknown_token_id": 1, "padding_token_id": 0, "cls_token_id": 2, "mask_token_id": 4,
    }  # fmt: skip


def main():
    llama_cpp = LlamaCpp()
    keys = byte_level()
    ids = {}
    by_case = llama_cpp.tokens(keys | {"pre": "gpt-4o"}, TEXTS)
    for pre in PRE:
        found = llama_cpp.tokens(keys | {"pre": pre}, TEXTS)
        if pre in NOT_BY_CASE:
            found[CASES] = by_case[CASES]
        ids.setdefault(json.dumps(found), []).append(pre)
    divisions = [{"pre": names, "ids": json.loads(found)} for found, names in ids.items()]
    vocabularies = {"characters": raw(), "unigram": unigram(), "word_piece": word_piece()}
    others = [{"keys": own, "ids": llama_cpp.tokens(own, TEXTS, seed)} for seed, own in vocabularies.items()]
    lines = [
        '{"llama.cpp": "xllamacpp 2026.10.11549",',
        f'"texts": {json.dumps(TEXTS, ensure_ascii=False)},',
        f'"byte_level": {json.dumps(keys, ensure_ascii=False)},',
        '"divisions": [', ",\n".join(json.dumps(division) for division in divisions), "],",
        '"others": [', ",\n".join(json.dumps(other, ensure_ascii=False) for other in others), "]}",
    ]  # fmt: skip
    (ROOT / "tests/tokenizer/gguf.json").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
