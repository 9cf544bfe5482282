"""The models of `models/`: tiny ones of every architecture, and the configurations that change their attention.

Widths are small and uneven on purpose: a head as wide as `hidden_size / heads` would hide which of the two a loader
reads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForVideoClassification,
    BlipVisionModel,
    CLIPTextModel,
    ParakeetEncoder,
    SamVisionModel,
    SegformerModel,
    VitDetModel,
    Wav2Vec2BertModel,
    Wav2Vec2ConformerModel,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2TextForCausalLM
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Backbone
from transformers.models.sam3.modeling_sam3 import Sam3DetrEncoder

from inputs import beside_an_image, in_a_window

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# Architectures that have a key head for each query head, or another name for their number.
UNGROUPED = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
# GPT-2's names of the same sizes.
GPT2_SIZES = {"vocab_size": 61, "n_embd": 32, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
ONE_LAYER = {"num_hidden_layers": 1}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
HEAD_DIM = {"head_dim": 12}

# Two kinds of layers, two that read keys and values of these, and inputs for each layer.
GEMMA3N = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 61,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
# Half of a head of 12 rotates, 3 pairs.
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5], "long_factor": [1.0, 2.0, 3.5]}
T5 = {
    "sizes": {
        "vocab_size": 61,
        "d_model": 32,
        "d_kv": 10,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 7,
        "pad_token_id": 0,
    },
    "auto_class": AutoModelForSeq2SeqLM,
    "layers": "encoder.block",
    "attention": "layer.0.SelfAttention",
    "out_proj": "layer.0.SelfAttention.o",
}
DEEPSEEK = {
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
    # Dense layers only: attention is what is recorded.
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "moe_intermediate_size": 8,
}

# Many heads, since the scores of few heads are often 0 for several keys.
INDEXER = {"index_n_heads": 12, "index_head_dim": 8, "index_topk": 4}

# A layer of each kind: a window alone, keys that an indexer chooses, and all compressed keys.
DEEPSEEK_V4 = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 14,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "sliding_window": 3,
    "o_groups": 2,
    "o_lora_rank": 6,
    "index_n_heads": 12,
    "index_head_dim": 8,
    "index_topk": 3,
    "hc_mult": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
}

DOTS3 = {
    "layer_types": ["indexed_attention", "sliding_attention"],
    "sliding_window": 5,
    "n_shared_experts": 1,
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 3,
    "swa_q_lora_rank": 12,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 14,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 7,
}
MINIMAX_M3 = {
    "head_dim": 12,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "dense"],
    "dense_intermediate_size": 24,
    "index_n_heads": 2,
    "index_head_dim": 15,
    "index_block_size": 2,
    "index_topk_blocks": 3,
}
QWEN4 = {
    "head_dim": 12,
    "layer_types": ["indexed_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.67, "mrope_section": [2, 1, 1]},
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 10,
    "indexer_budget": 6,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 4,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
BAILING = {
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["dense"],
    "q_lora_rank": None,
    "head_dim": 4,
    "num_mtp_layers": 0,
}
LONGCAT = {
    "num_layers": 1,
    "ffn_hidden_size": 24,
    "n_routed_experts": 2,
    "zero_expert_num": 1,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 8,
    "head_dim": 4,
}
GLM5_NEXT = {
    "layer_types": ["indexed_attention"],
    "qk_rope_head_dim": 0,
    "index_kpool": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "mlp_layer_types": ["dense"],
}

DEBERTA = {
    "layers": "encoder.layer",
    "attention": "attention.self",
    "out_proj": "attention.output.dense",
    "auto_class": AutoModel,
}
LENGTH = 13
# For what has more parameters than projections.
SMALL = {"hidden_size": 16, "num_attention_heads": 2}


@dataclass
class Case:
    """One model: its configuration, and where its attention stands.

    `attention` and `out_proj` are paths below a layer, `layers` the list of layers below the base model.
    """

    model_type: str
    config: dict
    layers: str = "layers"
    attention: str = "self_attn"
    out_proj: str = "self_attn.o_proj"
    auto_class: type = AutoModelForCausalLM
    encoder: bool = False
    # The decoder of a model with an encoder: by its kind, the layers below the model, and as above.
    decoder: dict = field(default_factory=dict)
    # Other inputs than token ids.
    inputs: Callable | None = None
    # Positions on the axes of rotary positions, where the inputs do not have them.
    positions: Callable | None = None
    # Projections of queries, keys and values below the attention, where their inputs differ.
    separate: tuple = ()
    # Attention besides the self-attention: by its name, the module below a layer.
    named: dict = field(default_factory=dict)


def decoder(model_type, *configs, sizes=SIZES, **places):
    merged = dict(sizes)
    for config in configs:
        merged |= config
    return Case(model_type, merged, **places)


def encoder(model_type, *configs, sizes=UNGROUPED, auto_class=AutoModelForMaskedLM, **places):
    return decoder(model_type, *configs, sizes=sizes, auto_class=auto_class, encoder=True, **places)


def rope(**parameters):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0} | parameters}


SWIN = {
    "image_size": 16,
    "patch_size": 4,
    "window_size": 2,
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [2, 4],
}
SWIN_PLACES = {
    "sizes": {},
    "auto_class": AutoModel,
    "layers": "encoder.layers",
    "attention": "attention",
    "inputs": lambda config: {"pixel_values": torch.randn(2, 3, 16, 16)},
}

SEQ2SEQ = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 1,
    # Fewer heads than the encoder's.
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
BART_DECODER = {
    "decoder": ("decoder.layers", "self_attn", "self_attn.out_proj"),
    "cross": ("decoder.layers", "encoder_attn", "encoder_attn.out_proj"),
}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}


def image(model_type, *configs, **places):
    """An encoder of images, which has no padding."""
    usual = lambda config: {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}
    case = encoder(model_type, *configs, sizes=IMAGES, **places)
    case.encoder = False
    case.inputs = case.inputs or usual
    return case


def columns_and_rows():
    """The places of 3 x 3 patches."""
    return torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1).flip(0)


def centres(config):
    """DINOv3's: 2 pi times the centres of 3 x 3 patches between -1 and 1, after a class token and registers."""
    rows = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
    patches = 2 * math.pi * ((rows + 0.5) / 3 * 2 - 1)
    return torch.cat([torch.zeros(2, 1 + config.num_register_tokens), patches], dim=1)


GPT2_PLACES = {"layers": "h", "attention": "attn", "out_proj": "attn.c_proj"}
BLOOM_PLACES = {"layers": "h", "attention": "self_attention", "out_proj": "self_attention.dense"}
FALCON = {"sizes": UNGROUPED} | BLOOM_PLACES
BERT = {"layers": "encoder.layer", "attention": "attention.self", "out_proj": "attention.output.dense"}

CASES = {
    "llama": decoder("llama", HEAD_DIM, {"attention_bias": True}, rope()),
    "llama_linear": decoder("llama", ONE_LAYER, rope(rope_type="linear", factor=3.0)),
    # 13 positions are more than 8: the base grows with them.
    "llama_dynamic": decoder("llama", ONE_LAYER, {"max_position_embeddings": 8}, rope(rope_type="dynamic", factor=2.0)),
    "llama_llama3": decoder("llama", ONE_LAYER, HEAD_DIM, {"rope_parameters": LLAMA3}),
    "llama_yarn": decoder("llama", ONE_LAYER, HEAD_DIM, {"rope_parameters": YARN}),
    "llama_yarn_options": decoder(
        "llama",
        ONE_LAYER,
        HEAD_DIM,
        {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.8, "mscale_all_dim": 0.5}},
    ),
    "llama_bidirectional": decoder("llama", ONE_LAYER, {"is_causal": False}),
    "mistral": decoder("mistral", HEAD_DIM, {"sliding_window": 5}),
    "mistral_full": decoder("mistral", ONE_LAYER, {"sliding_window": None}),
    "mistral_bidirectional": decoder("mistral", ONE_LAYER, {"sliding_window": 3, "is_causal": False}),
    "mixtral": decoder(
        "mixtral", ONE_LAYER, HEAD_DIM, {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}
    ),
    "qwen2": decoder("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": decoder("qwen3", HEAD_DIM, {"use_sliding_window": True} | ALTERNATING),
    "qwen3_bias": decoder("qwen3", ONE_LAYER, HEAD_DIM, {"attention_bias": True}),
    "gemma": decoder("gemma", ONE_LAYER, HEAD_DIM, {"num_key_value_heads": 1}),
    "gemma2": decoder("gemma2", HEAD_DIM, ALTERNATING, {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}),
    "gemma3": decoder(
        "gemma3_text",
        HEAD_DIM,
        ALTERNATING,
        {
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3_bidirectional": decoder(
        "gemma3_text",
        HEAD_DIM,
        ALTERNATING,
        {"query_pre_attn_scalar": 20, "sliding_window": 6, "use_bidirectional_attention": True},
    ),
    "phi": decoder("phi", ONE_LAYER, rope(partial_rotary_factor=0.5), out_proj="self_attn.dense"),
    "phi_qk_layernorm": decoder("phi", ONE_LAYER, {"qk_layernorm": True}, out_proj="self_attn.dense"),
    "phi3": decoder("phi3", ONE_LAYER, {"sliding_window": 5}, rope(partial_rotary_factor=0.5)),
    # 13 positions are more than 8 and less than 16.
    "phi3_longrope_long": decoder(
        "phi3",
        ONE_LAYER,
        {"original_max_position_embeddings": 8, "num_attention_heads": 2, "hidden_size": 24},
        {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}},
    ),
    "phi3_longrope_short": decoder(
        "phi3",
        ONE_LAYER,
        {"original_max_position_embeddings": 16, "num_attention_heads": 2, "hidden_size": 24},
        {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}},
    ),
    "olmo2": decoder("olmo2", ONE_LAYER),
    "olmo2_bias": decoder("olmo2", ONE_LAYER, {"attention_bias": True}),
    "cohere": decoder("cohere", ONE_LAYER),
    "cohere_qk_norm": decoder("cohere", ONE_LAYER, {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": decoder("cohere2", ALTERNATING),
    "glm": decoder("glm", ONE_LAYER, HEAD_DIM),
    "glm_full_rotary": decoder(
        "glm", ONE_LAYER, {"head_dim": 8, "attention_bias": False}, rope(partial_rotary_factor=1.0)
    ),
    "glm4": decoder("glm4", ONE_LAYER, HEAD_DIM),
    "stablelm": decoder("stablelm", ONE_LAYER, rope(partial_rotary_factor=0.25)),
    "stablelm_qk_layernorm": decoder("stablelm", ONE_LAYER, {"qk_layernorm": True, "use_qkv_bias": True}),
    "starcoder2": decoder("starcoder2", ONE_LAYER, {"sliding_window": 5}),
    "starcoder2_no_bias": decoder("starcoder2", ONE_LAYER, {"use_bias": False}),
    "granite": decoder("granite", ONE_LAYER, {"attention_multiplier": 0.4}),
    "flint": decoder(
        "flint",
        HEAD_DIM,
        ALTERNATING,
        {"mlp_only_layers": [0, 1], "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    ),
    "gpt_oss": decoder("gpt_oss", HEAD_DIM, ALTERNATING, {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "smollm3": decoder(
        "smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5, "pad_token_id": 0}
    ),
    "gpt2": decoder("gpt2", sizes=GPT2_SIZES, **GPT2_PLACES),
    "gpt2_scaled_by_layer": decoder(
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "reorder_and_upcast_attn": True},
        sizes=GPT2_SIZES,
        **GPT2_PLACES,
    ),
    "gpt_neox": decoder(
        "gpt_neox",
        ONE_LAYER,
        rope(partial_rotary_factor=0.5),
        sizes=UNGROUPED,
        attention="attention",
        out_proj="attention.dense",
    ),
    "gptj": decoder(
        "gptj", {"n_layer": 1, "rotary_dim": 4}, sizes=GPT2_SIZES, **GPT2_PLACES | {"out_proj": "attn.out_proj"}
    ),
    "opt": decoder(
        "opt",
        ONE_LAYER,
        {"ffn_dim": 24, "word_embed_proj_dim": 32},
        sizes=UNGROUPED,
        layers="decoder.layers",
        out_proj="self_attn.out_proj",
    ),
    # 6 heads: ALiBi has its own rule where their number is no power of two.
    "bloom": decoder(
        "bloom",
        sizes={"vocab_size": 61, "hidden_size": 36, "n_layer": 1, "n_head": 6},
        **BLOOM_PLACES,
    ),
    "falcon_multi_query": decoder("falcon", ONE_LAYER, {"multi_query": True, "bias": True}, **FALCON),
    "falcon_grouped": decoder("falcon", ONE_LAYER, {"new_decoder_architecture": True, "num_kv_heads": 2}, **FALCON),
    "falcon_every_head": decoder("falcon", ONE_LAYER, {"multi_query": False, "parallel_attn": False}, **FALCON),
    "falcon_alibi": decoder("falcon", ONE_LAYER, {"alibi": True, "multi_query": False}, **FALCON),
    "falcon_alibi_6_heads": decoder(
        "falcon", ONE_LAYER, {"alibi": True, "multi_query": True, "num_attention_heads": 6, "hidden_size": 36}, **FALCON
    ),
    "gpt_bigcode": decoder("gpt_bigcode", {"n_layer": 1}, sizes=GPT2_SIZES, **GPT2_PLACES),
    "gpt_bigcode_every_head": decoder(
        "gpt_bigcode", {"n_layer": 1, "multi_query": False}, sizes=GPT2_SIZES, **GPT2_PLACES
    ),
    "mpt": decoder(
        "mpt",
        sizes={
            "vocab_size": 61,
            "d_model": 36,
            "n_heads": 6,
            "n_layers": 1,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.5},
        },
        layers="blocks",
        attention="attn",
        out_proj="attn.out_proj",
    ),
    "deepseek_v2": decoder("deepseek_v2", ONE_LAYER, DEEPSEEK),
    "deepseek_v2_lite": decoder("deepseek_v2", ONE_LAYER, DEEPSEEK, {"q_lora_rank": None}, {"rope_parameters": YARN}),
    "deepseek_v3": decoder(
        "deepseek_v3",
        ONE_LAYER,
        DEEPSEEK,
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3_halves": decoder(
        "deepseek_v3", ONE_LAYER, DEEPSEEK, {"rope_interleave": False, "attention_bias": True}
    ),
    "deepseek_v32": decoder("deepseek_v32", ONE_LAYER, DEEPSEEK, INDEXER, {"rope_parameters": YARN}),
    "deepseek_v4": decoder(
        "deepseek_v4", DEEPSEEK_V4, {"rope_parameters": YARN, "compress_rope_theta": 700.0}, out_proj="self_attn.o_b_proj"
    ),
    # A layer that attends to all keys, and one that attends to two blocks.
    "minimax_m3": decoder("minimax_m3_vl_text", MINIMAX_M3, auto_class=AutoModel),
    "glm_moe_dsa": decoder("glm_moe_dsa", ONE_LAYER, DEEPSEEK, INDEXER),
    "axk2": decoder("axk2", ONE_LAYER, DEEPSEEK, INDEXER),
    "hy_v4": decoder("hy_v4", ONE_LAYER, DEEPSEEK, INDEXER, {"mlp_layer_types": ["dense"]}),
    # A layer with rotary positions, and one without.
    "mistral_large4": decoder(
        "mistral_large4_text", DEEPSEEK, INDEXER, {"no_rope_layers": [1, 0]}, auto_class=AutoModel
    ),
    # A layer with an indexer, and one with a window.
    "dots3_note": decoder("dots3_note_text", DEEPSEEK, INDEXER, DOTS3, auto_class=AutoModel),
    # Three blocks of two keys, and the keys after the last block.
    "qwen4_exp": decoder("qwen4_exp_text", ONE_LAYER, QWEN4, auto_class=AutoModel),
    "qwen4_exp_image": decoder("qwen4_exp_text", ONE_LAYER, QWEN4, auto_class=AutoModel, inputs=beside_an_image),
    "bailing_hybrid": decoder("bailing_hybrid", ONE_LAYER, DEEPSEEK, BAILING),
    # Two attentions in a layer, which are recorded as layers.
    "longcat_flash": decoder(
        "longcat_flash", DEEPSEEK, LONGCAT, layers="layers.0.self_attn", attention="", out_proj="o_proj"
    ),
    # Pools of two keys.
    "glm5_next": decoder("glm5_next_text", ONE_LAYER, DEEPSEEK, INDEXER, GLM5_NEXT, auto_class=AutoModel),
    "bert": encoder("bert", **BERT),
    "bert_decoder": decoder("bert", ONE_LAYER, {"is_decoder": True}, sizes=UNGROUPED, **BERT),
    "roberta": encoder("roberta", ONE_LAYER, **BERT),
    "distilbert": encoder(
        "distilbert",
        sizes={
            "vocab_size": 61,
            "dim": 32,
            "hidden_dim": 24,
            "n_layers": 1,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
        layers="transformer.layer",
        attention="attention",
        out_proj="attention.out_lin",
    ),
    "modernbert": encoder(
        "modernbert",
        {"local_attention": 6, "global_attn_every_n_layers": 2, "attention_bias": True},
        attention="attn",
        out_proj="attn.Wo",
    ),
    "nomic_bert": encoder("nomic_bert", ONE_LAYER, auto_class=AutoModel),
    "t5": encoder(
        "t5",
        **T5,
    ),
    "albert": encoder(
        "albert",
        ONE_LAYER,
        {"embedding_size": 8},
        layers="encoder.albert_layer_groups.0.albert_layers",
        attention="attention",
        out_proj="attention.dense",
    ),
    "mpnet": encoder(
        "mpnet",
        layers="encoder.layer",
        attention="attention.attn",
        out_proj="attention.attn.o",
    ),
    "roformer": encoder("roformer", ONE_LAYER, **BERT),
    "vit": image(
        "vit",
        {"qkv_bias": False},
        auto_class=AutoModelForImageClassification,
        layers="layers",
        attention="attention",
        out_proj="attention.o_proj",
    ),
    "beit": image(
        "beit",
        auto_class=AutoModelForImageClassification,
        layers="layers",
        attention="attention",
        out_proj="attention.o_proj",
    ),
    "blip_vision": image(
        "blip_vision_model", auto_class=BlipVisionModel, layers="encoder.layers", out_proj="self_attn.projection"
    ),
    "clip_text": decoder(
        "clip_text_model",
        ONE_LAYER,
        {"eos_token_id": 2},
        sizes=UNGROUPED,
        auto_class=CLIPTextModel,
        layers="encoder.layers",
        out_proj="self_attn.out_proj",
    ),
    "hunyuan": decoder("hunyuan_v1_dense", ONE_LAYER, HEAD_DIM, rope(rope_type="dynamic", factor=1.0, alpha=50.0)),
    "exaone4": decoder("exaone4", HEAD_DIM, ALTERNATING),
    "olmoe": decoder("olmoe", ONE_LAYER, {"clip_qkv": 0.7, "num_experts": 2, "num_experts_per_tok": 1}),
    "granite_swa": decoder("granite_swa", ALTERNATING, {"attention_multiplier": 0.3}),
    # Its first layer is a recurrence.
    "qwen3_next": decoder(
        "qwen3_next",
        {"layer_types": ["full_attention"], "num_hidden_layers": 1, "head_dim": 16},
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
        rope(partial_rotary_factor=0.25),
    ),
    "afmoe": decoder("afmoe", HEAD_DIM, ALTERNATING, {"num_dense_layers": 2, "attention_bias": True}),
    # A gate for each head, and other heads in the second layer.
    "laguna": decoder(
        "laguna",
        HEAD_DIM,
        ALTERNATING,
        {"num_attention_heads_per_layer": [4, 2], "mlp_layer_types": ["dense", "dense"]},
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    # 13 positions are 3 and more times 4.
    "ministral3": decoder(
        "ministral3",
        ONE_LAYER,
        HEAD_DIM,
        {"rope_parameters": YARN | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}},
    ),
    # A chunk of keys and norms after rotary positions in the first layer, scaled queries in the second.
    "llama4": decoder(
        "llama4_text",
        HEAD_DIM,
        {"no_rope_layers": [1, 0], "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.5, "moe_layers": [4]},
        {"num_local_experts": 2, "intermediate_size_mlp": 24},
        layers="model.layers",
    ),
    "qwen2_vl": decoder(
        "qwen2_vl_text",
        ONE_LAYER,
        rope(mrope_section=[2, 1, 1]),
        auto_class=AutoModel,
        inputs=beside_an_image,
    ),
    "qwen3_vl": decoder(
        "qwen3_vl_text",
        ONE_LAYER,
        HEAD_DIM,
        rope(mrope_section=[2, 2, 2]),
        auto_class=AutoModel,
        inputs=beside_an_image,
    ),
    "dinov3": image(
        "dinov3_vit",
        {"num_register_tokens": 2},
        auto_class=AutoModel,
        layers="layer",
        attention="attention",
        out_proj="attention.o_proj",
        positions=centres,
    ),
    "gemma3n": decoder("gemma3n_text", HEAD_DIM, GEMMA3N, {"laurel_rank": 4}),
    "gemma4": decoder(
        "gemma4_text",
        HEAD_DIM,
        GEMMA3N,
        {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "bitnet": decoder("bitnet", ONE_LAYER),
    "moshi": decoder(
        "moshi",
        ONE_LAYER,
        HEAD_DIM,
        {"sliding_window": 5, "ffn_dim": 24, "audio_vocab_size": 61},
        out_proj="self_attn.o_proj.linear",
        inputs=in_a_window,
    ),
    "kosmos_2": decoder(
        "kosmos_2_text_model",
        {"pad_token_id": 0},
        sizes={
            "vocab_size": 61,
            "embed_dim": 32,
            "ffn_dim": 24,
            "layers": 1,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
        auto_class=Kosmos2TextForCausalLM,
        layers="model.layers",
        out_proj="self_attn.out_proj",
    ),
    "rf_detr_dinov2": image(
        "rf_detr_dinov2",
        {"out_features": ["stage1"], "num_windows": 1},
        auto_class=RfDetrDinov2Backbone,
        layers="encoder.layer",
        attention="attention",
        out_proj="attention.o_proj",
    ),
    # Biases of the projections.
    "videomae": encoder(
        "videomae",
        ONE_LAYER,
        {"image_size": 8, "patch_size": 4, "num_frames": 4, "num_labels": 2},
        auto_class=AutoModelForVideoClassification,
        layers="encoder.layer",
        attention="attention.attention",
        out_proj="attention.output.dense",
        inputs=lambda config: {"pixel_values": torch.randn(2, config.num_frames, 3, 8, 8)},
    ),
    "gpt_neo": decoder(
        "gpt_neo",
        sizes={
            "vocab_size": 61,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
        },
        layers="h",
        attention="attn.attention",
        out_proj="attn.attention.out_proj",
    ),
    "whisper": encoder(
        "whisper",
        SEQ2SEQ,
        {"num_mel_bins": 6, "max_source_positions": 9, "max_target_positions": 16},
        sizes={},
        auto_class=AutoModelForSpeechSeq2Seq,
        layers="encoder.layers",
        out_proj="self_attn.out_proj",
        decoder=BART_DECODER,
        inputs=lambda config: {
            "input_features": torch.randn(2, config.num_mel_bins, 18),
            "decoder_input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        },
    ),
    "marian": encoder(
        "marian",
        SEQ2SEQ,
        {"max_position_embeddings": 64},
        sizes={},
        auto_class=AutoModelForSeq2SeqLM,
        layers="encoder.layers",
        out_proj="self_attn.out_proj",
        decoder=BART_DECODER,
    ),
    # Rotated in the other direction, and normalised after it.
    "nanochat": decoder("nanochat", ONE_LAYER, HEAD_DIM, rope()),
    "gemma4_vision": image(
        "gemma4_vision",
        {"head_dim": 12, "num_key_value_heads": 2, "hidden_activation": "gelu", "pooling_kernel_size": 3},
        auto_class=Gemma4VisionModel,
        layers="encoder.layers",
        out_proj="self_attn.o_proj.linear",
        inputs=lambda config: {
            "pixel_values": torch.randn(2, 9, 3 * config.patch_size**2),
            "pixel_position_ids": columns_and_rows().T.expand(2, -1, -1),
        },
        positions=lambda config: columns_and_rows().float(),
    ),
    # Positions are added to queries and keys, and images attend to texts.
    "sam3_detr_encoder": encoder(
        "sam3_detr_encoder",
        {"hidden_size": 16, "num_attention_heads": 2, "num_layers": 1, "intermediate_size": 8},
        sizes={},
        auto_class=Sam3DetrEncoder,
        separate=("q_proj", "k_proj", "v_proj"),
        named={"cross_attn": "cross_attn"},
        inputs=lambda config: {
            "vision_features": [torch.randn(2, 16, 3, 4)],
            "text_features": torch.randn(2, 5, 16),
            "vision_pos_embeds": [torch.randn(2, 16, 3, 4)],
        },
    ),
    # Keys and values of a coarser grid in the first stage, and wider layers in the second.
    "segformer": encoder(
        "segformer",
        {"num_encoder_blocks": 2, "depths": [1, 2], "hidden_sizes": [8, 12], "num_attention_heads": [2, 3]},
        {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [1, 1]},
        sizes={},
        auto_class=SegformerModel,
        layers="stages",
        attention="attention",
        out_proj="attention.o_proj",
        separate=("q_proj", "k_proj", "v_proj"),
        inputs=lambda config: {"pixel_values": torch.randn(2, 3, 16, 16)},
    ),
    # Windows of 3 by 3 in an image of 4 by 4, and all of it.
    "sam": encoder(
        "sam_vision_model",
        {"image_size": 16, "patch_size": 4, "window_size": 3, "global_attn_indexes": [1]},
        SMALL,
        auto_class=SamVisionModel,
        layers="vision_encoder.layers",
        attention="attn",
        out_proj="attn.proj",
        inputs=lambda config: {"pixel_values": torch.randn(2, 3, 16, 16)},
    ),
    "vitdet": encoder(
        "vitdet",
        {"image_size": [8, 12], "pretrain_image_size": 8, "patch_size": 4, "window_size": 2},
        {"window_block_indices": [0], "use_relative_position_embeddings": True},
        SMALL,
        auto_class=VitDetModel,
        layers="encoder.layer",
        attention="attention",
        out_proj="attention.proj",
        inputs=lambda config: {"pixel_values": torch.randn(2, 3, 8, 12)},
    ),
    # An image of 4 by 4 in windows of 2 by 2, shifted in the second layer, and all of one of 2 by 2.
    "swin": encoder("swin", SWIN, **SWIN_PLACES, out_proj="attention.o_proj"),
    "swinv2": encoder(
        "swinv2", SWIN, {"pretrained_window_sizes": [3, 0]}, **SWIN_PLACES, out_proj="attention.output.dense"
    ),
    "wav2vec2_conformer": encoder(
        "wav2vec2-conformer",
        {"vocab_size": 61, "conv_dim": [8] * 7},
        SMALL,
        auto_class=Wav2Vec2ConformerModel,
        layers="encoder.layers",
        out_proj="self_attn.linear_out",
        inputs=lambda config: {"input_values": torch.randn(2, 4000)},
    ),
    "wav2vec2_bert": encoder(
        "wav2vec2-bert",
        {"vocab_size": 61, "feature_projection_input_dim": 8},
        {"left_max_position_embeddings": 4, "right_max_position_embeddings": 2},
        SMALL,
        ONE_LAYER,
        auto_class=Wav2Vec2BertModel,
        layers="encoder.layers",
        out_proj="self_attn.linear_out",
        inputs=lambda config: {"input_features": torch.randn(2, LENGTH, 8)},
    ),
    "parakeet": encoder(
        "parakeet_encoder",
        {"num_mel_bins": 16, "subsampling_conv_channels": 8},
        SMALL,
        ONE_LAYER,
        auto_class=ParakeetEncoder,
        inputs=lambda config: {"input_features": torch.randn(2, 80, 16)},
    ),
    # As published, and with what the first version of it has.
    "deberta_v2": encoder(
        "deberta-v2",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 6},
        {"share_att_key": True, "norm_rel_ebd": "layer_norm"},
        SMALL,
        **DEBERTA,
    ),
    "deberta_v2_distances": encoder(
        "deberta-v2",
        {"relative_attention": True, "pos_att_type": "p2c|c2p", "max_relative_positions": 8},
        SMALL,
        ONE_LAYER,
        **DEBERTA,
    ),
    "umt5": encoder(
        "umt5",
        **T5,
        decoder={
            "decoder": ("decoder.block", "layer.0.SelfAttention", "layer.0.SelfAttention.o"),
            "cross": ("decoder.block", "layer.1.EncDecAttention", "layer.1.EncDecAttention.o"),
        },
    ),
}
