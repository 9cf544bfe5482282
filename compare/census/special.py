"""What single models need beyond the general rules: fields of their configurations, inputs, and words for the table."""

import torch

CONFIGS = {
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gptj": {"rotary_dim": 4},
    "helium": {"head_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [32, 32]},
}

# Functions of the configuration.
INPUTS = {
    "siglip2_vision_model": lambda config: {
        "pixel_values": torch.randn(2, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    },
    "trocr": lambda config: {
        "input_ids": torch.randint(3, config.vocab_size, (2, 7)),
        "encoder_hidden_states": torch.randn(2, 9, config.d_model),
    },
}

# Model types that cannot be made here, and why.
UNMAKEABLE = {}

# What is missing, where the source of the attention class does not show it.
REASONS = {}
