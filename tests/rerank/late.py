"""Makes `late/`: tiny random models with a vector for each token (ColBERT), and the scores that sentence-transformers
gives for a question with each of the passages in `tests/sentence_embedding/sentences.txt`.

python tests/rerank/late.py [MODEL ..]    (packages: tests/hf/requirements.txt, sentence-transformers)

The files are as in `cross_encoders.py`; a folder is what `MultiVectorEncoder.save` writes.
"""

import sys
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch
from cross_encoders import EAGER, QUESTION
from pipelines import SENTENCES, SIZES, randomize, tokenizer, transformer
from recording import Recorder, make_all
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

SETTINGS = "sentence_bert_config.json"
MASK = "2_MultiVectorMask/config.json"
CHECKPOINT = "config_sentence_transformers.json"
TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}


class LateRecorder(Recorder):
    """Records scores of the question with each sentence."""

    def __init__(self, name, model):
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


KINDS = {
    "bert": colbert("bert", "bert"),
    "modernbert": colbert(
        "modernbert", "modernbert", local_attention=6, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    ),
}


if __name__ == "__main__":
    make_all(KINDS)
