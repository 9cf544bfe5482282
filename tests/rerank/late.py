"""Makes `late/`: tiny random models with a vector for each token (ColBERT), and the scores that sentence-transformers
gives for a question with each of the passages in `tests/sentence_embedding/sentences.txt`.

python tests/rerank/late.py [MODEL ..]    (packages: tests/hf/requirements.txt, sentence-transformers)

The files are as in `cross_encoders.py`; a folder is what `MultiVectorEncoder.save` writes, or has the older files of
PyLate and of ColBERT's own code, which sentence-transformers reads too.
"""

import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch
from cross_encoders import EAGER, QUESTION
from pipelines import SENTENCES, SIZES, randomize, tokenizer, transformer
from safetensors.torch import save_file
from recording import Recorder, make_all, write
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

SETTINGS = "sentence_bert_config.json"
MASK = "2_MultiVectorMask/config.json"
CHECKPOINT = "config_sentence_transformers.json"
TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}


class LateRecorder(Recorder):
    """Records scores of the question with each sentence."""

    def __init__(self, name, model=None):
        super().__init__(HERE / "late" / name, model)

    def add(self, name, args=(), files=None, **options):
        """Records a run on the folder as it is saved, with some files replaced."""
        with self.copy(files) as path:
            model = MultiVectorEncoder(path, model_kwargs=EAGER)
            question = model.encode_query([QUESTION], **options)
            passages = model.encode_document(SENTENCES)
            self.record(name, ["--late", *args], files, model.similarity(question, passages)[0])


def colbert(name, model_type, **options):
    """Returns a function that makes an encoder with a projection, expanded questions and tokens that are not scored."""
    def make(folder):
        expansion = {"strategy": "fixed", "length": 12, "attend": False}
        sizes = {**SIZES, **options}
        module = transformer(folder, model_type, tokenizer(), sizes, query_expansion=expansion, document_length=11)
        projection = Dense(16, 8, bias=False, activation_function=torch.nn.Identity(), **TOKENS)
        randomize(projection, 1)
        modules = [module, projection, MultiVectorMask(skiplist_words=["the", "eats", "absent"]), Normalize(**TOKENS)]
        prompts = {"query": "query : ", "document": "document : ", "search": "search "}
        recorder = LateRecorder(name, MultiVectorEncoder(modules=modules, prompts=prompts))
        settings = recorder.read(SETTINGS)
        recorder.add("fixed")
        recorder.add("search", ["--prompt-name", "search"], prompt_name="search")
        recorder.add("attended", files={SETTINGS: {**settings, "query_expansion": {**expansion, "attend": True}}})
        short = {**expansion, "length": 6}
        recorder.add("cut", files={SETTINGS: {**settings, "query_expansion": short}})
        recorder.add("at_least", files={SETTINGS: {**settings, "query_expansion": {**short, "strategy": "min"}}})
        named = {**expansion, "strategy": "min", "token": "rain", "length": 14}
        recorder.add("named", files={SETTINGS: {**settings, "query_expansion": named}})
        plain = {key: value for key, value in settings.items() if key != "query_expansion"}
        recorder.add("plain", files={SETTINGS: {**plain, "query_length": 5}})
        both = {"skiplist_words": ["query", "rain"], "skiplist_tasks": ["query", "document"]}
        recorder.add("both_skip", files={MASK: {**both, "keep_only_token_ids": None}})
        mean = {**recorder.read(CHECKPOINT), "similarity_fn_name": "meanmaxsim"}
        recorder.add("mean", files={CHECKPOINT: mean})
        recorder.save()
    return make


# Questions are expanded to 32 tokens by default.
LONGER = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 36}


def pylate(folder):
    """PyLate's files: prefixes that are added tokens, settings of the whole checkpoint, and a projection alone."""
    tokens = tokenizer()
    tokens.add_tokens(["[Q] ", "[D] "])
    projection = Dense(16, 8, bias=False, activation_function=torch.nn.Identity(), **TOKENS)
    randomize(projection, 1)
    modules = [transformer(folder, "bert", tokens, LONGER), projection, MultiVectorMask(), Normalize(**TOKENS)]
    recorder = LateRecorder("pylate", MultiVectorEncoder(modules=modules))
    types = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    listed = recorder.read("modules.json")
    write(recorder.path / "modules.json", [{**module, "type": kind} for module, kind in zip(listed, types)])
    for module in listed[2:]:
        shutil.rmtree(recorder.path / module["path"])
    dense = f"{listed[1]['path']}/config.json"
    keys = ["in_features", "out_features", "bias", "activation_function"]
    write(recorder.path / dense, {key: recorder.read(dense)[key] for key in keys})
    write(recorder.path / SETTINGS, {"max_seq_length": 14, "do_lower_case": False})
    settings = {
        "__version__": {"sentence_transformers": "4.0.2", "transformers": "4.48.2", "pytorch": "2.6.0"},
        "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim", "query_prefix": "[Q] ",
        "document_prefix": "[D] ", "query_length": 12, "document_length": 10, "attend_to_expansion_tokens": False,
    }
    write(recorder.path / CHECKPOINT, settings)
    recorder.add("default")
    for name, changed in [
        ("typed", {"model_type": "ColBERT", "query_length": None, "document_length": None}),
        ("attended", {"attend_to_expansion_tokens": True}),
        ("not_expanded", {"do_query_expansion": False, "query_length": 5}),
        ("skipped", {"skiplist_words": ["the", "eats"]}),
        # A colon is one of the characters that are not scored in passages.
        ("prompts", {"prompts": {"query": "[Q] query : ", "document": "document : "}}),
        ("colon_scored", {"prompts": {"document": "document : "}, "skiplist_words": []}),
        ("words", {"query_prefix": "search ", "document_prefix": "document "}),
        ("expansion", {"query_expansion": {"strategy": "min", "length": 6, "attend": True}}),
    ]:
        recorder.add(name, files={CHECKPOINT: {**settings, **changed}})
    recorder.save()


def colbert_code(folder):
    """The files of ColBERT's own code: markers that are words of the vocabulary, and the projection among the weights of
    the model."""
    tokens = tokenizer(more=["[unused0]", "[unused1]"])
    module = transformer(folder, "bert", tokens, LONGER)
    recorder = LateRecorder("colbert_code")
    shutil.copytree(Path(folder) / "transformer", recorder.path)
    torch.manual_seed(3)
    weights = {f"bert.{name}": tensor for name, tensor in module.auto_model.state_dict().items()}
    weights["linear.weight"] = torch.randn(8, 16) * 0.4
    save_file(weights, recorder.path / "model.safetensors", {"format": "pt"})
    write(recorder.path / "config.json", {**recorder.read("config.json"), "architectures": ["HF_ColBERT"]})
    metadata = {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]", "dim": 8,
        "query_maxlen": 12, "doc_maxlen": 10, "attend_to_mask_tokens": False, "mask_punctuation": True,
        "similarity": "cosine", "interaction": "colbert", "nbits": 1, "checkpoint": "none",
    }
    name = "artifact.metadata"
    write(recorder.path / name, metadata)
    recorder.add("default")
    recorder.add("attended", files={name: {**metadata, "attend_to_mask_tokens": True, "query_maxlen": 14}})
    # A colon is one of the characters that are not scored in passages.
    recorder.add("colon", files={name: {**metadata, "doc_token_id": ":"}})
    recorder.add("colon_scored", files={name: {**metadata, "doc_token_id": ":", "mask_punctuation": False}})
    recorder.add("no_metadata", files={name: {}})
    recorder.save()


KINDS = {
    "pylate": pylate,
    "colbert_code": colbert_code,
    "bert": colbert("bert", "bert"),
    "modernbert": colbert(
        "modernbert", "modernbert", local_attention=6, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    ),
}


if __name__ == "__main__":
    make_all(KINDS)
