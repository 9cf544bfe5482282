"""Makes `cross_encoders/`: tiny random rerankers, and the scores that sentence-transformers gives for a question with each
of the passages in `tests/sentence_embedding/sentences.txt`.

python tests/rerank/cross_encoders.py [MODEL ..]    (packages: tests/hf/requirements.txt, sentence-transformers)

A folder is what `CrossEncoder.save` writes, unless a function says otherwise. `golden.json` lists runs: the options of
the program, files that are replaced before it, and the name of the scores (N,) in `golden.safetensors`, before any
activation. sentence-transformers pads batches of all pairs. Eager attention, f32.
"""

import json
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sentence_embedding"))

import torch
from pipelines import DECODER, PIECES, SENTENCES, SIZES, SPECIAL, randomize
from recording import Recorder, make_all
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast,
)

QUESTION = "someone plays guitar in the rain"
MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
WORDS = "yes no user system judge instruct whether answers < >".split()
VOCAB = SPECIAL + PIECES + WORDS
EAGER = {"attn_implementation": "eager"}
TEMPLATE = """<|im_start|>system
Judge whether the document answers the query.<|im_end|>
{% for message in messages if message.role == "system" %}
<Instruct>: {{ message.content }}
{%- endfor %}

<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
{%- if add_generation_prompt %}
<think> </think> yes
{%- endif %}
 <|im_start|>
"""
# A template of chats, which ignores questions and passages.
CHATS = "{% for message in messages if message.role == 'user' %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


INPUTS = ["input_ids", "token_type_ids", "attention_mask"]


def tokenizer(pair=True, longest=16, **options):
    """Words and a few pieces, with BERT's tokens around each text of a pair or none."""
    vocab = {token: index for index, token in enumerate(VOCAB)}
    result = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    result.normalizer = normalizers.BertNormalizer()
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if pair:
        result.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
        )
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], SPECIAL))
    tokens = PreTrainedTokenizerFast(tokenizer_object=result, model_max_length=longest, **names, **options)
    tokens.add_special_tokens({"additional_special_tokens": MARKS})
    return tokens


class PairRecorder(Recorder):
    """Records scores of the question with each sentence."""

    def __init__(self, name, model=None):
        super().__init__(HERE / "cross_encoders" / name, model)

    def add(self, name, args=(), files=None, **options):
        """Records a run on the folder as it is saved, with some files replaced."""
        with self.copy(files) as path:
            model = CrossEncoder(path, model_kwargs=EAGER)
            pairs = [(QUESTION, sentence) for sentence in SENTENCES]
            scores = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True, **options)
            self.record(name, args, files, scores)


def saved(folder, auto, model_type, tokens, sizes):
    """Saves a random model of transformers with its tokenizer."""
    path = Path(folder) / "model"
    config = AutoConfig.for_model(model_type, vocab_size=len(tokens), **sizes)
    config._attn_implementation = "eager"
    model = auto.from_config(config).float().eval()
    randomize(model, sum(map(ord, model_type)))
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def classifier(model_type, poolings=(), **options):
    """Returns a function that makes an encoder with a head, and runs it with each of the poolings of its config."""
    def make(folder):
        sizes = {**SIZES, "num_labels": 1, **options}
        tokens = tokenizer(**({"model_input_names": INPUTS} if model_type == "bert" else {}))
        path = saved(folder, AutoModelForSequenceClassification, model_type, tokens, sizes)
        prompts = {"query": "search query : "}
        recorder = PairRecorder(model_type.replace("-", "_"), CrossEncoder(str(path), prompts=prompts))
        recorder.add("default")
        recorder.add("query", ["--prompt-name", "query"], prompt_name="query")
        if model_type == "bert":
            settings = recorder.read("tokenizer_config.json")
            for name, inputs in [("without_segments", [INPUTS[0], INPUTS[2]]), ("default_inputs", None)]:
                changed = {key: value for key, value in settings.items() if key != "model_input_names"}
                changed.update({"model_input_names": inputs} if inputs else {})
                recorder.add(name, files={"tokenizer_config.json": changed})
        config = recorder.read("config.json")
        for pooling in poolings:
            recorder.add(pooling, files={"config.json": {**config, "classifier_pooling": pooling}})
        recorder.save()
    return make


def qwen3_classifier(folder):
    """A decoder whose head scores the last token, as converted from Qwen3-Reranker."""
    sizes = {**DECODER, "num_labels": 1, "num_hidden_layers": 1, "max_position_embeddings": 64}
    tokens = tokenizer(longest=64, padding_side="left", chat_template=TEMPLATE)
    path = saved(folder, AutoModelForSequenceClassification, "qwen3", tokens, sizes)
    recorder = PairRecorder("qwen3_classifier", CrossEncoder(str(path)))
    recorder.add("default")
    recorder.save()


def qwen3_template(folder):
    """Qwen3-Reranker's shape: the logits of two tokens after a chat template, with an instruction as its prompt."""
    tokens = tokenizer(pair=False, longest=64, padding_side="left", chat_template=TEMPLATE)
    sizes = {**DECODER, "max_position_embeddings": 64}
    path = saved(folder, AutoModelForCausalLM, "qwen3", tokens, sizes)
    model = Transformer(str(path), transformer_task="text-generation", model_kwargs=EAGER)
    words = [VOCAB.index(word) for word in ("yes", "no")]
    prompts = {"web": "search a document", "song": "someone plays guitar"}
    modules = [model, LogitScore(*words)]
    recorder = PairRecorder("qwen3_template", CrossEncoder(modules=modules, prompts=prompts, default_prompt_name="web"))
    recorder.add("default")
    recorder.add("song", ["--prompt-name", "song"], prompt_name="song")
    recorder.add("none", ["--prompt", ""], prompt="")
    name = "sentence_bert_config.json"
    settings = recorder.read(name)
    template = {"chat_template": {"add_generation_prompt": True}}
    recorder.add("generation", files={name: {**settings, "processing_kwargs": template}})
    # Texts that are cut end as all others do, unless the settings say that they are cut like any text.
    recorder.add("cut", files={name: {**settings, "max_seq_length": 40}})
    plain = {"chat_template": {"restore_suffix": False}}
    recorder.add("cut_plain", files={name: {**settings, "max_seq_length": 40, "processing_kwargs": plain}})
    one = {"true_token_id": words[0], "false_token_id": None, "module_input_name": "causal_logits"}
    recorder.add("one", files={"1_LogitScore/config.json": one})
    recorder.save()


def gemma2_pair(folder):
    """Logits with a softcap, from pairs that the tokenizer makes and a template that wants parts of messages."""
    text = " | first | map(attribute='text') | first }}"
    parts = TEMPLATE.replace("message.content", "message.content[0].text").replace(" | first }}", text)
    tokens = tokenizer(longest=16, padding_side="left")
    sizes = {
        **DECODER, "num_hidden_layers": 1, "max_position_embeddings": 64, "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 2.0,
    }
    path = saved(folder, AutoModelForCausalLM, "gemma2", tokens, sizes)
    model = Transformer(str(path), transformer_task="text-generation", model_kwargs=EAGER)
    recorder = PairRecorder("gemma2_pair", CrossEncoder(modules=[model, LogitScore(VOCAB.index("yes"), VOCAB.index("no"))]))
    recorder.add("default")
    name = "sentence_bert_config.json"
    settings = recorder.read(name)
    message = {**settings["modality_config"]["text"], "format": "structured"}
    both = {**settings, "max_seq_length": 64, "modality_config": {**settings["modality_config"], "message": message}}
    tokenizer_settings = {**recorder.read("tokenizer_config.json"), "chat_template": parts}
    recorder.add("parts", files={name: both, "tokenizer_config.json": tokenizer_settings})
    recorder.save()


def qwen3_card(folder):
    """A folder without modules, whose pairs are made and scored as Qwen3-Reranker's card does it."""
    tokens = tokenizer(pair=False, longest=100, padding_side="left", chat_template=CHATS)
    sizes = {**DECODER, "num_hidden_layers": 1, "max_position_embeddings": 100, "tie_word_embeddings": False}
    path = saved(folder, AutoModelForCausalLM, "qwen3", tokens, sizes)
    recorder = PairRecorder("qwen3_card")
    shutil.copytree(path, recorder.path)
    (recorder.path / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(path, **EAGER).eval()
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    before = tokens.encode(prefix, add_special_tokens=False)
    after = tokens.encode(suffix, add_special_tokens=False)
    yes, no = (tokens.convert_tokens_to_ids(word) for word in ("yes", "no"))
    default = "Given a web search query, retrieve relevant passages that answer the query"

    @torch.no_grad()
    def scores(instruction, longest):
        for sentence in SENTENCES:
            text = f"<Instruct>: {instruction}\n<Query>: {QUESTION}\n<Document>: {sentence}"
            room = longest - len(before) - len(after)
            ids = tokens(text, add_special_tokens=False, truncation="longest_first", max_length=room)["input_ids"]
            logits = model(torch.tensor([before + ids + after])).logits[0, -1]
            yield logits[yes] - logits[no]

    song = "someone plays guitar"
    settings = json.loads((path / "tokenizer_config.json").read_text())
    recorder.record("default", [], None, torch.stack(list(scores(default, 100))))
    recorder.record("song", ["--prompt", song], None, torch.stack(list(scores(song, 100))))
    files = {"tokenizer_config.json": {**settings, "model_max_length": 80}}
    recorder.record("cut", [], files, torch.stack(list(scores(default, 80))))
    recorder.save()


KINDS = {
    "bert": classifier("bert"),
    "roberta": classifier("roberta", type_vocab_size=1, num_hidden_layers=1),
    "jina_embeddings_v3": classifier("jina_embeddings_v3", type_vocab_size=1, num_hidden_layers=1),
    "modernbert": classifier(
        "modernbert", ["cls", "mean"], local_attention=6, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    ),
    "deberta_v2": classifier(
        "deberta-v2", relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"],
        position_buckets=8, max_relative_positions=-1, share_att_key=True, norm_rel_ebd="layer_norm", type_vocab_size=0,
    ),
    "eurobert": classifier("eurobert", ["bos", "mean", "late"], num_key_value_heads=2, num_hidden_layers=1),
    "gte": classifier("gte", type_vocab_size=1, num_hidden_layers=1),
    "nomic_bert": classifier("nomic_bert", type_vocab_size=2, num_hidden_layers=1),
    "xlm_roberta": classifier("xlm-roberta", type_vocab_size=1, num_hidden_layers=1, max_position_embeddings=26),
    "mpnet": classifier("mpnet", num_hidden_layers=1, max_position_embeddings=26),
    "distilbert": classifier("distilbert", dim=16, hidden_dim=20, n_layers=1, n_heads=4),
    "qwen3_classifier": qwen3_classifier,
    "qwen3_template": qwen3_template,
    "qwen3_card": qwen3_card,
    "gemma2_pair": gemma2_pair,
}


if __name__ == "__main__":
    make_all(KINDS)
