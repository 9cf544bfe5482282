"""Makes the models of `pipelines/` whose code is in no package: Jina v3 and v4 with an adapter for each task, Nomic v2
with experts, and GTE with NTK scaling. Their formulas are written out here, on modules of transformers.

python tests/sentence_embedding/published.py [MODEL ..]    (packages as for pipelines.py, and peft)
"""

import itertools
import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import peft
import torch
from pipelines import (
    DECODER, PUBLISHED_GTE, SENTENCES, SIZES, PipelineRecorder, randomize, tokenizer, transformer,
)
from recording import make_all, write
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

TASKS = {
    "retrieval.query": "query : ", "retrieval.passage": "search document : ", "separation": "", "classification": "",
    "text-matching": "",
}
RANK, ALPHA = 3, 2


def jina_v3(folder):
    """Each linear layer and each embedding has a matrix A and a matrix B for each task, next to its weight. The weight
    for a task is W + alpha / rank * B A; for an embedding, whose rows are inputs, W + alpha / rank * A B.
    """
    theta = 20.0
    sizes = {**SIZES, "type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    modules = [transformer(folder, "jina_embeddings_v3", tokenizer(), sizes), Pooling(16), Normalize()]
    recorder = PipelineRecorder("jina_v3_published", SentenceTransformer(modules=modules, prompts={"other": "rain "}))
    recorder.add("no_task")
    weights = load_file(recorder.path / "model.safetensors")
    published = {}
    of_task = {task: dict(weights) for task in TASKS}
    torch.manual_seed(7)
    for name, weight in weights.items():
        if weight.dim() != 2:
            published[f"roberta.{name}"] = weight
            continue
        outputs, inputs = weight.shape
        is_embedding = "_embeddings" in name
        a = torch.randn(len(TASKS), *((outputs, RANK) if is_embedding else (RANK, inputs))) * 0.3
        b = torch.randn(len(TASKS), *((RANK, inputs) if is_embedding else (outputs, RANK))) * 0.3
        for index, task in enumerate(TASKS):
            update = a[index] @ b[index] if is_embedding else b[index] @ a[index]
            of_task[task][name] = weight + update * (ALPHA / RANK)
        place = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        published.update({f"{place}.original": weight, f"{place}.0.lora_A": a, f"{place}.0.lora_B": b})
    for task, instruction in TASKS.items():
        recorder.add(task, ["--task", task], weights=of_task[task], prompt=instruction)
    query = of_task["retrieval.query"]
    recorder.add("without", ["--task", "retrieval.query", "--prompt", ""], weights=query)
    recorder.add("other", ["--task", "retrieval.query", "--prompt-name", "other"], weights=query, prompt_name="other")
    save_file(published, recorder.path / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in recorder.read("config.json").items() if key != "rope_parameters"}
    write(recorder.path / "config.json", {
        **config, "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta",
        "position_embedding_type": "rotary", "rotary_emb_base": theta, "use_flash_attn": True, "emb_pooler": "mean",
        "lora_adaptations": list(TASKS), "task_instructions": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA,
        "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "load_trained_adapters": True,
        "matryoshka_dimensions": [8, 16], "truncate_dim": None,
    })
    modules = recorder.read("modules.json")
    modules[0].update(type="custom_st.Transformer", kwargs=["task"])
    write(recorder.path / "modules.json", modules)
    recorder.save()


def jina_v3_folders(folder):
    """Jina v3 in transformers' format, with a folder of PEFT for each task, which PEFT loads and computes."""
    sizes = {**SIZES, "type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}
    modules = [transformer(folder, "jina_embeddings_v3", tokenizer(), sizes), Pooling(16), Normalize()]
    recorder = PipelineRecorder("jina_v3_folders", SentenceTransformer(modules=modules))
    recorder.add("no_task")
    targets = [
        "q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "word_embeddings", "token_type_embeddings", "pooler.dense",
    ]
    for seed, task in enumerate(["retrieval_query", "text_matching"]):
        model = SentenceTransformer(str(recorder.path), model_kwargs={"attn_implementation": "eager"})
        options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
        adapted = peft.get_peft_model(model[0].auto_model, options)
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        recorder.record(task, ["--task", task], None, model.encode(SENTENCES, convert_to_tensor=True).clone())
        adapted.save_pretrained(recorder.path / task)
        (recorder.path / task / "README.md").unlink(missing_ok=True)
        name = f"{task}/adapter_config.json"
        plain = {"base_model_name_or_path": None, "auto_mapping": None, "target_modules": targets}
        write(recorder.path / name, {**recorder.read(name), **plain})
    recorder.save()


def jina_v4(folder):
    """The text of Qwen2.5-VL with an adapter for each task in a file of PEFT, under the names of the tasks. The model
    pools and normalises."""
    tasks = ["retrieval", "text-matching", "code"]
    sizes = {
        **DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
        "use_sliding_window": False,
    }
    sizes.pop("head_dim")
    sizes["num_attention_heads"] = 2
    module = transformer(folder, "qwen2_5_vl_text", tokenizer(template=(None, None)), sizes)
    prompts = {"query": "query : ", "passage": "document : "}
    recorder = PipelineRecorder(
        "jina_v4_published", SentenceTransformer(modules=[module, Pooling(16), Normalize()], prompts=prompts)
    )
    weights = load_file(recorder.path / "model.safetensors")
    matrices = {}
    of_task = {task: dict(weights) for task in tasks}
    torch.manual_seed(9)
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            continue
        outputs, inputs = weight.shape
        place = f"base_model.model.model.language_model.{name.removesuffix('.weight')}"
        for task in tasks:
            a, b = torch.randn(RANK, inputs) * 0.3, torch.randn(outputs, RANK) * 0.3
            of_task[task][name] = weight + b @ a * (ALPHA / RANK)
            matrices.update({f"{place}.lora_A.{task}.weight": a, f"{place}.lora_B.{task}.weight": b})
    for task in tasks:
        recorder.add(task, ["--task", task], weights=of_task[task])
    args = ["--task", "retrieval", "--prompt-name", "query"]
    recorder.add("query", args, weights=of_task["retrieval"], prompt_name="query")
    published = {f"model.{name}": weight for name, weight in weights.items()}
    save_file(published, recorder.path / "model.safetensors", {"format": "pt"})
    # Matrices of images and of vectors for each token, which texts do not use.
    for module_name in ["model.visual.blocks.0.mlp.up_proj", "multi_vector_projector"]:
        place = f"base_model.model.{module_name}"
        a, b = torch.ones(RANK, 2), torch.ones(2, RANK)
        matrices.update({f"{place}.lora_A.code.weight": a, f"{place}.lora_B.code.weight": b})
    adapters = recorder.path / "adapters"
    adapters.mkdir()
    save_file(matrices, adapters / "adapter_model.safetensors", {"format": "pt"})
    write(adapters / "adapter_config.json", {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.1, "bias": "none",
        "target_modules":
            "(.*(model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$|.*(multi_vector_projector).*$)",
    })
    text = recorder.read("config.json")
    write(recorder.path / "config.json", {
        "architectures": ["JinaEmbeddingsV4Model"], "model_type": "qwen2_5_vl", "text_config": text,
        "single_vector_pool_strategy": "mean", "multi_vector_projector_dim": 8, "task_names": tasks,
        "matryoshka_dims": [8, 16], "truncate_dim": None,
    })
    modules = recorder.read("modules.json")
    write(recorder.path / "modules.json", [{**modules[0], "type": "custom_st.Transformer", "kwargs": ["task"]}])
    for other in modules[1:]:
        shutil.rmtree(recorder.path / other["path"], ignore_errors=True)
    recorder.save()


class Experts(nn.Module):
    """A few MLPs without a gate for each token: the ones of the largest weights, which are a softmax over all and are
    not divided by their sum. The bias is added once."""

    def __init__(self, width, inner, count, chosen):
        super().__init__()
        self.inner, self.chosen = inner, chosen
        self.router = nn.Linear(width, count, bias=False)
        self.w1 = nn.Parameter(torch.empty(count * inner, width))
        self.w2 = nn.Parameter(torch.empty(count * inner, width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, xs):
        weights, experts = self.router(xs).softmax(-1).topk(self.chosen, -1)
        result = self.bias.expand_as(xs).clone()
        for at in itertools.product(*map(range, xs.shape[:-1])):
            for weight, expert in zip(weights[at], experts[at]):
                rows = slice(int(expert) * self.inner, (int(expert) + 1) * self.inner)
                result[at] += weight * (nn.functional.gelu(self.w1[rows] @ xs[at]) @ self.w2[rows])
        return result


def gte_ntk(folder):
    """GTE with the settings of its published checkpoints under the model type of transformers, as Snowflake's Arctic v2
    has them, with the scaling "ntk": the base of the frequencies times a factor, and all frequencies divided by a power
    of it."""
    theta, factor, width = 20.0, 4.0, 4
    sizes = {**SIZES, "type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    model = SentenceTransformer(modules=[transformer(folder, "gte", tokenizer(), sizes), Pooling(16), Normalize()])
    recorder = PipelineRecorder("gte_ntk", model)
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies = 1 / (theta * factor) ** exponents / factor ** (2 / width)
    rotary = model[0].auto_model.rotary_emb
    assert rotary.inv_freq.shape == frequencies.shape
    rotary.inv_freq.copy_(frequencies)
    recorder.record("default", [], None, model.encode(SENTENCES, convert_to_tensor=True).clone())
    config = {key: value for key, value in recorder.read("config.json").items() if key != "rope_parameters"}
    scaling = {"factor": factor, "type": "ntk"}
    write(recorder.path / "config.json", {**config, **PUBLISHED_GTE, "rope_theta": theta, "rope_scaling": scaling})
    recorder.save()


def nomic_v2(folder):
    """Nomic's encoder with biases, where every second layer has experts and the others an MLP without a gate."""
    inner, experts, chosen = 12, 4, 2
    sizes = {
        **SIZES, "num_hidden_layers": 4, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    }
    module = transformer(folder, "nomic_bert", tokenizer(), sizes)
    prompts = {"query": "query : ", "passage": "search document : "}
    model = SentenceTransformer(modules=[module, Pooling(16), Normalize()], prompts=prompts)
    recorder = PipelineRecorder("nomic_v2", model)
    encoder = module.auto_model
    for index, layer in enumerate(encoder.layers):
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"]:
            setattr(layer.self_attn, name, nn.Linear(16, 16))
        plain = nn.Sequential(nn.Linear(16, inner), nn.GELU(), nn.Linear(inner, 16))
        layer.mlp = Experts(16, inner, experts, chosen) if index % 2 else plain
    randomize(encoder, 11)
    for name, args, prompt in [("default", [], None), ("query", ["--prompt-name", "query"], "query")]:
        vectors = model.encode(SENTENCES, prompt_name=prompt, convert_to_tensor=True)
        recorder.record(name, args, None, vectors.clone())
    weights = {}
    for name, tensor in encoder.state_dict().items():
        for own, published in [
            ("embeddings.LayerNorm", "emb_ln"), ("self_attn.o_proj", "attn.out_proj"), ("mlp.0.", "mlp.fc1."),
            ("mlp.2.", "mlp.fc2."), ("post_attention_layernorm", "norm1"), ("post_mlp_layernorm", "norm2"),
            ("mlp.router.", "mlp.router.layer."), ("mlp.w", "mlp.experts.mlp.w"), ("mlp.bias", "mlp.experts.bias"),
        ]:
            name = name.replace(own, published)
        weights[f"encoder.{name}" if name.startswith("layers.") else name] = tensor
    for name in [name for name in weights if ".q_proj." in name]:
        parts = [weights.pop(name.replace("q_proj", part)) for part in ["q_proj", "k_proj", "v_proj"]]
        weights[name.replace("self_attn.q_proj", "attn.Wqkv")] = torch.cat(parts)
    save_file(weights, recorder.path / "model.safetensors", {"format": "pt"})
    write(recorder.path / "config.json", {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": encoder.config.vocab_size,
        "n_embd": 16, "n_layer": 4, "n_head": 4, "n_inner": inner, "n_positions": 24, "type_vocab_size": 1,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu", "pad_token_id": 0, "prenorm": False,
        "parallel_block": False, "use_rms_norm": False, "causal": False, "qkv_proj_bias": True, "mlp_fc1_bias": True,
        "mlp_fc2_bias": True, "rotary_emb_base": 30.0, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "num_experts": experts, "moe_top_k": chosen,
        "moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "expert_choice_router": False,
        "num_shared_experts": 0, "ffn_div": 1.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    })
    recorder.save()


KINDS = {"jina_v3_published": jina_v3, "jina_v3_folders": jina_v3_folders, "jina_v4_published": jina_v4, "nomic_v2": nomic_v2, "gte_ntk": gte_ntk}


if __name__ == "__main__":
    make_all(KINDS)
