"""What single models need beyond the general rules: fields of their configurations, and inputs."""

import math
import sys
from pathlib import Path

import torch

# What is shared with the tests of hf.
sys.path.append(str(Path(__file__).resolve().parents[3] / "tests" / "hf"))
import parts
import towers
from inputs import beside_an_image, in_a_window
from towers import grid
from versions import RECURRENT_LAYER, SOFTMAX_LAYER

# Two kinds of layers, and two layers that read keys and values of these.
SHARED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
GEMMA4 = {"global_head_dim": 20, "num_global_key_value_heads": 3, "attention_k_eq_v": True}
# Windows that divide no image of 4 x 4 patches, and one layer without.
SAM = {"window_size": 3, "global_attn_indexes": [1]}
# Windows that are not shifted, whose mask the caller makes, and a stage of one window.
SWIN = {"depths": [1, 1], "window_size": 2}
RESNET = {"backbone_config": {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}}
SMALL_TIMM = {
    "model_type": "timm_wrapper", "architecture": "mobilenetv3_small_050", "do_pooling": True, "num_labels": 9,
    "model_args": None,
}
# Keys of a grid that is coarser than that of the queries, in the first two stages.
REDUCED = {
    "num_encoder_blocks": 4, "depths": [2, 1, 1, 1], "hidden_sizes": [12, 24, 36, 48], "num_attention_heads": [1, 2, 3, 6],
    "sr_ratios": [4, 2, 1, 1], "sequence_reduction_ratios": [4, 2, 1, 1], "decoder_hidden_size": 24,
}
# Many heads, since the scores of few heads are often 0 for several keys.
INDEXER = {"index_topk": 4, "index_n_heads": 16, "mlp_layer_types": ["dense", "dense"]}
CONFIGS = {
    "axk2": INDEXER,
    # More blocks than are chosen, in the second layer.
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 3,
        "mlp_layer_types": ["dense", "dense"],
    },
    "hy_v4": INDEXER,
    "mistral_large4_text": INDEXER | {"no_rope_layers": [1, 0]},
    "dots3_note_text": INDEXER | {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "n_shared_experts": 1,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 14,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 7,
    },
    "bailing_hybrid": {"head_dim": 12, "short_conv_kernel_size": 3, "num_mtp_layers": 0},
    "codegen": {"rotary_dim": 4, "n_head": 4, "n_embd": 32},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 0.7}, "n_heads": 6},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v32": INDEXER,
    # A layer of each kind, with more keys than are chosen.
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["moe", "moe", "moe"],
        "sliding_window": 3,
        "o_groups": 2,
        "o_lora_rank": 6,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 3,
        "hc_mult": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "embedding_gemma2_text": {"global_head_dim": 20},
    "diffusion_gemma_text": {
        "global_head_dim": 20,
        "num_global_key_value_heads": 3,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma3n_text": SHARED,
    "gemma3n_vision": {"architecture": "mobilenetv3_small_050", "model_args": None},
    "gemma4_text": SHARED | GEMMA4,
    "gemma4_unified_text": SHARED | GEMMA4,
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "position_embedding_type": "rotary"},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 12},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "granitemoehybrid": {
        "layer_types": [RECURRENT_LAYER, SOFTMAX_LAYER],
        "mamba_n_heads": 12,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {"n_groups": 1, "mamba_head_dim": 16, "head_dim": 16},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_sliding_attention_heads": 4,
        "sliding_window": 5,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mobilebert": {"embedding_size": 36, "intra_bottleneck_size": 24},
    "moonshine": {"hidden_size": 120, "encoder_num_key_value_heads": 6, "decoder_num_key_value_heads": 6},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 48},
    "esmc": {"num_key_value_heads": 6, "head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 12, "mamba_d_head": 8, "key_multiplier": 0.4},
    "glm_moe_dsa": INDEXER,
    "glm5_next_text": INDEXER | {"qk_rope_head_dim": 0, "index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "gptj": {"rotary_dim": 4},
    "blip_text_model": {"encoder_hidden_size": 36},
    "conditional_detr": RESNET,
    "eomt_dinov3": {"num_queries": 7, "num_blocks": 2, "num_register_tokens": 2},
    "florence_vision": {
        "depths": [2, 1], "embed_dim": [24, 48], "num_heads": [3, 6], "num_groups": [3, 6], "window_size": 4,
        "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True],
    },
    "maskformer": {"backbone_config": RESNET["backbone_config"] | {"out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "sapiens2": {"num_register_tokens": 3, "num_key_value_heads_per_layer": [6, 2]},
    "videoprism_vision_model": {"tubelet_size": [1, 8, 8], "num_spatial_layers": 2, "num_temporal_layers": 2, "num_frames": 4},
    "eomt": {"num_queries": 7, "num_blocks": 1, "num_register_tokens": 2},
    "glpn": REDUCED,
    "mllama_vision_model": {
        "attention_heads": 6, "num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 96,
    },
    # Few layers of random numbers, which are finite.
    "pe_audio_encoder": {"dac_config": {
        "model_type": "dac", "downsampling_ratios": [8, 16], "encoder_hidden_size": 8, "codebook_dim": 16,
    }},
    "pe_video_encoder": {"vision_config": SMALL_TIMM},
    "pix2struct_text_model": {"d_kv": 8, "initializer_range": 0.02},
    "pvt": REDUCED,
    "pvt_v2": REDUCED,
    "segformer": REDUCED,
    "tvp": RESNET,
    "xclip_vision_model": {"mit_hidden_size": 48, "mit_num_hidden_layers": 2, "mit_intermediate_size": 40},
    "dab-detr": RESNET,
    "detr": RESNET,
    "table-transformer": RESNET,
    "dinov3_vit": {"num_register_tokens": 3},
    "helium": {"head_dim": 8},
    "longcat_flash": {"head_dim": 16, "qk_head_dim": 32, "zero_expert_num": 1},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [6, 4],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "llama4_text": {"floor_scale": 4, "no_rope_layers": [1, 0]},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "instructblip_qformer": {"encoder_hidden_size": 36},
    "instructblipvideo_qformer": {"encoder_hidden_size": 36},
    "blip_2_qformer": {"encoder_hidden_size": 36},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "seggpt": {"image_size": [32, 16], "pretrain_image_size": 32, "merge_index": 0, "intermediate_hidden_state_indices": [0, 1]},
    "vitdet": {"use_relative_position_embeddings": True, "window_block_indices": [0], "window_size": 3},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 6,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "sew-d": {"position_buckets": 8, "max_position_embeddings": 12},
    "wav2vec2-bert": {
        "vocab_size": 99,
        "feature_projection_input_dim": 16,
        "left_max_position_embeddings": 4,
        "right_max_position_embeddings": 2,
    },
    "wav2vec2-conformer": {"vocab_size": 99},
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [32, 32]},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
    },
    "mimi": {"upsample_groups": 48},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 48},
    "mimi_decoder": {"upsample_groups": 48},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "vitpose_backbone": {"part_features": 8, "num_experts": 1},
}

CONFIGS |= towers.CONFIGS | parts.CONFIGS

# Options that have other values than yes and no.
OPTIONS = dict.fromkeys(
    "diffusion_gemma_text gemma4_text gemma4_unified_text".split(), {"use_bidirectional_attention": "all"}
)
SAM_IMAGES = (
    "deepseek_ocr2_sam_vision_model got_ocr2_vision pp_formulanet_vision sam_hq_vision_model sam_vision_model slanext_vision"
    " unlimited_ocr_sam_vision_model"
).split()
CONFIGS |= dict.fromkeys(SAM_IMAGES, SAM)
CONFIGS |= {"sam3_vit_model": {"image_size": 16, "pretrain_image_size": 16, "patch_size": 4, "window_size": 4}}
CONFIGS |= dict.fromkeys("donut-swin maskformer-swin swin".split(), SWIN | {"num_heads": [3, 6]})
CONFIGS |= {
    "clap_audio_model": SWIN | {
        "num_attention_heads": [3, 6], "patch_embeds_hidden_size": 24, "hidden_size": 48, "spec_size": 32, "patch_size": 8,
        "patch_stride": [8, 8], "num_mel_bins": 16,
    },
    "swin2sr": SWIN | {"num_heads": [3, 6], "image_size": 8, "patch_size": 1},
    "swinv2": SWIN | {"num_heads": [3, 6], "pretrained_window_sizes": [0, 3]},
}

LINEAR = {"linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 12, "linear_value_head_dim": 10}
for _name in "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text".split():
    CONFIGS[_name] = LINEAR
CONFIGS["qwen4_exp_text"] = LINEAR | {
    "output_gate_type": "sigmoid", "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 18,
    "indexer_budget": 4, "indexer_compress_ratio": 2, "hc_lowrank": 4,
}

# Sections of rotary positions on three axes, for pairs of tiny heads.
SECTIONS = {
    "qwen2_5_omni_talker": [4, 2, 2],
    "glm4v_moe_text": [2, 1, 1],
    "glm4v_text": [2, 1, 1],
    "glm_ocr_text": [2, 1, 1],
    "glm_image_text": [2, 1, 1],
    "cosmos3_edge_text": [4, 2, 2],
    "paddleocr_vl_text": [4, 2, 2],
    "qwen2_5_omni_text": [2, 1, 1],
    "qwen2_5_vl_text": [2, 1, 1],
    "qwen2_vl_text": [2, 1, 1],
    "qwen3_5_moe_text": [2, 1, 1],
    "qwen3_5_text": [2, 1, 1],
    "qwen3_omni_moe_text": [2, 1, 1],
    "qwen3_vl_moe_text": [4, 2, 2],
    "qwen3_vl_text": [4, 2, 2],
    "qwen4_exp_text": [4, 2, 2],
}
# Parts of wide heads.
PARTS = {"qwen3_5_text": 0.5, "qwen3_5_moe_text": 0.5, "glm4v_moe_text": 1.0}
for _name, _sections in SECTIONS.items():
    _rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _sections}
    _part = {"partial_rotary_factor": PARTS[_name]} if _name in PARTS else {}
    CONFIGS[_name] = CONFIGS.get(_name, {}) | {"rope_parameters": _rope | _part}


def qformer(config):
    return {
        "query_embeds": torch.randn(2, 7, config.hidden_size),
        "encoder_hidden_states": torch.randn(2, 9, config.encoder_hidden_size),
    }


def instructed_qformer(config):
    instruction = torch.randint(3, config.vocab_size, (2, 5))
    return qformer(config) | {"input_ids": instruction, "attention_mask": torch.ones(2, 12, dtype=torch.long)}


def after_class_and_registers(config):
    return after_zeros(1 + config.num_register_tokens)


def after_zeros(tokens):
    """The centres of 4 x 4 patches, after other tokens at 0."""
    centres = (grid(4, 4) + 0.5) / 4 * 2 - 1
    return torch.cat([torch.zeros(2, tokens), 2 * math.pi * centres], dim=1)


# Positions on axes if the inputs do not have them, (A, T), and the lengths of sequences that are packed in one row.
MERGED = (
    "cohere_compass_vision glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision"
    " ernie4_5_vl_moe_vision qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision"
    " qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision"
).split()
POSITIONS = {
    "dinov3_vit": after_class_and_registers,
    "eomt_dinov3": lambda config: after_zeros(config.num_queries + 1 + config.num_register_tokens),
    "sapiens2": after_class_and_registers,
    "pixtral": lambda config: grid(4, 4).repeat(1, 2),
    "sam3_vit_model": lambda config: grid(4, 4).flip(0),
} | dict.fromkeys(MERGED, towers.two_images) | towers.POSITIONS
LENGTHS = {"pixtral": [16, 16]} | dict.fromkeys(MERGED, towers.LENGTHS) | towers.PACKED

# Functions of the configuration.
INPUTS = dict.fromkeys(SECTIONS, beside_an_image) | towers.INPUTS | parts.INPUTS | {
    "audioflamingo3_encoder": lambda config: {
        "input_features": torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions),
        "input_features_mask": torch.ones(2, 2 * config.max_source_positions, dtype=torch.long),
    },
    "blip_2_qformer": qformer,
    "instructblip_qformer": instructed_qformer,
    "instructblipvideo_qformer": instructed_qformer,
    "siglip2_vision_model": lambda config: {
        "pixel_values": torch.randn(2, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    },
    "blip_text_model": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "encoder_hidden_states": torch.randn(2, 9, config.encoder_hidden_size),
    },
    "blt_local_decoder": lambda config: {
        "inputs_embeds": torch.randn(2, 13, config.hidden_size),
        "patch_embeds": torch.randn(2, 5, config.hidden_size_global),
        "attention_mask": towers.causal(config)["attention_mask"],
    },
    "blt_local_encoder": lambda config: towers.causal(config) | {
        "num_patches": 5, "patch_ids": (torch.arange(13) // 3).expand(2, -1),
    },
    "clap_audio_model": lambda config: {"input_features": torch.randn(2, 1, 32, config.num_mel_bins)},
    "canary_decoder": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "encoder_hidden_states": torch.randn(2, 9, config.hidden_size),
    },
    "dia_decoder": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7, config.num_channels)),
        "encoder_hidden_states": torch.randn(2, 9, config.cross_hidden_size),
    },
    "git": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "pixel_values": torch.randn(2, 3, config.vision_config.image_size, config.vision_config.image_size),
    },
    "idefics": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 13)),
        "attention_mask": torch.ones(2, 13, dtype=torch.long),
        "pixel_values": torch.randn(2, 1, 3, config.vision_config.image_size, config.vision_config.image_size),
        "image_attention_mask": torch.ones(2, 13, 1, dtype=torch.long),
    },
    "deepseek_ocr2_encoder": lambda config: {"inputs_embeds": torch.randn(2, 13, config.hidden_size), "num_patches": 7},
    "florence_vision": lambda config: {"hidden_states": torch.randn(2, 3, 32, 32)},
    "molmo2_adapter": lambda config: {
        "image_features": torch.randn(2, 16, 2 * config.hidden_size), "pooled_patches_idx": torch.arange(32).view(8, 4),
    },
    "unlimited_ocr_vision_encoder": lambda config: {"patch_embeds": torch.randn(2, config.hidden_size, 4, 4)},
    "idefics2_perceiver": lambda config: {
        "context": torch.randn(2, 9, config.hidden_size), "attention_mask": torch.ones(2, 9, dtype=torch.long),
    },
    "kyutai_speech_to_text": lambda config: {
        "inputs_embeds": torch.randn(2, 13, config.hidden_size), "attention_mask": in_a_window(config)["attention_mask"],
    },
    "mllama_vision_model": lambda config: {
        "pixel_values": torch.randn(2, 1, 4, 3, config.image_size, config.image_size),
        "aspect_ratio_ids": torch.full((2, 1), 6),
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
    },
    "patchtst": lambda config: {
        "past_values": torch.randn(2, config.context_length, config.num_input_channels),
    },
    "pocket_tts_audio_tokenizer_decoder": lambda config: {"latents": torch.randn(2, config.hidden_size, 7)},
    "mimi_decoder": lambda config: {"latents": torch.randn(2, config.hidden_size, 7)},
    "moshi": in_a_window,
    "musicgen_decoder": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2 * config.num_codebooks, 7)),
        "encoder_hidden_states": torch.randn(2, 9, config.hidden_size),
    },
    "pe_audio_video_encoder": lambda config: {
        "input_values": torch.randn(2, 1, 640), "pixel_values_videos": torch.randn(2, 5, 3, 32, 32),
    },
    "pe_video_encoder": lambda config: {"pixel_values_videos": torch.randn(2, 5, 3, 32, 32)},
    "pix2struct_text_model": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "encoder_hidden_states": torch.randn(2, 9, config.hidden_size),
    },
    "pp_formulanet_text": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "encoder_hidden_states": torch.randn(2, 9, config.hidden_size),
    },
    "seggpt": lambda config: dict.fromkeys(
        ("pixel_values", "prompt_pixel_values", "prompt_masks"), torch.randn(2, 3, config.image_size[0] // 2, config.image_size[1])
    ),
    "vilt": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "pixel_values": torch.randn(2, 3, config.image_size, config.image_size),
    },
    "voxtral_realtime_text": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 13)),
        "attention_mask": torch.ones(2, 13, dtype=torch.long),
        "t_cond": torch.randn(1, 1, config.hidden_size),
    },
    "xclip": lambda config: {
        "input_ids": torch.randint(3, config.text_config.vocab_size, (2, 7)),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "pixel_values": torch.randn(2, 8, 3, config.vision_config.image_size, config.vision_config.image_size),
    },
    "xclip_vision_model": lambda config: {
        "pixel_values": torch.randn(2 * config.num_frames, 3, config.image_size, config.image_size),
    },
    "trocr": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "encoder_hidden_states": torch.randn(2, 9, config.d_model),
    },
}

# Models that make masks which a caller of this crate makes.
MASKED = {"blip_text_model", "deepseek_ocr2_encoder", "eomt", "eomt_dinov3", "git", "mllama_vision_model"}

# Models whose tensors have the time before the batch.
TIME_FIRST = {"fsmt"}

# Models that some versions run right only with a cache: layers without keys read it, or its length is their position.
CACHED = {"gemma3n", "gemma3n_text", "imagegpt"}
