"""Inputs of encoders of images and sound that take several of them in one row of tokens, and their positions."""

import torch

# Rows and columns of two images, and the sizes of the images as (time, height, width).
GRIDS = torch.tensor([[1, 4, 4], [1, 2, 4]])
LENGTHS = [16, 8]


def grid(height, width):
    """Rows and columns of the patches of an image."""
    return torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")).flatten(1)


def merged(height, width):
    """The same, two by two patches after the other."""
    return grid(height, width).reshape(2, height // 2, 2, width // 2, 2).transpose(2, 3).flatten(1)


def two_images(_):
    return torch.cat([merged(4, 4), merged(2, 4)], dim=1)


def with_time(_):
    return torch.cat([torch.zeros(1, 24, dtype=torch.long), two_images(_)])


def rows_in_order(_):
    """Columns before rows, of patches in the order of a text."""
    return torch.cat([grid(4, 4), grid(2, 4)], dim=1).flip(0)


def with_class_tokens(_):
    """Columns before rows, which count from 1; a class token at (0, 0) is before each image."""
    nothing = torch.zeros(2, 1, dtype=torch.long)
    return torch.cat([nothing, merged(4, 4).flip(0) + 1, nothing, merged(2, 4).flip(0) + 1], dim=1)


def one_image(_):
    """Columns before rows of 4 x 4 patches, which count from 1; a class token at (0, 0) is after them."""
    return torch.cat([grid(4, 4).flip(0) + 1, torch.zeros(2, 1, dtype=torch.long)], dim=1)


def patches(config, name="grid_thw", **others):
    """Flat patches of two images."""
    number = lambda field, default: getattr(config, field, None) or default
    channels = number("num_channels", number("in_channels", 3))
    temporal = number("temporal_patch_size", number("patch_temporal", 1))
    size = channels * temporal * config.patch_size**2
    return {"pixel_values": torch.randn(24, size), name: GRIDS} | others


def squares(config, **others):
    """Patches (N, C, P, P)."""
    patch = config.patch_size
    return {"pixel_values": torch.randn(24, 3, patch, patch), "grid_thw": GRIDS} | others


def merged_patches(config):
    """Two by two patches together, with the channels last."""
    width = 2 * config.patch_size
    return {"pixel_values": torch.randn(6, width, width, 3), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 2]])}


def wide_image(config):
    """Both images side by side, as a picture of the height of one patch."""
    patch = config.patch_size
    return {"pixel_values": torch.randn(1, 3, patch, 24 * patch), "target_sizes": torch.tensor([[4, 4], [2, 4]])}


def flattened_patches(config):
    """Patches with the numbers of their rows and columns before them."""
    places = torch.stack([torch.arange(9) // 3 + 1, torch.arange(9) % 3 + 1], dim=1).float().expand(2, -1, -1)
    return {"flattened_patches": torch.cat([places, torch.randn(2, 9, config.patch_embed_hidden_size)], dim=2)}


def sounds(config):
    """Spectrograms of two lengths, one after the other."""
    first = 2 * config.n_window
    return {"input_features": torch.randn(config.num_mel_bins, first + 60), "feature_lens": torch.tensor([first, 60])}


def causal(config):
    """Inputs with a mask that the whole model makes."""
    mask = torch.full((13, 13), torch.finfo(torch.float).min).triu(1)
    return {"inputs_embeds": torch.randn(2, 13, config.hidden_size), "attention_mask": mask.expand(2, 1, 13, 13)}


INPUTS = {
    "blt_global_transformer": causal,
    "cosmos3_edge_vision": patches,
    "gemma4_vision": lambda config: {
        "pixel_values": torch.randn(2, 16, 3 * config.patch_size**2),
        "pixel_position_ids": grid(4, 4).flip(0).T.expand(2, -1, -1),
    },
    "glm_image_vision": patches,
    "hunyuan_vl_vision": patches,
    "inkling2_vision": merged_patches,
    "kimi_k25_vision": squares,
    "kosmos_2_5_vision_model": flattened_patches,
    "lfm3_vl_vision": patches,
    "llama4_vision_model": lambda config: {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)},
    "minicpm_ocr_vision": wide_image,
    "minicpmv4_6_vision": wide_image,
    "minicpmv4_7_vision": wide_image,
    "minimax_m3_vl_vision": patches,
    "molmo2_vision": lambda config: {"pixel_values": torch.randn(2, 16, 3 * config.patch_size**2)},
    "moonshine_streaming_encoder": lambda config: {
        "input_values": torch.randn(2, 20 * int(config.frame_ms * config.sample_rate / 1000)),
        "attention_mask": torch.ones(2, 20 * int(config.frame_ms * config.sample_rate / 1000), dtype=torch.long),
    },
    "muse_glimmer_vision": patches,
    "muse_spark_vision": patches,
    "paddleocr_vl_vision": lambda config: {
        "pixel_values": torch.randn(1, 24, 3, config.patch_size, config.patch_size), "grid_thw": GRIDS,
    },
    "pix2struct_vision_model": flattened_patches,
    "qwen2_5_omni_audio_encoder": sounds,
    "qwen3_asr_encoder": lambda config: {
        "input_features": torch.randn(2, config.num_mel_bins, 100),
        "input_features_mask": torch.ones(2, 100, dtype=torch.long),
    },
    "qwen3_omni_moe_audio_encoder": sounds,
    "video_llama_3_vision": lambda config: patches(config, merge_sizes=torch.tensor([2, 2])),
}



def rows_from_one(inputs):
    """Positions of one image in rows, counted from 1."""
    return rows_in_order(inputs) + 1


# Positions on axes of what the inputs are.
POSITIONS = {
    "exaone4_5_vision": two_images,
    "gemma4_vision": lambda _: grid(4, 4).flip(0),
    "inkling2_vision": with_class_tokens,
    "kimi_k25_vision": rows_in_order,
    "lfm3_vl_vision": two_images,
    "llama4_vision_model": one_image,
    "minimax_m3_vl_vision": with_time,
    "muse_glimmer_vision": rows_from_one,
    "muse_spark_vision": rows_from_one,
    "paddleocr_vl_vision": lambda inputs: rows_in_order(inputs).flip(0),
    "qwen2_5_omni_vision_encoder": two_images,
    "step3p5_vision": lambda _: grid(4, 4).flip(0),
    "video_llama_3_vision": two_images,
}
PACKED = {name: LENGTHS for name in POSITIONS | dict.fromkeys(
    "cosmos3_edge_vision glm_image_vision hunyuan_vl_vision minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision".split()
) if name not in ("gemma4_vision", "llama4_vision_model", "step3p5_vision")} | {
    "inkling2_vision": [17, 9],
    "qwen2_5_omni_audio_encoder": [50, 30],
    "qwen3_asr_encoder": [13, 13],
    "qwen3_omni_moe_audio_encoder": [13, 8],
}
CONFIGS = {
    "cosmos3_edge_vision": {"num_patches": 16},
    "hunyuan_vl_vision": {"max_image_size": 32, "num_key_value_heads": 6},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 20},
    "lfm3_vl_vision": {"layer_types": ["full_attention", "conv"]},
    "llama4_vision_model": {
        "projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48, "intermediate_size": 192,
    },
    "minicpm_ocr_vision": {"insert_layer_id": -1},
    "minicpmv4_6_vision": {"insert_layer_id": -1},
    "minicpmv4_7_vision": {"insert_layer_id": -1},
    "moonshine_streaming_encoder": {"sliding_windows": [[4, 2], [3, 0]], "num_key_value_heads": 2, "head_dim": 16},
    "molmo2_vision": {"num_position_embeddings": 16, "image_size": [32, 32], "patch_size": 8, "num_key_value_heads": 6},
    "muse_glimmer_vision": {"layer_types": ["window_attention", "full_attention"]},
    "muse_spark_vision": {"layer_types": ["window_attention", "full_attention"]},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 20, "d_kv": 8},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "qwen2_5_omni_audio_encoder": {"n_window": 50, "max_source_positions": 64},
    "qwen3_asr_encoder": {"n_window": 50, "downsample_hidden_size": 8, "max_position_embeddings": 13},
    "qwen3_omni_moe_audio_encoder": {"n_window": 50, "downsample_hidden_size": 8, "max_source_positions": 64},
}
