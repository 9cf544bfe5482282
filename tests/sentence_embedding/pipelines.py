"""Makes `pipelines/`: tiny random models of sentence-transformers, and the vectors that it computes for `sentences.txt`.

python tests/sentence_embedding/pipelines.py [MODEL ..]    (packages: tests/hf/requirements.txt, sentence-transformers)

A folder is what `SentenceTransformer.save` writes. `golden.json` lists runs: the options of the program, files that are
replaced before it, and the name of the vectors (N, E) in `golden.safetensors`; with similarities (N, N) if it has
`{name}.similarity`. sentence-transformers pads batches of all sentences, on the side that the tokenizer has. Eager
attention, f32.
"""

import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from recording import Recorder, make_all, write
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

HERE = Path(__file__).resolve().parent
SENTENCES = [line for line in (HERE / "sentences.txt").read_text().splitlines() if line.strip()]
PIECES = (
    "a man eats food the sky is blue girl carries baby on while old plays guitar rain some ##one piece of bread two "
    "men push cart ##s through wood ##in in st ##reet query : document search"
).split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24, "pad_token_id": 0,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}


# A model type would choose the class of its published tokenizers, which is not that of the files here.
for model_type in list(tokenization_auto.TOKENIZER_MAPPING_NAMES):
    tokenization_auto.TOKENIZER_MAPPING_NAMES[model_type] = "TokenizersBackend"


def tokenizer(lowers=True, template=("[CLS]", "[SEP]"), more=(), **options):
    """Words and a few pieces. `template` has the special tokens before and after a text, `more` other words."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *PIECES, *more])}
    result = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    if lowers:
        result.normalizer = normalizers.BertNormalizer()
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    before, after = template
    single = " ".join(part for part in [before, "$A", after] if part)
    special = [(token, vocab[token]) for token in template if token]
    result.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=result, model_max_length=16, **names, **options)


def randomize(module, seed):
    torch.manual_seed(seed)
    for key, parameter in module.named_parameters():
        is_norm = "norm" in key.lower() and key.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.4)


def transformer(folder, model_type, tokens, sizes, **options):
    """Saves a random model of transformers, and loads it as the first module."""
    path = Path(folder) / "transformer"
    config = AutoConfig.for_model(model_type, vocab_size=len(tokens), **sizes)
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config).float().eval()
    randomize(model, sum(map(ord, model_type)))
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return Transformer(str(path), model_kwargs={"attn_implementation": "eager"}, **options)


class PipelineRecorder(Recorder):
    """Records vectors of the sentences."""

    def __init__(self, name, model):
        super().__init__(HERE / "pipelines" / name, model)

    def add(self, name, args=(), files=None, similarity=False, weights=None, **options):
        """Records a run on the folder as it is saved, with some files replaced. `weights` replace the
        model's, if there are some."""
        with self.copy(files) as path:
            if weights is not None:
                save_file(weights, Path(path) / "model.safetensors", {"format": "pt"})
            model = SentenceTransformer(path, model_kwargs={"attn_implementation": "eager"})
            vectors = model.encode(SENTENCES, convert_to_tensor=True, **options).cpu()
            self.record(name, args, files, vectors)
            if similarity:
                self.tensors[f"{name}.similarity"] = model.similarity(vectors, vectors).contiguous()


def layers(folder):
    """All modules after pooling, and settings of the whole checkpoint."""
    modules = [
        transformer(folder, "bert", tokenizer(), SIZES),
        Pooling(16, pooling_mode=("cls", "mean")),
        LayerNorm(32),
        Dropout(0.5),
        Dense(32, 12, activation_function=torch.nn.Tanh()),
        Dense(12, 12, bias=False, activation_function=torch.nn.GELU(), use_residual=True),
        Dense(12, 10, activation_function=torch.nn.Identity(), use_residual=True),
        Normalize(),
    ]
    for seed, module in enumerate(modules[2:]):
        randomize(module, seed)
    prompts = {"query": "query : ", "document": "search document : "}
    recorder = PipelineRecorder("layers", SentenceTransformer(modules=modules, prompts=prompts, similarity_fn_name="dot"))
    settings = recorder.read("config_sentence_transformers.json")
    name = "config_sentence_transformers.json"
    recorder.add("default", similarity=True)
    recorder.add("query", ["--prompt-name", "query"], prompt_name="query")
    recorder.add("given", ["--prompt", "the sky is "], prompt="the sky is ")
    recorder.add("document", files={name: {**settings, "default_prompt_name": "document"}})
    recorder.add("dimensions", ["--dimensions", "4"], truncate_dim=4)
    recorder.add("normalized", ["--dimensions", "4", "--normalize"], truncate_dim=4, normalize_embeddings=True)
    for measure in ["cosine", "euclidean", "manhattan"]:
        changed = {**settings, "similarity_fn_name": measure, "truncate_dim": 6}
        recorder.add(measure, files={name: changed}, similarity=True)
    recorder.save()


def poolings(folder):
    """Every pooling, by new and old names, with and without the tokens of a prompt."""
    modules = [transformer(folder, "roberta", tokenizer(), {**SIZES, "pad_token_id": 0}), Pooling(16)]
    recorder = PipelineRecorder("poolings", SentenceTransformer(modules=modules, prompts={"query": "query : ", "none": ""}))
    flags = [
        "cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken",
    ]
    file = "1_Pooling/config.json"
    for mode in Pooling.POOLING_MODES:
        recorder.add(mode, files={file: {"embedding_dimension": 16, "pooling_mode": mode}})
        without = {"embedding_dimension": 16, "pooling_mode": mode, "include_prompt": False}
        args = ["--prompt-name", "query"]
        recorder.add(f"{mode}.after", args, {file: without}, prompt_name="query")
    old = {f"pooling_mode_{flag}": True for flag in flags}
    recorder.add("all", files={file: {"word_embedding_dimension": 16, **old}})
    recorder.add("one", files={file: {"word_embedding_dimension": 16, "pooling_mode_weightedmean_tokens": True}})
    recorder.add("no_flag", files={file: {"word_embedding_dimension": 16, "pooling_mode_cls_token": False}})
    listed = {"embedding_dimension": 16, "pooling_mode": ["lasttoken", "max"], "include_prompt": False}
    recorder.add("list", files={file: listed})
    recorder.add("empty_prompt", ["--prompt-name", "none"], {file: {**listed, "pooling_mode": "mean"}}, prompt_name="none")
    recorder.save()


def letters(folder):
    """A tokenizer that does not lower letters, a model that says that they are, and lengths."""
    modules = [transformer(folder, "bert", tokenizer(lowers=False), SIZES), Pooling(16)]
    recorder = PipelineRecorder("letters", SentenceTransformer(modules=modules))
    settings = recorder.read("sentence_bert_config.json")
    older = {"max_seq_length": 7, "do_lower_case": True, "model_args": {"attn_implementation": "eager"}}
    prompt = "The SKY is "
    recorder.add("kept", ["--prompt", prompt], prompt=prompt)
    recorder.add("lowered", ["--prompt", prompt], {"sentence_bert_config.json": {**settings, **older}}, prompt=prompt)
    lengths = {**settings, "query_length": 5, "document_length": 9}
    for task in ["query", "document"]:
        recorder.add(task, ["--task", task], {"sentence_bert_config.json": lengths}, task=task)
    recorder.save()


def router(folder):
    """Two routes with models of their own, and a layer after both."""
    query = [transformer(Path(folder) / "query", "bert", tokenizer(), {**SIZES, "num_hidden_layers": 1}), Pooling(16)]
    document = [
        transformer(Path(folder) / "document", "modernbert", tokenizer(), {
            **SIZES, "num_hidden_layers": 2, "local_attention": 6, "bos_token_id": 2, "eos_token_id": 3,
            "cls_token_id": 2, "sep_token_id": 3,
        }),
        Pooling(16, pooling_mode="cls"),
        Dense(16, 16, activation_function=torch.nn.SiLU()),
    ]
    randomize(document[2], 3)
    both = Router.for_query_document(query_modules=query, document_modules=document, default_route="document")
    recorder = PipelineRecorder("router", SentenceTransformer(modules=[both, Normalize()]))
    recorder.add("default")
    recorder.add("query", ["--task", "query"], task="query")
    recorder.add("document", ["--task", "document"], task="document")
    name = "router_config.json"
    config = recorder.read(name)
    config["parameters"]["route_mappings"] = {"('classify', 'text')": "query", "(None, 'text')": "document"}
    recorder.add("mapped", ["--task", "classify"], {name: config}, task="classify")
    recorder.save()


def after_router(folder):
    """A router after pooling, which chooses a projection."""
    projections = {name: [Dense(16, 8)] for name in ["left", "right"]}
    for seed, modules in enumerate(projections.values()):
        randomize(modules[0], seed)
    modules = [transformer(folder, "bert", tokenizer(), {**SIZES, "num_hidden_layers": 1}), Pooling(16)]
    modules.append(Router(projections, default_route="left"))
    recorder = PipelineRecorder("after_router", SentenceTransformer(modules=modules))
    recorder.add("left")
    recorder.add("right", ["--task", "right"], task="right")
    recorder.save()


def qwen3_embedding(folder):
    """Qwen3-Embedding's shape: the last token of a causal model, an end token, instructions as prompts."""
    tokens = tokenizer(template=(None, "[SEP]"), padding_side="left")
    modules = [transformer(folder, "qwen3", tokens, DECODER), Pooling(16, pooling_mode="lasttoken"), Normalize()]
    prompts = {"query": "query : a man eats \nsearch : ", "document": ""}
    recorder = PipelineRecorder("qwen3_embedding", SentenceTransformer(modules=modules, prompts=prompts))
    name = "tokenizer_config.json"
    settings = recorder.read(name)
    for side in ["left", "right"]:
        recorder.add(side, files={name: {**settings, "padding_side": side}})
    assert torch.allclose(recorder.tensors["left"], recorder.tensors["right"], atol=1e-6)
    recorder.add("query", ["--prompt-name", "query", "--dimensions", "8"], prompt_name="query", truncate_dim=8)
    # As the model was trained to be cut: the mean with weights by position, from the first token that is no padding.
    weighted = {"1_Pooling/config.json": {"embedding_dimension": 16, "pooling_mode": "weightedmean"}}
    recorder.add("weighted", files=weighted)
    recorder.save()


def qwen2_bidirectional(folder):
    """GTE-Qwen2's shape: a decoder whose tokens attend to all tokens, the last of them pooled."""
    tokens = tokenizer(template=(None, "[SEP]"), padding_side="left")
    sizes = {**DECODER, "is_causal": False, "use_sliding_window": False}
    modules = [transformer(folder, "qwen2", tokens, sizes), Pooling(16, pooling_mode="lasttoken"), Normalize()]
    recorder = PipelineRecorder("qwen2_bidirectional", SentenceTransformer(modules=modules))
    recorder.add("default")
    recorder.save()


def embedding_gemma(folder):
    """EmbeddingGemma's shape: Gemma 3 with attention in both directions, the mean, two projections."""
    tokens = tokenizer(template=("[CLS]", "[SEP]"), padding_side="right")
    sizes = {
        **DECODER, "num_hidden_layers": 3, "use_bidirectional_attention": True, "sliding_window": 6,
        "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    projections = [
        Dense(16, 24, bias=False, activation_function=torch.nn.Identity()),
        Dense(24, 16, bias=False, activation_function=torch.nn.Identity()),
    ]
    for seed, module in enumerate(projections):
        randomize(module, seed)
    modules = [transformer(folder, "gemma3_text", tokens, sizes), Pooling(16), *projections, Normalize()]
    prompts = {"query": "search : query : ", "document": "document : "}
    recorder = PipelineRecorder("embedding_gemma", SentenceTransformer(modules=modules, prompts=prompts))
    recorder.add("default")
    recorder.add("query", ["--prompt-name", "query"], prompt_name="query")
    recorder.save()


PUBLISHED_GTE = {
    "pack_qkv": True, "layer_norm_type": "layer_norm", "logn_attention_scale": False, "position_embedding_type": "rope",
}


def gte_published(folder):
    """GTE's own encoder by the names of its published checkpoints: gate and up in one weight, queries, keys and values
    in one, and a config of the model type "new". transformers reads them as its own GTE, which computes the vectors.
    """
    sizes = {**SIZES, "type_vocab_size": 1, "pad_token_id": 0}
    module = transformer(folder, "gte", tokenizer(), sizes)
    modules = [module, Pooling(16, pooling_mode="cls"), Normalize()]
    recorder = PipelineRecorder("gte_published", SentenceTransformer(modules=modules))
    recorder.add("default")
    # transformers saves GTE under the published names without their prefix.
    weights = load_file(recorder.path / "model.safetensors")
    weights = {f"new.{name}": tensor for name, tensor in weights.items()}
    save_file(weights, recorder.path / "model.safetensors", {"format": "pt"})
    recorder.add("renamed")
    assert torch.equal(recorder.tensors["default"], recorder.tensors.pop("renamed"))
    recorder.runs.pop()
    config = recorder.read("config.json")
    theta = config.pop("rope_parameters")["rope_theta"]
    published = {**config, **PUBLISHED_GTE, "model_type": "new", "rope_theta": theta, "rope_scaling": None}
    write(recorder.path / "config.json", published)
    recorder.save()


MARKS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- for message in messages %}
{%- if message.role == "system" %}<|im_start|>search : {{ message.content }}
{% else %}<|im_start|> {{ message.content }} {% if task == "query" %}rain {% endif %}
{%- if add_generation_prompt %}wood {% endif %}<|im_end|>
{%- endif %}
{%- endfor %}[SEP]"""
# The same texts, of messages whose content is a list.
PARTS = TEMPLATE.replace("message.content", "message.content[0].text")


def chat_template(folder):
    """A decoder whose texts are made by a chat template, with the prompt as a message of the system."""
    # sentence-transformers tells the end of all texts by texts of numbers.
    tokens = tokenizer(template=(None, None), more="01234", padding_side="left", chat_template=TEMPLATE)
    tokens.add_special_tokens({"additional_special_tokens": MARKS})
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = {"text": text, "message": {**text, "format": "flat"}}
    output = "token_embeddings"
    module = transformer(folder, "qwen3", tokens, DECODER, modality_config=modalities, module_output_name=output)
    modules = [module, Pooling(16, pooling_mode="lasttoken"), Normalize()]
    prompts = {"query": "a man eats"}
    recorder = PipelineRecorder("chat_template", SentenceTransformer(modules=modules, prompts=prompts))
    # A run can replace JSON alone.
    (recorder.path / "chat_template.jinja").unlink()
    tokenizer_settings = {**recorder.read("tokenizer_config.json"), "chat_template": TEMPLATE}
    write(recorder.path / "tokenizer_config.json", tokenizer_settings)
    recorder.add("default")
    recorder.add("query", ["--prompt-name", "query"], prompt_name="query")
    recorder.add("task", ["--task", "query"], task="query")
    name = "sentence_bert_config.json"
    settings = recorder.read(name)
    generation = {"chat_template": {"add_generation_prompt": True, "task": "query"}}
    recorder.add("variables", files={name: {**settings, "processing_kwargs": generation}})
    # Texts that are cut end as all others do, unless the settings say that they are cut like any text.
    recorder.add("cut", ["--prompt-name", "query"], {name: {**settings, "max_seq_length": 10}}, prompt_name="query")
    plain = {"chat_template": {"restore_suffix": False}}
    recorder.add("cut_plain", files={name: {**settings, "max_seq_length": 6, "processing_kwargs": plain}})
    parts = {name: {**settings, "modality_config": {"text": text, "message": {**text, "format": "structured"}}}}
    recorder.add("parts", files={**parts, "tokenizer_config.json": {**tokenizer_settings, "chat_template": PARTS}})
    # The prompt's tokens cannot be told from the text's, so that all are pooled.
    pooling = {"1_Pooling/config.json": {"embedding_dimension": 16, "pooling_mode": "mean", "include_prompt": False}}
    recorder.add("pooled", ["--prompt", "a man"], pooling, prompt="a man")
    recorder.save()


def encoder(name, model_type, **options):
    """Returns a function that makes an encoder with mean pooling."""
    def make(folder):
        modules = [transformer(folder, model_type, tokenizer(), {**SIZES, **options}), Pooling(16), Normalize()]
        recorder = PipelineRecorder(name, SentenceTransformer(modules=modules))
        recorder.add("default")
        recorder.save()
    return make


def nomic_ntk(folder):
    """Nomic with frequencies that depend on the length of a text beyond 8 tokens. transformers takes the longest text of
    a batch, and its latest calls, so that each text is alone and follows a short one here."""
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    sizes = {**SIZES, "max_position_embeddings": 8, "type_vocab_size": 2, "rope_parameters": rope}
    model = SentenceTransformer(modules=[transformer(folder, "nomic_bert", tokenizer(), sizes), Pooling(16), Normalize()])
    model.max_seq_length = 16
    recorder = PipelineRecorder("nomic_ntk", model)

    def alone(text):
        model.encode(["man"])
        return model.encode([text], convert_to_tensor=True)[0]

    vectors = torch.stack([alone(sentence) for sentence in SENTENCES])
    # As published: the context has another name, and the model has positions for longer texts.
    config = {key: value for key, value in recorder.read("config.json").items() if key != "rope_parameters"}
    published = {
        **config, "max_position_embeddings": 24, "rotary_emb_base": 1000, "rotary_scaling_factor": 2,
        "max_trained_positions": 8,
    }
    write(recorder.path / "config.json", published)
    recorder.record("default", [], None, vectors.clone())
    recorder.save()


KINDS = {
    "layers": layers,
    "poolings": poolings,
    "letters": letters,
    "router": router,
    "after_router": after_router,
    "qwen3_embedding": qwen3_embedding,
    "qwen2_bidirectional": qwen2_bidirectional,
    "embedding_gemma": embedding_gemma,
    "chat_template": chat_template,
    "deberta_v2": encoder(
        "deberta_v2", "deberta-v2", relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"],
        position_buckets=8, max_relative_positions=-1, share_att_key=True, norm_rel_ebd="layer_norm", type_vocab_size=0,
    ),
    "deberta_v2_absolute": encoder("deberta_v2_absolute", "deberta-v2", type_vocab_size=2),
    "eurobert": encoder("eurobert", "eurobert", num_key_value_heads=2),
    "jina_embeddings_v3": encoder("jina_embeddings_v3", "jina_embeddings_v3", type_vocab_size=1),
    "gte": encoder("gte", "gte", type_vocab_size=1, rope_parameters={"rope_type": "default", "rope_theta": 20.0}),
    "gte_published": gte_published,
    "xlm_roberta": encoder("xlm_roberta", "xlm-roberta", max_position_embeddings=26, type_vocab_size=1),
    "mpnet": encoder("mpnet", "mpnet", max_position_embeddings=26),
    "distilbert": encoder("distilbert", "distilbert", dim=16, hidden_dim=20, n_layers=2, n_heads=4),
    "nomic_bert": encoder("nomic_bert", "nomic_bert", type_vocab_size=2),
    "nomic_ntk": nomic_ntk,
    "camembert": encoder("camembert", "camembert", max_position_embeddings=26, type_vocab_size=1),
}


if __name__ == "__main__":
    make_all(KINDS)
